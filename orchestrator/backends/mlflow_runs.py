"""What the MLflow runs of a sweep and of its attempts say: names, tags, params, metrics, status. Pure; no mlflow.

Names follow the sweep's words; sizes are in GiB under `mem/`. A number that is not finite becomes a tag, never a
metric, because MLflow stores NaN as 0 and infinity as a huge number, which would then be ranked.
"""

import getpass
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median, pstdev, quantiles

from orchestrator.backends.mlflow_status import Status, status_of, sweep_status
from orchestrator.backends.mlflow_totals import cost_totals, sweep_totals
from orchestrator.contract.config import Checkpointing, Offload
from orchestrator.contract.outcome import (
    Crashed,
    Diverged,
    Infra,
    Invalid,
    LostNode,
    Measurement,
    Ok,
    OomDevice,
    OomHost,
    Outcome,
    OverLimit,
    Preempted,
    Rejected,
)
from orchestrator.contract.record import AttemptRecord, Purpose, SweepRecord, SweepState, TrialRecord
from orchestrator.contract.units import GIB
from orchestrator.placement.quarantine import excluded_nodes
from orchestrator.search import ranking
from orchestrator.search.cost import price_of, sweep_cost
from orchestrator.search.quality import lossy
from orchestrator.search.reported import reported
from orchestrator.spec.sweep import Objective, SearchSection, SweepSpec

MAX_KEY, MAX_PARAM, MAX_TAG = 250, 6000, 8000
"""MLflow's limits in characters (mlflow/utils/validation.py)."""
MAX_NAME = 60
TOKEN_TAG = "brimful.token"
"""Tag by which an attempt's run is found again."""
SWEEP_TAG = "sweep.id"
ROLE_TAG = "brimful.role"


@dataclass(frozen=True)
class Point:
    """One value of a metric. `time_ms` is a wall clock in milliseconds."""

    key: str
    value: float
    time_ms: int
    step: int = 0


@dataclass(frozen=True)
class RunContent:
    """All that a run should say at the moment. Logging it twice changes nothing."""

    name: str
    start_ms: int
    status: Status
    end_ms: int | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()


def attempt_content(sweep: SweepRecord, trial: TrialRecord, attempt: AttemptRecord) -> RunContent:
    """The child run of one attempt."""
    start_ms = _ms(attempt.dispatched_s)
    end_ms = None if attempt.ended_s is None else max(start_ms, _ms(attempt.ended_s))
    numbers: dict[str, float | None] = {
        **{f"knob/{name}": _number(value) for name, value in trial.config.knobs if value is not None},
        "knob/devices_per_trial": float(trial.config.world_size),
        "knob/nodes": float(trial.config.nodes) if trial.config.nodes is not None else None,
        "launch_overhead_s": attempt.launch_overhead_s,
    }
    time_ms = end_ms or start_ms
    series: list[Point] = []
    if isinstance(attempt.outcome, Ok | OverLimit):
        measured = attempt.outcome.measurement
        numbers |= _measured(measured, trial.config.world_size)
        is_search = attempt.purpose is Purpose.SEARCH
        numbers |= {"mfu": trial.mfu, "hfu": trial.hfu} if is_search else {"mfu": attempt.mfu, "hfu": attempt.hfu}
        numbers |= {"raced_out": float(measured.raced_out)}
        series = [Point("step/step_s", value, time_ms, step) for step, value in enumerate(measured.step_s)]
    tags = {
        **_provenance(sweep),
        ROLE_TAG: "attempt",
        TOKEN_TAG: attempt.token,
        "trial": str(trial.trial),
        "attempt": str(attempt.attempt),
        "purpose": attempt.purpose.value,
        "candidate": trial.candidate,
        "is_baseline": _word(trial.is_baseline),
        "outcome": attempt.outcome.kind if attempt.outcome else "running",
        "feasible": _word(isinstance(attempt.outcome, Ok)),
        **_retried(trial, attempt),
        **({"node": attempt.node} if attempt.node else {}),
        **({"rank_nodes": ", ".join(attempt.nodes)} if len(attempt.nodes) > 1 else {}),
        **_outcome_tags(attempt.outcome),
    }
    points = [Point(key, value, time_ms) for key, value in numbers.items() if value is not None]
    return _loggable(
        RunContent(
            name=f"t{trial.trial:04d} {trial.label}{_again(trial, attempt)}",
            start_ms=start_ms,
            end_ms=end_ms,
            status=status_of(attempt.outcome),
            tags=tags,
            params=_params(trial),
            points=(*points, *series),
        )
    )


