"""`plan` and `validate`: the way of `run` up to the first trial."""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from orchestrator import wiring
from orchestrator.cli.driving import CACHE_FOLDER
from orchestrator.cli.output import Output
from orchestrator.cli.plan_document import Plan, PlanCandidate, Predicted
from orchestrator.cli.plan_text import show_plan
from orchestrator.contract.config import Layout
from orchestrator.contract.facts import Facts
from orchestrator.placement.forecast import Forecast, Forecaster
from orchestrator.placement.gate import rejection
from orchestrator.placement.kinds import facts_on, named_device
from orchestrator.placement.layouts import refused_layouts
from orchestrator.placement.preflight import preflight
from orchestrator.placement.preview import Preview, Terms, preview
from orchestrator.placement.promising import merit, with_promising
from orchestrator.search.cost import TrainingCost, planned_tokens, price_of, training_cost
from orchestrator.search.ranking import is_speed_first
from orchestrator.space.candidates import Candidate, Space, build_space
from orchestrator.spec.load import LoadedSpec, load_spec
from orchestrator.spec.sweep import SweepSpec

MAX_REPLAYS = 100
"""The allocator is replayed, which costs tens of milliseconds, only for so many candidates: the most promising ones."""
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
        facts = facts_on(preflight(spec, str(path), cache, threads), named_device(spec.resources.device))
        space = build_space(spec, facts, threads)
        if request.pool == "local":
            space = space.refusing(_refused_here(loaded))
        forecaster = wiring.build_forecaster(spec, facts, space, cache, output.say) if request.predictions else None
        forecasts: dict[str, Forecast] = {}
        if forecaster is not None:
            space = with_promising(space, forecaster)
            forecasts = forecasts_of(space.candidates, forecaster)
    plan = make_plan(loaded, facts, space, forecasts)
    output.document(plan)
    show_plan(plan, spec, output)


def forecasts_of(candidates: Sequence[Candidate], forecaster: Forecaster) -> dict[str, Forecast]:
    """By candidate, those of the most promising MAX_REPLAYS with a replay of the allocator where it could matter."""
    forecasts = {each.id: forecaster.forecast(each.config, replays=False) for each in candidates}
    ranked = sorted(candidates, key=lambda each: (not each.is_baseline, -merit(forecasts[each.id])))
    return forecasts | {each.id: forecaster.forecast(each.config) for each in ranked[:MAX_REPLAYS]}


def _refused_here(loaded: LoadedSpec) -> dict[Layout, str]:
    with closing(wiring.build_pool("local", None)) as pool:
        return refused_layouts(loaded.spec.resources.layouts, pool.check)


def make_plan(loaded: LoadedSpec, facts: Facts, space: Space, forecasts: Mapping[str, Forecast]) -> Plan:
    """The plan of a spec whose model and data are known. `forecasts`: by candidate, as far as there are any."""
    spec = loaded.spec
    budget = spec.budget.trials
    price, tokens = price_of(spec.resources), planned_tokens(spec.train, facts.data)

    def whole(tokens_per_second: float | None, world_size: int) -> TrainingCost | None:
        return training_cost(tokens, tokens_per_second, world_size, price)

    candidates = [
        _candidate(each, forecasts.get(each.id), spec.limits.reject_probability, whole) for each in space.candidates
    ]
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
        planned_tokens=tokens,
        currency=price.currency if price is not None else None,
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


_Whole = Callable[[float | None, int], TrainingCost | None]
"""The cost of the whole training at so many tokens/s on so many devices."""


def _candidate(
    candidate: Candidate, forecast: Forecast | None, reject_probability: float, whole: _Whole
) -> PlanCandidate:
    return PlanCandidate(
        candidate=candidate.id,
        label=candidate.label,
        is_baseline=candidate.is_baseline,
        config=candidate.config.knobs.model_dump(mode="json"),
        world_size=candidate.config.world_size,
        gradient_accumulation=candidate.config.gradient_accumulation,
        predicted=_predicted(candidate, forecast, reject_probability, whole) if forecast is not None else None,
    )


def _predicted(candidate: Candidate, forecast: Forecast, reject_probability: float, whole: _Whole) -> Predicted:
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
        training=whole(time.tokens_per_second if time else None, candidate.config.world_size),
    )


def _merit(each: PlanCandidate) -> tuple[float, ...]:
    """The smaller the earlier: baseline, likely to fit by speed, the others by probability, then unpredicted ones."""
    predicted = each.predicted
    if each.is_baseline:
        return (0,)
    if predicted is None:
        return (3,)
    if predicted.is_likely:
        return (1, -(predicted.tokens_per_second or 0.0), predicted.needed_bytes)
    return (2, -(predicted.probability_fits or 0.0), predicted.needed_bytes)


def _preview(
    spec: SweepSpec, facts: Facts, candidates: Sequence[PlanCandidate], forecasts: Mapping[str, Forecast]
) -> Preview | None:
    launched = [each for each in candidates if each.predicted is not None and not each.predicted.is_rejected]
    launchable = [forecasts[each.candidate] for each in launched]
    world_size = mean(each.world_size for each in launched) if launched else 1
    side_by_side = wiring.lanes(facts.device, max(spec.resources.world_sizes))
    if spec.resources.max_concurrent_trials is not None:
        side_by_side = min(side_by_side, spec.resources.max_concurrent_trials)
    confirm, is_confirmed = spec.measure.confirm, is_speed_first(spec.objective)
    trials = min(len(launchable), spec.budget.trials or len(launchable))
    has_baseline = any(each.is_baseline for each in candidates) and confirm.top > 0
    runs = min(confirm.top + has_baseline, trials) * confirm.repeats if is_confirmed else 0
    price = price_of(spec.resources)
    return preview(launchable, Terms(spec.measure, spec.budget.trials, side_by_side, world_size, runs, price))


def validate_spec(path: Path, overrides: tuple[str, ...], allow_remote_code: bool, as_json: bool) -> None:
    """Load the spec and say that it is valid."""
    output = Output(as_json)
    loaded = load_spec(path, overrides, allow_remote_code)
    output.document({"valid": True, "name": loaded.spec.name, "spec": loaded.spec.model_dump(mode="json")})
    output.show(f"{path} is a valid spec of the sweep {loaded.spec.name}.")
    for note in loaded.notes:
        output.say(f"Note: {note}")
