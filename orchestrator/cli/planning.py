"""`plan` and `validate`: the way of `run` up to the first trial."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from orchestrator import wiring
from orchestrator.cli.driving import CACHE_FOLDER
from orchestrator.cli.output import Output
from orchestrator.contract.config import Frozen
from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Phase
from orchestrator.contract.units import format_bytes, format_duration
from orchestrator.placement.forecast import Forecast, Forecaster
from orchestrator.placement.gate import rejection
from orchestrator.placement.preflight import preflight
from orchestrator.placement.preview import Preview, preview
from orchestrator.placement.promising import merit, with_promising
from orchestrator.report.rows import odds
from orchestrator.report.tables import NOTHING, Table
from orchestrator.report.terminal import terminal_table
from orchestrator.space.candidates import Candidate, Space, build_space
from orchestrator.spec.load import LoadedSpec, load_spec
from orchestrator.spec.sweep import BudgetSection, SweepSpec

SHOWN_CANDIDATES = 12
MAX_REPLAYS = 100
"""The allocator is replayed, which costs tens of milliseconds, only for so many candidates: the most promising ones."""
LIKELY = 0.5
_SIZE_KNOBS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)


@dataclass(frozen=True)
class PlanRequest:
    """What the command line says beside the spec."""

    home: Path
    pool: str | None
    allow_remote_code: bool
    predictions: bool = True


class Predicted(Frozen):
    """What is predicted for one candidate; nothing is measured. Bytes are of the device with the most."""

    probability_fits: float | None
    """None without a limit."""
    is_rejected: bool
    """`run` would not launch it."""
    peak_allocated_bytes: int
    needed_bytes: int
    """What is held against the limit: with the allocator's share, on CPU with the process' own address space."""
    peak_host_bytes: int
    binding_phase: Phase
    binding_term: str
    tokens_per_second: float | None
    step_s: float | None
    mfu: float | None


class PlanCandidate(Frozen):
    """One candidate of a plan. `predicted` is None where there are no predictions."""

    candidate: str
    label: str
    is_baseline: bool
    config: dict[str, JsonValue]
    world_size: int
    gradient_accumulation: int
    predicted: Predicted | None = None


class Plan(Frozen):
    """What `run` would do. `illegal` counts points by reason."""

    name: str
    trials: int
    """How many trials the budget and the space allow."""
    candidates: tuple[PlanCandidate, ...]
    """The baseline first, then those that are likely to fit by predicted speed, then the others by probability. The
    sampler chooses the order of all but the baseline."""
    points: int
    duplicates: int
    illegal: dict[str, int]
    rejected: dict[str, int]
    """Candidates that `run` would not launch, by what they would need most of."""
    preview: Preview | None
    """Predicted cost of the sweep."""
    is_sampled: bool
    is_default: bool
    choices: dict[str, tuple[str, ...]]
    sizes: dict[str, tuple[int, ...]]
    """Sizes in elements that the candidates run with, also those that the spec leaves to Brimful."""
    limit_bytes: int | None
    notes: tuple[str, ...]
    facts: Facts


def plan_spec(path: Path, overrides: tuple[str, ...], request: PlanRequest, as_json: bool) -> None:
    """Do all that `run` does before its first trial, in a temporary folder, and show it.

    Findings and traces are kept in the cache of the home folder where it exists, so that `run` and the next plan have
    them.
    """
    output = Output(as_json)
    loaded = load_spec(path, overrides, request.allow_remote_code)
    spec = loaded.spec
    output.say(f"Looking at the model and the data of {spec.name}.")
    threads = wiring.threads_per_rank()
    with tempfile.TemporaryDirectory(prefix="brimful-plan-") as folder:
        cache = request.home / CACHE_FOLDER if request.home.is_dir() else Path(folder)
        facts = preflight(spec, str(path), cache, threads)
        space = build_space(spec, facts, threads)
        if request.pool == "local":
            _check_local(loaded)
        forecaster = wiring.build_forecaster(spec, facts, space, cache, output.say) if request.predictions else None
        forecasts: dict[str, Forecast] = {}
        if forecaster is not None:
            space = with_promising(space, forecaster)
            forecasts = forecasts_of(space.candidates, forecaster)
    plan = make_plan(loaded, facts, space, forecasts)
    output.document(plan)
    _show(plan, spec.budget, output)


def forecasts_of(candidates: Sequence[Candidate], forecaster: Forecaster) -> dict[str, Forecast]:
    """By candidate, those of the most promising MAX_REPLAYS with a replay of the allocator where it could matter."""
    forecasts = {each.id: forecaster.forecast(each.config, replays=False) for each in candidates}
    ranked = sorted(candidates, key=lambda each: (not each.is_baseline, -merit(forecasts[each.id])))
    return forecasts | {each.id: forecaster.forecast(each.config) for each in ranked[:MAX_REPLAYS]}


def _check_local(loaded: LoadedSpec) -> None:
    with closing(wiring.build_pool("local", None)) as pool:
        pool.check(loaded.spec.resources.devices_per_trial, loaded.spec.resources.nodes)


def make_plan(loaded: LoadedSpec, facts: Facts, space: Space, forecasts: Mapping[str, Forecast]) -> Plan:
    """The plan of a spec whose model and data are known. `forecasts`: by candidate, as far as there are any."""
    spec = loaded.spec
    budget = spec.budget.trials
    candidates = [_candidate(each, forecasts.get(each.id), spec.limits.reject_probability) for each in space.candidates]
    rejected = [each.predicted for each in candidates if each.predicted and each.predicted.is_rejected]
    count = len(candidates) - len(rejected)
    sizes = {
        knob: tuple(sorted({value for each in space.candidates if (value := _size(each, knob)) is not None}))
        for knob in _SIZE_KNOBS
    }
    return Plan(
        name=loaded.spec.name,
        trials=count if budget is None else min(count, budget),
        candidates=tuple(sorted(candidates, key=_merit)),
        points=space.raw_points,
        duplicates=space.duplicates,
        illegal=dict(space.illegal.most_common()),
        rejected=dict(Counter(f"{each.binding_term} in {each.binding_phase}" for each in rejected).most_common()),
        preview=_preview(spec, facts, candidates, forecasts),
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


def _candidate(candidate: Candidate, forecast: Forecast | None, reject_probability: float) -> PlanCandidate:
    return PlanCandidate(
        candidate=candidate.id,
        label=candidate.label,
        is_baseline=candidate.is_baseline,
        config=candidate.config.knobs.model_dump(mode="json"),
        world_size=candidate.config.world_size,
        gradient_accumulation=candidate.config.gradient_accumulation,
        predicted=_predicted(candidate, forecast, reject_probability) if forecast is not None else None,
    )


def _predicted(candidate: Candidate, forecast: Forecast, reject_probability: float) -> Predicted:
    bill, time = forecast.verdict.bill, forecast.time
    return Predicted(
        probability_fits=forecast.probability_fits,
        is_rejected=not candidate.is_baseline and rejection(forecast, reject_probability) is not None,
        peak_allocated_bytes=bill.peak_allocated_bytes,
        needed_bytes=forecast.needed_bytes,
        peak_host_bytes=bill.peak_host_bytes,
        binding_phase=bill.binding_phase,
        binding_term=bill.binding_term,
        tokens_per_second=time.tokens_per_second if time else None,
        step_s=time.step_s if time else None,
        mfu=time.mfu if time else None,
    )


def _merit(each: PlanCandidate) -> tuple[float, ...]:
    """The smaller the earlier: baseline, likely to fit by speed, the others by probability, then unpredicted ones."""
    predicted = each.predicted
    if each.is_baseline:
        return (0,)
    if predicted is None:
        return (3,)
    if predicted.probability_fits is None or predicted.probability_fits >= LIKELY:
        return (1, -(predicted.tokens_per_second or 0.0), predicted.needed_bytes)
    return (2, -predicted.probability_fits, predicted.needed_bytes)


def _preview(
    spec: SweepSpec, facts: Facts, candidates: Sequence[PlanCandidate], forecasts: Mapping[str, Forecast]
) -> Preview | None:
    launchable = [
        forecasts[each.candidate]
        for each in candidates
        if each.predicted is not None and not each.predicted.is_rejected
    ]
    world_size = spec.resources.devices_per_trial
    side_by_side = wiring.lanes(facts.device, world_size)
    if spec.resources.max_concurrent_trials is not None:
        side_by_side = min(side_by_side, spec.resources.max_concurrent_trials)
    return preview(launchable, spec.measure, spec.budget.trials, side_by_side, world_size)


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
    for line in _predicted_lines(plan):
        output.show(line)
    output.show(terminal_table(_table(plan)))


def _predicted_lines(plan: Plan) -> list[str]:
    """What the predictions come to: rejected candidates with reasons, and the cost."""
    predicted = [each.predicted for each in plan.candidates if each.predicted is not None]
    if not predicted:
        return ["Nothing is predicted."]
    likely = sum(each.probability_fits is None or each.probability_fits >= LIKELY for each in predicted)
    rejected = sum(plan.rejected.values())
    lines = [f"Predicted, not measured: {likely} of {len(predicted)} candidates fit, {rejected} would not be launched."]
    lines += [f"Rejected ({count}): most of it {reason.replace('_', ' ')}" for reason, count in plan.rejected.items()]
    if plan.preview is not None:
        cost = plan.preview
        beside = "one after another" if cost.lanes == 1 else f"{cost.lanes} side by side on this machine"
        lines.append(
            f"Predicted cost: {cost.trials} trials of {format_duration(cost.trial_s)} on average, {beside}: about "
            f"{format_duration(cost.wall_s)}, {cost.device_hours:.2g} device-hours."
        )
    return lines


def _table(plan: Plan) -> Table:
    shown = plan.candidates[:SHOWN_CANDIDATES]
    title = "Candidates" if len(shown) == len(plan.candidates) else f"The first {len(shown)} candidates"
    if any(each.predicted for each in shown):
        title += " by predicted speed; tokens/s, needs and P(fits) are predicted, not measured"
    if shown and shown[0].is_baseline:
        title += "; the baseline (b) runs first, the sampler chooses the order of the rest"
    columns = ("candidate", "configuration", "tokens/s", "P(fits)", "needs", "most of it", "accumulation", "ranks")
    return Table(title, columns, tuple(map(_row, shown)), frozenset({"candidate", "configuration", "most of it"}))


def _row(each: PlanCandidate) -> tuple[str, ...]:
    predicted = each.predicted
    speed = predicted.tokens_per_second if predicted else None
    chance = predicted.probability_fits if predicted else None
    return (
        f"{each.candidate} b" if each.is_baseline else each.candidate,
        each.label,
        f"{speed:,.4g}" if speed is not None else NOTHING,
        odds(chance) if chance is not None else NOTHING,
        format_bytes(predicted.needed_bytes) if predicted else NOTHING,
        f"{predicted.binding_term.replace('_', ' ')} in {predicted.binding_phase}" if predicted else NOTHING,
        str(each.gradient_accumulation),
        str(each.world_size),
    )


def validate_spec(path: Path, overrides: tuple[str, ...], allow_remote_code: bool, as_json: bool) -> None:
    """Load the spec and say that it is valid."""
    output = Output(as_json)
    loaded = load_spec(path, overrides, allow_remote_code)
    output.document({"valid": True, "name": loaded.spec.name, "spec": loaded.spec.model_dump(mode="json")})
    output.show(f"{path} is a valid spec of the sweep {loaded.spec.name}.")
    for note in loaded.notes:
        output.say(f"Note: {note}")
