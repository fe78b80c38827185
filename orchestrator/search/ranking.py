"""Which trial is better: objective values, feasibility, the order of merit and the Pareto front. Pure."""

from collections.abc import Container, Iterable, Sequence
from math import isfinite
from statistics import median
from typing import assert_never

from orchestrator.contract.outcome import Ok
from orchestrator.contract.record import TrialRecord
from orchestrator.search.quality import lossy
from orchestrator.spec.sweep import Objective


def objective_value(objective: Objective, record: TrialRecord) -> float | None:
    """The trial's number for one objective, None without a finite one: tokens/s, bytes, a fraction (mfu), seconds
    (`step_s`, the median of the measured optimizer steps) or nats a token (`eval_loss`).
    """
    measurement = record.measurement
    if measurement is None:
        return None
    match objective.metric:
        case "tokens_per_second":
            return measurement.tokens_per_second
        case "peak_memory_bytes":
            return float(measurement.peak_memory_bytes)
        case "peak_resident_bytes":
            return float(measurement.peak_resident_bytes)
        case "mfu":
            return record.mfu if record.mfu is not None and isfinite(record.mfu) else None
        case "step_s":
            return median(measurement.step_s) if measurement.step_s else None
        case "eval_loss":
            return measurement.eval_loss
        case _:
            assert_never(objective.metric)


def objective_values(objectives: Sequence[Objective], record: TrialRecord) -> tuple[float, ...] | None:
    """All objectives in the spec's order; None unless every one of them has a number."""
    values = [objective_value(objective, record) for objective in objectives]
    numbers = tuple(value for value in values if value is not None)
    return numbers if len(numbers) == len(values) else None


def is_feasible(record: TrialRecord) -> bool:
    """Whether the trial may win: it ran, every check passed, and the peak leaves the wished headroom."""
    return isinstance(record.outcome, Ok)


def ranked(
    objectives: Sequence[Objective], records: Iterable[TrialRecord], eval_loss_within: float | None = None
) -> list[TrialRecord]:
    """Feasible trials, best first; behind them those whose eval loss is above the baseline's by more than
    `eval_loss_within` of it.

    With one objective by its value; with several by Pareto front, and inside a front by the first objective. Ties go
    to the smaller memory peak, then to the earlier trial.
    """
    records = list(records)
    beyond = lossy(eval_loss_within, records)
    behind = [record for record in records if record.trial in beyond]
    return [*_in_order(objectives, _others(records, beyond)), *_in_order(objectives, behind)]


def _others(records: Iterable[TrialRecord], beyond: Container[int]) -> list[TrialRecord]:
    return [record for record in records if record.trial not in beyond]


def _in_order(objectives: Sequence[Objective], records: Iterable[TrialRecord]) -> list[TrialRecord]:
    scored = _scored(objectives, records)
    fronts = {record.trial: 0 for _, record in scored} if len(objectives) == 1 else _front_of_each(scored)
    return [record for _, record in sorted(scored, key=lambda pair: (fronts[pair[1].trial], *_order(pair)))]


def best(
    objectives: Sequence[Objective], records: Iterable[TrialRecord], eval_loss_within: float | None = None
) -> TrialRecord | None:
    """The first of `ranked` that may win; None when nothing is feasible within the loss."""
    records = list(records)
    return next(iter(_in_order(objectives, _others(records, lossy(eval_loss_within, records)))), None)


def pareto_front(
    objectives: Sequence[Objective], records: Iterable[TrialRecord], eval_loss_within: float | None = None
) -> list[TrialRecord]:
    """Feasible trials within the loss that no other one beats in every objective, in the order of `ranked`."""
    records = list(records)
    scored = _scored(objectives, _others(records, lossy(eval_loss_within, records)))
    fronts = _front_of_each(scored)
    return [record for _, record in sorted(scored, key=_order) if fronts[record.trial] == 0]


def speedup(record: TrialRecord, baseline: TrialRecord) -> float | None:
    """Tokens per second of `record` over those of `baseline`; None when either did not run to its end."""
    if record.measurement is None or baseline.measurement is None:
        return None
    return record.measurement.tokens_per_second / baseline.measurement.tokens_per_second


Scored = tuple[tuple[float, ...], TrialRecord]
"""Costs (lower is better, one an objective) and their trial."""


def _scored(objectives: Sequence[Objective], records: Iterable[TrialRecord]) -> list[Scored]:
    scored = []
    for record in records:
        values = objective_values(objectives, record)
        if values is not None and is_feasible(record):
            goals = zip(objectives, values, strict=True)
            scored.append((tuple(-value if goal.goal == "maximize" else value for goal, value in goals), record))
    return scored


def _order(pair: Scored) -> tuple[float, int, int]:
    costs, record = pair
    peak_bytes = record.measurement.peak_memory_bytes if record.measurement else 0
    return costs[0], peak_bytes, record.trial


def _front_of_each(scored: Sequence[Scored]) -> dict[int, int]:
    """Trial number to its front, 0 the best: a front is what nothing left over dominates."""
    left = list(scored)
    fronts: dict[int, int] = {}
    front = 0
    while left:
        undominated = [pair for pair in left if not any(_dominates(other[0], pair[0]) for other in left)]
        fronts |= {record.trial: front for _, record in undominated}
        left = [pair for pair in left if pair[1].trial not in fronts]
        front += 1
    return fronts


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(left <= right for left, right in zip(one, other, strict=True))