def _retried(trial: TrialRecord, attempt: AttemptRecord) -> dict[str, str]:
    """Which attempt came to no end of its own, so that this one was made."""
    before = next((each for each in trial.attempts if each.attempt == attempt.attempt - 1), None)
    if before is None or before.purpose is not attempt.purpose or attempt.purpose is not Purpose.SEARCH:
        return {}
    return {"retry_of": before.token}


def _again(trial: TrialRecord, attempt: AttemptRecord) -> str:
    """Told apart from the search's run in a list of names."""
    if attempt.purpose is Purpose.SEARCH:
        return ""
    return f", confirmation {attempt.attempt - len(trial.searches)}"


def sweep_content(sweep: SweepRecord, trials: Sequence[TrialRecord]) -> RunContent:
    """The parent run. Its summary metrics and `best_so_far` carry the number of ended trials as their step."""
    spec = SweepSpec.model_validate(sweep.spec)
    launched = [trial for trial in trials if not isinstance(trial.outcome, Rejected)]
    ended = sorted((trial for trial in launched if trial.outcome), key=_ended_s)
    start_ms = _ms(sweep.created_s)
    ends_s = [attempt.ended_s for trial in ended for attempt in trial.attempts if attempt.ended_s is not None]
    # of two values at one time and step MLflow keeps the larger one: a confirmation's must come later
    last_ms = _ms(max(ends_s)) if ends_s else start_ms
    within = spec.limits.eval_loss_within
    best = ranking.best(spec.objective, trials, within)
    barred = lossy(within, trials)
    tags = {
        **_provenance(sweep),
        ROLE_TAG: "sweep",
        "state": sweep.state.value,
        "reason": sweep.reason,
        "pool": sweep.pool,
        "mlflow.note.content": _note(sweep, spec, best, launched),
        **({"currency": spec.resources.currency} if price_of(spec.resources) is not None else {}),
        **({"best.trial": str(best.trial), "best.candidate": best.candidate} if best else {}),
        **({"nodes.excluded": _excluded_words(trials)} if excluded_nodes(trials) else {}),
    }
    params = {
        "objective": ", ".join(f"{goal.goal} {goal.metric}" for goal in spec.objective),
        "sampler": (spec.search or SearchSection()).sampler.value,
        "devices_per_trial": ", ".join(map(str, spec.resources.world_sizes)),
        "global_batch": str(spec.train.global_batch),
        "sequence_length": str(spec.data.sequence_length),
        "data": spec.data.path or spec.data.id or "",
        "model": spec.model.path or spec.model.id or "from the spec",
    }
    rejected = len(trials) - len(launched) + sum(sweep.left_out.values())
    summary = {**sweep_totals(spec.objective, ended, best), "n_rejected": float(rejected)}
    baseline = next((trial for trial in trials if trial.is_baseline), None)
    cost = sweep_cost(trials, best, baseline, price_of(spec.resources), sweep.planned_tokens)
    summary |= cost_totals(cost)
    summary |= {} if within is None else {"n_lossy": float(len(barred))}
    totals = [Point(key, value, last_ms, len(ended)) for key, value in summary.items()]
    totals.append(Point("elapsed_s", sweep.elapsed_s, _ms(sweep.updated_s), len(ended)))
    return _loggable(
        RunContent(
            name=sweep.name,
            start_ms=start_ms,
            end_ms=_ms(sweep.updated_s) if sweep.state is not SweepState.RUNNING else None,
            status=sweep_status(sweep.state),
            tags=tags,
            params=params,
            points=(*_best_so_far(spec.objective, ended, barred), *totals),
        )
    )


