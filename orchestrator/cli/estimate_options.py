"""The command line of `estimate`: its own options, and one for each knob, made from the knobs' declarations."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from orchestrator.cli.options import DEFAULT_HOME, AsJson, Home, Quiet
from orchestrator.space.knobs import KNOBS, Knob

ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A well-known or hub id, a config.json or a checkpoint folder.")
]
DeviceName = Annotated[str | None, typer.Option(metavar="KEY", help="Of the device table, or cpu; else a100-80.")]
Devices = Annotated[int, typer.Option(min=1, help="Devices of the run, one rank each.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes that they are spread over.")]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Of one device, e.g. 24GiB; else the table's usable memory.")
]
BetweenNodes = Annotated[
    str | None, typer.Option(metavar="KEY", help="The network between nodes; else infiniband-hdr.")
]
SequenceLength = Annotated[int, typer.Option(min=2, help="Tokens of every row.")]
GlobalBatch = Annotated[
    int | None, typer.Option(min=1, help="Rows of one optimizer step over all devices; else without accumulation.")
]
Engine = Annotated[
    str | None,
    typer.Option(metavar="WORD", help="deepspeed, fsdp or ddp; else deepspeed. A sweep runs DeepSpeed alone."),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="WORD",
        help="How frozen linear weights are stored: none, nf4, nf4_double or int8 (QLoRA); else none. Not in a sweep.",
    ),
]
_TO_NVME = " Here nvme too, in stage 3; not in a sweep."
ListDevices = Annotated[bool, typer.Option("--list-devices", help="List the device table.")]


def run(arguments: list[str]) -> None:
    """`brimful estimate` with these arguments."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(_with_knobs(_estimate))
    app(arguments, prog_name="brimful estimate")


def _estimate(  # smell: typer makes an option of each parameter
    model: ModelName = None,
    devices: Devices = 1,
    nodes: Nodes = 1,
    device: DeviceName = None,
    device_memory: DeviceMemory = None,
    between_nodes: BetweenNodes = None,
    sequence_length: SequenceLength = 2048,
    global_batch: GlobalBatch = None,
    engine: Engine = None,
    quantization: Quantize = None,
    list_devices: ListDevices = False,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **knobs: str | None,
) -> None:
    """Predict one run's memory and speed, without a device: every byte by phase and term, whether it fits, and the
    cheapest single change that would make it fit."""
    from orchestrator.cli.estimate import EstimateRequest, estimate
    from orchestrator.cli.estimate import list_devices as show_devices

    if list_devices:
        show_devices(as_json)
        return
    request = EstimateRequest(
        model=model,
        devices=devices,
        nodes=nodes,
        device=device,
        device_memory=device_memory,
        between_nodes=between_nodes,
        sequence_length=sequence_length,
        global_batch=global_batch,
        knobs={name: text for name, text in knobs.items() if text is not None},
        engine=engine,
        quantization=quantization,
    )
    estimate(request, home, as_json, quiet)


def _with_knobs(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with an option for each knob in the place of its `**knobs`."""
    own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters = [*own, *(_parameter(knob) for knob in KNOBS)]

    def command(**given: Any) -> None:
        function(**given)

    command.__doc__ = function.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    setattr(command, "__signature__", inspect.Signature(parameters))  # noqa: B010 - functions declare no such attribute
    return command


def _parameter(knob: Knob) -> inspect.Parameter:
    condition = "" if knob.condition == "always" else f" Only where {knob.condition}."
    beyond = _TO_NVME if knob.name.startswith("offload_") else ""
    text = f"{knob.meaning}{condition}{beyond}"
    option = typer.Option(f"--{knob.name.replace('_', '-')}", metavar="VALUE", help=text)
    return inspect.Parameter(
        knob.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )
