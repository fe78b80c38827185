"""`plan` and `validate`: the way of `run` up to the first trial."""

import tempfile
from contextlib import closing
from pathlib import Path

from pydantic import JsonValue

from orchestrator import wiring
from orchestrator.cli.output import Output
from orchestrator.contract.config import Frozen
from orchestrator.contract.facts import Facts
from orchestrator.contract.units import format_bytes, format_duration
from orchestrator.placement.preflight import preflight
from orchestrator.report.tables import NOTHING, Table
from orchestrator.report.terminal import terminal_table
from orchestrator.space.candidates import Candidate, Space, build_space
from orchestrator.spec.load import LoadedSpec, load_spec
from orchestrator.spec.sweep import BudgetSection

SHOWN_CANDIDATES = 12
_SIZE_KNOBS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)


class PlanCandidate(Frozen):
    """One candidate of a plan."""

    candidate: str
    label: str
    is_baseline: bool
    config: dict[str, JsonValue]
    world_size: int
    gradient_accumulation: int


class Plan(Frozen):
    """What `run` would do. `illegal` counts points by reason."""

    name: str
    trials: int
    """How many trials the budget and the space allow."""
    candidates: tuple[PlanCandidate, ...]
    """The baseline first; the sampler chooses the order of the rest."""
    points: int
    duplicates: int
    illegal: dict[str, int]
    is_sampled: bool
    is_default: bool
    choices: dict[str, tuple[str, ...]]
    sizes: dict[str, tuple[int, ...]]
    """Sizes in elements that the candidates run with, also those that the spec leaves to Brimful."""
    limit_bytes: int | None
    notes: tuple[str, ...]
    facts: Facts


def plan_spec(
    path: Path, overrides: tuple[str, ...], home: Path, pool: str | None, allow_remote_code: bool, as_json: bool
) -> None:
    """Do all that `run` does before its first trial, in a temporary folder, and show it."""
    output = Output(as_json)
    loaded = load_spec(path, overrides, allow_remote_code)
    output.say(f"Looking at the model and the data of {loaded.spec.name}.")
    threads = wiring.threads_per_rank()
    with tempfile.TemporaryDirectory(prefix="brimful-plan-") as folder:
        facts = preflight(loaded.spec, str(path), Path(folder), threads)
    space = build_space(loaded.spec, facts, threads)
    if pool == "local":
        _check_local(loaded)
    plan = make_plan(loaded, facts, space)
    output.document(plan)
    _show(plan, loaded.spec.budget, output)


def _check_local(loaded: LoadedSpec) -> None:
    with closing(wiring.build_pool("local", None)) as pool:
        pool.check(loaded.spec.resources.devices_per_trial, loaded.spec.resources.nodes)


def make_plan(loaded: LoadedSpec, facts: Facts, space: Space) -> Plan:
    """The plan of a spec whose model and data are known."""
    budget = loaded.spec.budget.trials
    count = len(space.candidates)
    sizes = {
        knob: tuple(sorted({value for each in space.candidates if (value := _size(each, knob)) is not None}))
        for knob in _SIZE_KNOBS
    }
    return Plan(
        name=loaded.spec.name,
        trials=count if budget is None else min(count, budget),
        candidates=tuple(_candidate(each) for each in space.candidates),
        points=space.raw_points,
        duplicates=space.duplicates,
        illegal=dict(space.illegal.most_common()),
        is_sampled=space.is_sampled,
        is_default=space.is_default,
        choices={name: tuple(str(choice) for choice in choices) for name, choices in space.choices.items()},
        sizes={knob: values for knob, values in sizes.items() if values},
        limit_bytes=loaded.spec.limits.device_memory,
        notes=(*loaded.notes, *space.notes),
        facts=facts,
    )


def _size(candidate: Candidate, knob: str) -> int | None:
    value = candidate.config.knobs.model_dump()[knob]
    return value if isinstance(value, int) else None


def _candidate(candidate: Candidate) -> PlanCandidate:
    return PlanCandidate(
        candidate=candidate.id,
        label=candidate.label,
        is_baseline=candidate.is_baseline,
        config=candidate.config.knobs.model_dump(mode="json"),
        world_size=candidate.config.world_size,
        gradient_accumulation=candidate.config.gradient_accumulation,
    )


def _show(plan: Plan, budget: BudgetSection, output: Output) -> None:
    illegal = sum(plan.illegal.values())
    made_from = f"{plan.points} points: {plan.duplicates} duplicates, {illegal} illegal"
    output.show(f"{plan.name}: {len(plan.candidates)} candidates from {made_from}.")
    model, data = plan.facts.model, plan.facts.data
    output.show(
        f"Model: {model.model_type}, {model.total_parameters:,} parameters, {model.num_layers} layers. "
        f"Data: {data.rows} rows ({data.format}), {data.mean_row_tokens:.0f} tokens on average, "
        f"{data.longest_row_tokens} at most, {data.truncated_rows} cut short."
    )
    limit = "none" if plan.limit_bytes is None else format_bytes(plan.limit_bytes)
    times = [f"{plan.trials} trials"]
    times += [format_duration(budget.time)] if budget.time is not None else []
    times += [f"{budget.device_hours:g} device-hours"] if budget.device_hours is not None else []
    output.show(f"Device: {plan.facts.device_name}. Memory limit per device: {limit}. Ends after {' or '.join(times)}.")
    choices = "; ".join(f"{name}: {', '.join(values)}" for name, values in plan.choices.items())
    output.show(f"{'Default choices' if plan.is_default else 'Choices'}: {choices or 'none'}.")
    if plan.sizes:
        sizes = "; ".join(
            f"{knob}: {', '.join(f'{value:,}' for value in values)}" for knob, values in plan.sizes.items()
        )
        output.show(f"Sizes in elements: {sizes}.")
    for reason, count in plan.illegal.items():
        output.show(f"Illegal ({count}): {reason}")
    for note in plan.notes:
        output.show(f"Note: {note}.")
    output.show(terminal_table(_table(plan)))


def _table(plan: Plan) -> Table:
    shown = plan.candidates[:SHOWN_CANDIDATES]
    title = "Candidates" if len(shown) == len(plan.candidates) else f"The first {len(shown)} candidates"
    if shown and shown[0].is_baseline:
        title += "; the baseline (b) runs first, the sampler chooses the order of the rest"
    cells = tuple(
        (
            f"{each.candidate} b" if each.is_baseline else each.candidate,
            each.label,
            str(each.config["micro_batch"]),
            str(each.gradient_accumulation),
            str(each.world_size),
            str(each.config["offload_optimizer"] or NOTHING),
        )
        for each in shown
    )
    columns = ("candidate", "configuration", "micro-batch", "accumulation", "ranks", "optimizer on")
    return Table(title, columns, cells, frozenset({"candidate", "configuration", "optimizer on"}))


def validate_spec(path: Path, overrides: tuple[str, ...], allow_remote_code: bool, as_json: bool) -> None:
    """Load the spec and say that it is valid."""
    output = Output(as_json)
    loaded = load_spec(path, overrides, allow_remote_code)
    output.document({"valid": True, "name": loaded.spec.name, "spec": loaded.spec.model_dump(mode="json")})
    output.show(f"{path} is a valid spec of the sweep {loaded.spec.name}.")
    for note in loaded.notes:
        output.say(f"Note: {note}")
