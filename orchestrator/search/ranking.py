"""Which trial is better: objective values, feasibility, the order of merit and the Pareto front. Pure."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isfinite
from statistics import median
from typing import assert_never

from orchestrator.contract.outcome import Ok
from orchestrator.contract.record import TrialRecord
from orchestrator.search.quality import lossy
from orchestrator.search.reported import Reported, overlap, reported, thrashes
from orchestrator.spec.sweep import Objective

TIE = 0.03
"""Share of the fastest's tokens/s that headroom may cost. Where runs scatter widely, trials cannot be told apart that
are far less fast by what is known; the same 3 % count as reached in the benchmarks of the search."""
PEAK_NOISE = 0.05
"""Peaks that lie closer than this count as equal: on CPU those of one configuration vary by as much from run to run
(docs/decisions/0009-cpu-limit-is-address-space.md)."""


def objective_value(objective: Objective, record: TrialRecord) -> float | None:
    """The search's number for one objective, None without a finite one: tokens/s, bytes, a fraction (mfu), seconds
    (`step_s`, the median of the measured optimizer steps) or nats a token (`eval_loss`).
    """
    measurement = record.measurement
    if measurement is None:
        return None
    match objective.metric:
        case "tokens_per_second":
            return measurement.tokens_per_second
        case "tokens_per_second_per_device":
            return measurement.tokens_per_second / record.config.world_size
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


def reported_value(objective: Objective, record: TrialRecord, figures: Reported) -> float | None:
    """The number that is reported for one objective: the confirmation's where the trial has one."""
    match objective.metric:
        case "tokens_per_second":
            return figures.tokens_per_second
        case "tokens_per_second_per_device":
            return figures.tokens_per_second / record.config.world_size
        case "peak_memory_bytes":
            return float(figures.peak_memory_bytes)
        case "peak_resident_bytes":
            return float(figures.peak_resident_bytes)
        case "mfu":
            return figures.mfu if figures.mfu is not None and isfinite(figures.mfu) else None
        case "step_s":
            return figures.median_step_s
        case "eval_loss":
            return objective_value(objective, record)
        case _:
            assert_never(objective.metric)


def objective_values(objectives: Sequence[Objective], record: TrialRecord) -> tuple[float, ...] | None:
    """The search's numbers for all objectives in the spec's order; None unless every one of them has one."""
    values = [objective_value(objective, record) for objective in objectives]
    numbers = tuple(value for value in values if value is not None)
    return numbers if len(numbers) == len(values) else None


def is_feasible(record: TrialRecord) -> bool:
    """Whether the trial may win: it ran, also whenever it was measured again, every check passed, and the peak leaves
    the wished headroom."""
    return isinstance(record.standing, Ok)


def contenders(records: Iterable[TrialRecord], eval_loss_within: float | None) -> list[TrialRecord]:
    """Feasible trials within the loss whose speed does not hang on luck (see `reported.thrashes`)."""
    records = list(records)
    able = _others(records, lossy(eval_loss_within, records))
    return [record for record in able if is_feasible(record) and not thrashes(record)]


def ranked(
    objectives: Sequence[Objective], records: Iterable[TrialRecord], eval_loss_within: float | None = None
) -> list[TrialRecord]:
    """Feasible trials, best first; behind them those whose eval loss is above the baseline's by more than
    `eval_loss_within` of it.

    With one objective by its value; with several by Pareto front, and inside a front by the first objective. Equal
    ones go by the smaller memory peak, then by the earlier trial. Before that, trials that do not thrash come first
    (see `reported.thrashes`), and among them, where the highest tokens/s come first, those that were confirmed for
    being among the best, since the others' figures are of the search.
    With tokens/s alone a tie with the fastest (95 % intervals overlap, and at most TIE slower) goes to the larger
    headroom.
    """
    records = list(records)
    beyond = lossy(eval_loss_within, records)
    behind = [record for record in records if record.trial in beyond]
    return [*_in_order(objectives, _others(records, beyond)), *_in_order(objectives, behind)]


def _others(records: Iterable[TrialRecord], beyond: Container[int]) -> list[TrialRecord]:
    return [record for record in records if record.trial not in beyond]


def _in_order(objectives: Sequence[Objective], records: Iterable[TrialRecord]) -> list[TrialRecord]:
    scored = _scored(objectives, records)
    fronts = {each.record.trial: 0 for each in scored} if len(objectives) == 1 else _front_of_each(scored)
    ordered = sorted(scored, key=lambda each: (fronts[each.record.trial], *_order(each)))
    if is_speed_alone(objectives):
        ordered = _ties_by_headroom(ordered)
    return [each.record for each in ordered]