def _excluded_words(trials: Sequence[TrialRecord]) -> str:
    return "; ".join(f"{each.node} ({', '.join(each.evidence)})" for each in excluded_nodes(trials))


def _loggable(content: RunContent) -> RunContent:
    """`content` within MLflow's limits, metrics that are not finite told by name in a tag."""
    name = fit(content.name, MAX_NAME)
    broken = sorted({point.key for point in content.points if not math.isfinite(point.value)})
    tags = {**content.tags, "mlflow.runName": name, **({"not_finite": ", ".join(broken)} if broken else {})}
    return replace(
        content,
        name=name,
        tags={fit(key, MAX_KEY): fit(value, MAX_TAG) for key, value in tags.items()},
        params={fit(key, MAX_KEY): fit(value, MAX_PARAM) for key, value in content.params.items()},
        points=tuple(point for point in content.points if math.isfinite(point.value)),
    )


def fit(text: str, limit_characters: int) -> str:
    """`text`, cut to `limit_characters` with a mark where it was longer."""
    mark = " [cut]"
    return text if len(text) <= limit_characters else text[: limit_characters - len(mark)] + mark


def _provenance(sweep: SweepRecord) -> dict[str, str]:
    return {
        SWEEP_TAG: sweep.sweep_id,
        "sweep.name": sweep.name,
        "spec.sha256": sweep.spec_digest,
        "mlflow.source.name": "brimful",
        "mlflow.source.type": "LOCAL",
        "mlflow.user": getpass.getuser(),
    }


def _params(trial: TrialRecord) -> dict[str, str]:
    config = trial.config
    knobs = {name: value for name, value in config.knobs if value is not None}
    return {
        **{name: ",".join(value) if isinstance(value, tuple) else _word(value) for name, value in knobs.items()},
        "gradient_accumulation": str(config.gradient_accumulation),
        "world_size": str(config.world_size),
        **({"nodes": str(config.nodes)} if config.nodes is not None else {}),
        "global_batch": str(config.train.global_batch),
        "learning_rate": str(config.train.learning_rate),
        "sequence_length": str(config.data.sequence_length),
        "packing": _word(config.data.packing),
    }


def _measured(measured: Measurement, world_size: int) -> dict[str, float | None]:
    steps_ms = [1000 * step_s for step_s in measured.step_s]
    limit_bytes = measured.limit_bytes
    allocated = [rank.peak_allocated_bytes for rank in measured.ranks if rank.peak_allocated_bytes is not None]
    device = [rank.peak_device_bytes for rank in measured.ranks if rank.peak_device_bytes is not None]
    return {
        "tokens_per_second": measured.tokens_per_second,
        "tokens_per_second_low": measured.tokens_per_second_low,
        "tokens_per_second_high": measured.tokens_per_second_high,
        "tokens_per_second_per_device": measured.tokens_per_second / world_size,
        "samples_per_second": measured.sequences / measured.measured_s,
        "padding_fraction": measured.padding_fraction,
        "step_time_ms_median": median(steps_ms) if steps_ms else None,
        "step_time_ms_p90": quantiles(steps_ms, n=10)[-1] if len(steps_ms) > 1 else None,
        "step_time_cv": pstdev(steps_ms) / mean(steps_ms) if len(steps_ms) > 1 else None,
        "first_loss": measured.first_loss,
        "last_loss": measured.last_loss,
        "eval_loss": measured.eval_loss,
        "eval_tokens": measured.eval_tokens,
        "trained_tokens": measured.trained_tokens,
        "mem/peak_gib": measured.peak_memory_bytes / GIB,
        "mem/peak_resident_gib": measured.peak_resident_bytes / GIB,
        "mem/peak_allocated_gib": max(allocated) / GIB if allocated else None,
        "mem/peak_device_gib": max(device) / GIB if device else None,
        "mem/limit_gib": None if limit_bytes is None else limit_bytes / GIB,
        "mem/headroom_gib": None if limit_bytes is None else (limit_bytes - measured.peak_memory_bytes) / GIB,
        "mem/num_alloc_retries": sum(rank.allocation_retries for rank in measured.ranks),
        **{f"mem/rank{rank.rank}/peak_gib": rank.peak_memory_bytes / GIB for rank in measured.ranks},
    }


