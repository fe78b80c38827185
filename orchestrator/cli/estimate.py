"""`estimate`: one run's memory and speed, predicted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cli.driving import CACHE_FOLDER
from orchestrator.cli.estimate_answer import Answer, answer, show
from orchestrator.cli.estimate_engine import EngineChoice, engine_choice, without_nvme
from orchestrator.cli.estimate_model import NamedModel, TracedShape, named_model, traced_shape
from orchestrator.cli.output import Output
from orchestrator.contract.config import DataSource, Layout, TrainSettings, TrialConfig
from orchestrator.contract.errors import SpecError, UsageError
from orchestrator.contract.units import format_bytes, parse_size
from orchestrator.placement.changes import helpful_changes
from orchestrator.placement.forecast import Forecaster, cached_tracer
from orchestrator.placement.platform import DEFAULT_BETWEEN_NODES, Platform, cpu_platform, table_platform
from orchestrator.placement.rows import uniform_rows
from orchestrator.report.tables import Table
from orchestrator.report.terminal import terminal_table
from orchestrator.space.knobs import BY_NAME, Setting, Shape, as_knobs, complete
from orchestrator.space.trials import why_illegal
from orchestrator.spec.document import parse_document
from orchestrator.spec.hardware import BETWEEN_NODES, BY_KEY, DEVICES
from orchestrator.spec.knobs import KnobFault, knob_value
from orchestrator.spec.places import Places, did_you_mean
from orchestrator.spec.sweep import KnobValue

DEFAULT_DEVICE = "a100-80"
_LEARNING_RATE = 1e-4
"""It decides neither bytes nor seconds."""
_UNTRACED = TracedShape(hidden_size=2, total_parameters=2)
"""Of a model that is yet to be traced: no knob that a trace depends on has a default that depends on the shape."""


@dataclass(frozen=True)
class EstimateRequest:
    """The command line. `knobs` as written."""

    model: str | None
    devices: int
    nodes: int
    device: str | None
    device_memory: str | None
    between_nodes: str | None
    sequence_length: int
    global_batch: int | None
    knobs: Mapping[str, str]
    engine: str | None = None
    quantization: str | None = None


def estimate(request: EstimateRequest, home: Path, as_json: bool, quiet: bool = False) -> None:
    """Predict the run of `request` and show it. Raises UsageError for what cannot be run or traced."""
    output = Output(as_json, quiet)
    result = estimated(request, home / CACHE_FOLDER, output)
    output.document(result)
    show(result, output)


def estimated(request: EstimateRequest, cache: Path, output: Output) -> Answer:
    """The answer to `request`; progress goes to `output`."""
    run = _Run(request)

    def progress(done: int, total: int) -> None:
        what = "structure" if total == 1 else "structures"
        output.say(f"Tracing {run.named.name}, once for each structure: {done} of {total} {what} done.")

    forecaster = Forecaster(
        run.platform,
        uniform_rows(request.sequence_length),
        cached_tracer(cache, progress=progress),
        lambda asked: run.choice.request(asked.model_copy(update={"task": run.named.task})),
        run.choice.job,
    )
    draft = run.config(run.point, _UNTRACED)
    profile = forecaster.profile(draft)
    shape = traced_shape(profile)
    config = run.config(run.point, shape)
    forecast = forecaster.forecast(config, replays=True)
    changes = [] if forecast.is_likely else helpful_changes(config, forecaster, lambda new: run.changed(new, shape))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(profile.versions.items()))
    return answer(
        model=run.named.name,
        device=run.device_name,
        knobs=run.choice.shown(config.knobs.model_dump(mode="json")),
        config=config,
        sizes=forecaster.parameters(config),
        forecast=forecast,
        platform=run.platform,
        changes=changes,
        assumptions=(*run.assumptions(config), f"as {versions} run it"),
    )


def list_devices(as_json: bool) -> None:
    """The device table, and `cpu`."""
    output = Output(as_json)
    output.document([{"device": device.key, "usable_memory_bytes": device.usable_memory_bytes} for device in DEVICES])
    rows = tuple((device.key, format_bytes(device.usable_memory_bytes), device.link) for device in DEVICES)
    output.show(terminal_table(Table("", ("device", "usable memory", "link"), rows, frozenset({"device", "link"}))))
    output.show("cpu: ranks on cores; give --device-memory, no speed is predicted.")


class _Run:
    """The run that a request asks for. Raises UsageError at birth for what does not exist."""

    def __init__(self, request: EstimateRequest) -> None:
        if request.model is None:
            raise UsageError("--model is missing: give a well-known name, a config.json or a checkpoint folder")
        if request.devices % request.nodes:
            raise UsageError(f"--devices {request.devices} cannot be spread evenly over --nodes {request.nodes}")
        knobs, to_nvme = without_nvme(request.knobs)
        self.point = _point(knobs)
        if request.quantization not in (None, "none"):
            self.point.setdefault("method", "lora")
        self.choice: EngineChoice = engine_choice(request.engine, request.quantization, self.point, to_nvme)
        self.named: NamedModel = named_model(request.model)
        self.device_name, self.platform = _platform(request)
        self._request = request

    def config(self, point: Mapping[str, KnobValue], shape: Shape) -> TrialConfig:
        """The trial of a point. Raises UsageError when it cannot be run."""
        request = self._request
        canonical = complete(point, Setting(shape, self.platform.device == "cuda"))
        micro_batch = canonical["micro_batch"]
        assert isinstance(micro_batch, int)
        rows = micro_batch * request.devices
        global_batch = request.global_batch or rows
        reason = why_illegal(canonical, global_batch, Layout(request.devices))
        if reason:
            raise UsageError(f"this cannot be run: {reason}")
        return TrialConfig(
            knobs=as_knobs(canonical),
            model=self.named.source,
            data=DataSource(directory="", digest="", sequence_length=request.sequence_length, packing=True),
            train=TrainSettings(global_batch=global_batch, learning_rate=_LEARNING_RATE),
            world_size=request.devices,
            gradient_accumulation=global_batch // rows,
            device=self.platform.device,
        )

    def changed(self, new: Mapping[str, KnobValue], shape: Shape) -> TrialConfig | None:
        """The trial with new values of knobs and the same global batch; None when it cannot be run."""
        if not self.choice.allows(new):
            return None
        before = self.config(self.point, shape)
        kept = {name: value for name, value in self.point.items() if name not in new}
        try:
            after = self.config({**kept, **new}, shape)
        except UsageError:
            return None
        if after.train.global_batch == before.train.global_batch:
            return after
        # without --global-batch a smaller micro-batch is made up for by accumulation
        rows = after.knobs.micro_batch * after.world_size
        if before.train.global_batch % rows:
            return None
        return after.model_copy(
            update={"train": before.train, "gradient_accumulation": before.train.global_batch // rows}
        )

    def assumptions(self, config: TrialConfig) -> list[str]:
        """What the answer takes for granted, for the reader."""
        request = self._request
        found = []
        if request.device is None:
            of_size = f" with {request.device_memory} of memory" if request.device_memory else ""
            found.append(f"device: {DEFAULT_DEVICE}{of_size}, since no --device is given")
        if request.nodes > 1:
            found.append(f"network between nodes: {request.between_nodes or DEFAULT_BETWEEN_NODES}")
        found.append(f"every row has {request.sequence_length} tokens, without padding")
        found.append(f"global batch {config.train.global_batch}, accumulation {config.gradient_accumulation}")
        found += self.choice.assumptions()
        if self.named.note:
            found.append(self.named.note)
        values = dict(config.knobs)
        for name in self.point:
            if values[name] is None:
                found.append(f"{name} has no effect here: it needs that {BY_NAME[name].condition}")
        return found


def _point(texts: Mapping[str, str]) -> dict[str, KnobValue]:
    """Values of the knobs that are given, by the rules of a spec; the method follows from them where it is not."""
    point: dict[str, KnobValue] = {}
    for name, text in texts.items():
        option = f"--{name.replace('_', '-')}"
        try:
            point[name] = knob_value(name, parse_document(text, Places("value")).value)
        except KnobFault as fault:
            raise UsageError(f"{option} {text}: {fault}") from fault
        except SpecError as error:
            raise UsageError(f"{option} {text}: {str(error).partition(': ')[2]}") from error
    if "method" not in point and point.keys() & {"lora_rank", "lora_targets"}:
        point["method"] = "lora"
    return point


def _platform(request: EstimateRequest) -> tuple[str, Platform]:
    """The device's name and the platform."""
    capacity_bytes = None if request.device_memory is None else _size(request.device_memory)
    ranks_on_node = request.devices // request.nodes
    if request.device == "cpu":
        return "cpu", cpu_platform(ranks_on_node, capacity_bytes)
    key = request.device or DEFAULT_DEVICE
    if key not in BY_KEY:
        raise UsageError(f"--device {key}: {did_you_mean(key, [*BY_KEY, 'cpu'])}")
    network = request.between_nodes or DEFAULT_BETWEEN_NODES
    if network not in BETWEEN_NODES:
        raise UsageError(f"--between-nodes {network}: {did_you_mean(network, BETWEEN_NODES)}")
    return key, table_platform(BY_KEY[key], ranks_on_node, capacity_bytes, BETWEEN_NODES[network])


def _size(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"--device-memory {text}: {error}") from error
    if size_bytes <= 0:
        raise UsageError(f"--device-memory {text}: must be more than nothing")
    return size_bytes