def _ties_by_headroom(ordered: list["_Scored"]) -> list["_Scored"]:
    """Of those right behind the fastest that cannot be told from it, the one with the smallest peak comes first."""
    ties = list(takewhile(lambda each: _ties(ordered[0], each) and _is_close(ordered[0], each), ordered))
    smallest_bytes = min((each.figures.peak_memory_bytes for each in ties), default=0)
    small = [each for each in ties if each.figures.peak_memory_bytes <= smallest_bytes * (1 + PEAK_NOISE)]
    return [*small, *(each for each in ordered if each not in small)]


def _is_close(fastest: "_Scored", other: "_Scored") -> bool:
    return other.figures.tokens_per_second >= (1 - TIE) * fastest.figures.tokens_per_second


def _ties(one: "_Scored", other: "_Scored") -> bool:
    return _class(one) == _class(other) and overlap(one.figures, other.figures)


def is_speed_first(objectives: Sequence[Objective]) -> bool:
    """Whether the highest tokens/s come before all else."""
    return is_speed_alone(objectives[:1])


def is_speed_alone(objectives: Sequence[Objective]) -> bool:
    """Whether the highest tokens/s is all that counts."""
    return [(goal.metric, goal.goal) for goal in objectives] == [("tokens_per_second", "maximize")]


def is_guided(objectives: Sequence[Objective]) -> bool:
    """Whether the sampler `guided` can search for it: the highest tokens/s of a trial, or of one of its devices."""
    return is_speed_alone(objectives) or is_per_device(objectives)


def is_per_device(objectives: Sequence[Objective]) -> bool:
    """Whether the highest tokens/s of one device is all that counts."""
    return [(goal.metric, goal.goal) for goal in objectives] == [("tokens_per_second_per_device", "maximize")]


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
    return [each.record for each in sorted(scored, key=_order) if fronts[each.record.trial] == 0]


def tied(objectives: Sequence[Objective], records: Iterable[TrialRecord], winner: TrialRecord) -> set[int]:
    """Numbers of the feasible trials that cannot be told from `winner` (95 % intervals of tokens/s overlap), confirmed
    as it is or not; none where tokens/s are not the first objective."""
    scored = _scored(objectives, records) if objectives[0].metric == "tokens_per_second" else []
    others = [each for each in scored if each.record.trial != winner.trial]
    return {
        each.record.trial for one in scored if one.record.trial == winner.trial for each in others if _ties(one, each)
    }


def speedup(record: TrialRecord, baseline: TrialRecord) -> float | None:
    """Reported tokens/s of `record` over those of `baseline`; None when either did not run to its end."""
    figures = reported([record, baseline])
    if record.trial not in figures or baseline.trial not in figures:
        return None
    return figures[record.trial].tokens_per_second / figures[baseline.trial].tokens_per_second


@dataclass(frozen=True)
class _Scored:
    """A feasible trial with its reported figures. `costs`: lower is better, one an objective. `awaits_confirmation`:
    the best by this objective are measured again, and it was not, or only since it is the baseline."""

    costs: tuple[float, ...]
    record: TrialRecord
    figures: Reported
    awaits_confirmation: bool


def _scored(objectives: Sequence[Objective], records: Iterable[TrialRecord]) -> list[_Scored]:
    records = list(records)
    figures = reported(records)
    confirms = is_speed_first(objectives)
    slowest_of_best = min(
        (figures[r.trial].tokens_per_second for r in records if _is_confirmed(r, figures) and not r.is_baseline),
        default=0.0,
    )
    scored = []
    for record in records:
        if record.trial not in figures or not is_feasible(record):
            continue
        values = [reported_value(goal, record, figures[record.trial]) for goal in objectives]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            goals = zip(objectives, known, strict=True)
            costs = tuple(-value if goal.goal == "maximize" else value for goal, value in goals)
            is_behind = record.is_baseline and figures[record.trial].tokens_per_second < slowest_of_best
            awaits = confirms and (is_behind or not _is_confirmed(record, figures))
            scored.append(_Scored(costs, record, figures[record.trial], awaits))
    return scored


def _is_confirmed(record: TrialRecord, figures: Mapping[int, Reported]) -> bool:
    return record.trial in figures and figures[record.trial].runs > 0 and is_feasible(record)


def _class(scored: _Scored) -> tuple[bool, bool]:
    """Trials that do not thrash before those that do, and confirmed ones before others."""
    return thrashes(scored.record), scored.awaits_confirmation


def _order(scored: _Scored) -> tuple[bool, bool, float, int, int]:
    return *_class(scored), scored.costs[0], scored.figures.peak_memory_bytes, scored.record.trial


def _front_of_each(scored: Sequence[_Scored]) -> dict[int, int]:
    """Trial number to its front, 0 the best: a front is what nothing left over dominates."""
    left = list(scored)
    fronts: dict[int, int] = {}
    front = 0
    while left:
        undominated = [each for each in left if not any(_dominates(other.costs, each.costs) for other in left)]
        fronts |= {each.record.trial: front for each in undominated}
        left = [each for each in left if each.record.trial not in fronts]
        front += 1
    return fronts


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(left <= right for left, right in zip(one, other, strict=True))