def _outcome_tags(outcome: Outcome | None) -> dict[str, str]:
    match outcome:
        case OomDevice(phase=phase, rank=rank, requested_bytes=requested_bytes):
            size = {} if requested_bytes is None else {"oom.requested_gib": f"{requested_bytes / GIB:.3f}"}
            return {"oom.phase": phase.value, "oom.rank": str(rank), **size, "error": _first_line(outcome.evidence)}
        case OomHost(phase=phase, evidence=evidence):
            return {"oom.phase": phase.value, "error": _first_line(evidence)}
        case Ok(health=health) | OverLimit(health=health):
            return {"health": health.value}
        case Crashed(error=error, exit_code=code, signal=signal):
            return {
                "error": _first_line(error),
                **({"exit_code": str(code)} if code is not None else {}),
                **({"signal": signal} if signal else {}),
            }
        case LostNode(evidence=text) | Preempted(evidence=text) if text:
            return {"error": _first_line(text)}
        case Invalid(reason=text) | Infra(cause=text) | Diverged(evidence=text):
            return {"error": _first_line(text)}
        case Rejected(probability_fits=probability, needed_bytes=needed_bytes):
            size = {} if needed_bytes is None else {"predicted.needed_gib": f"{needed_bytes / GIB:.3f}"}
            return {"predicted.probability_fits": f"{probability:.3g}", **size}
        case _:
            return {}


def _best_so_far(objectives: Sequence[Objective], ended: Sequence[TrialRecord], barred: Container[int]) -> list[Point]:
    """The first objective's best value as searched, after each ended trial, of those that fit and are not `barred`."""
    pick = max if objectives[0].goal == "maximize" else min
    best: float | None = None
    points = []
    for step, trial in enumerate(ended, start=1):
        may_win = ranking.is_feasible(trial) and trial.trial not in barred
        value = ranking.objective_value(objectives[0], trial) if may_win else None
        if value is not None:
            best = value if best is None else pick(best, value)
        if best is not None:
            points.append(Point("best_so_far", best, _ms(_ended_s(trial)), step))
    return points


def _note(sweep: SweepRecord, spec: SweepSpec, best: TrialRecord | None, trials: Sequence[TrialRecord]) -> str:
    lines = [spec.description] if spec.description else []
    if best is None or best.measurement is None:
        lines.append(f"0 of {len(trials)} trials fit so far.")
    else:
        measured = reported(trials)[best.trial]
        again = f" in {measured.runs} runs after the search" if measured.runs else ""
        lines.append(
            f"**Best of {len(trials)} trials: {best.label}** (trial {best.trial}), "
            f"{measured.tokens_per_second:.1f} tokens/s{again}, peak {measured.peak_memory_bytes / GIB:.2f} GiB."
        )
        lines += ["", "| knob | value |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _params(best).items()]
    lines += ["", f"`brimful report {sweep.name}` prints the whole report; state: {sweep.state.value}. {sweep.reason}"]
    return "\n".join(lines)


def _number(value: object) -> float | None:
    if isinstance(value, Offload | Checkpointing):
        return float(value.value != "none")
    return float(value) if isinstance(value, bool | int | float) else None


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _ended_s(trial: TrialRecord) -> float:
    return trial.searches[-1].ended_s or 0.0


def _ms(time_s: float) -> int:
    return round(time_s * 1000)
