"""How far predictions lie from what sources measured, by group of rows. Nothing is fitted on a row that it scores."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import JsonValue
from scipy.stats import spearmanr

from benchmarks.published_rows import PublishedRun, Skipped

Scores = dict[str, JsonValue]
WORST = 5


@dataclass(frozen=True)
class Prediction:
    """Of one row. `reserved_bytes`: lowest and highest. `fits_probability`: None where the card's size is not known.
    `tokens_per_s`: of one device, before any constant is fitted; None where the card is not in the hardware table."""

    allocated_bytes: float
    reserved_bytes: tuple[float, float]
    needed_bytes: float
    fits_probability: float | None
    tokens_per_s: float | None
    phase: str
    term: str
    margin: float = 0.0
    """By how much of itself the reserved interval was widened on each side."""


@dataclass(frozen=True)
class ScoredRun:
    """A row and its prediction."""

    run: PublishedRun
    prediction: Prediction

    @property
    def allocated_error(self) -> float | None:
        """Relative, of the peak of allocated bytes; None where none is printed or the run did not complete."""
        measured = self.run.measured
        if measured.allocated_bytes is None or measured.outcome != "ran":
            return None
        return self.prediction.allocated_bytes / measured.allocated_bytes - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the peak of reserved bytes lies in its interval."""
        measured = self.run.measured
        if measured.reserved_bytes is None or measured.outcome != "ran":
            return None
        low, high = self.prediction.reserved_bytes
        return low <= measured.reserved_bytes <= high

    @property
    def is_predicted_out_of_memory(self) -> bool | None:
        """None where the card's size is not known."""
        probability = self.prediction.fits_probability
        return None if probability is None else probability < 0.5

    @property
    def capacity_error(self) -> float:
        """Of a boundary row, whose card is just large enough: predicted need over its size."""
        capacity_bytes = self.run.card.capacity_bytes
        assert capacity_bytes is not None
        return self.prediction.needed_bytes / capacity_bytes - 1

    @property
    def is_scored(self) -> bool:
        """Whether any quantity of the row is compared."""
        has_outcome = self.is_predicted_out_of_memory is not None
        return has_outcome or self.allocated_error is not None or self.is_inside is not None or _has_speed(self)


_LEAST_RESIDUALS = 10
_UNKNOWN_MARGIN = 0.05
"""Where other sources give too few residuals to go by."""
_COVERAGE = 0.9


def with_margins(runs: Sequence[ScoredRun]) -> list[ScoredRun]:
    """`runs` with reserved intervals widened on both sides by the error of the bill under the allocator.

    A source's margin is the size that 90 % of the errors of allocated peaks of all *other* sources stay under.
    """
    margins = {source: _margin(runs, source) for source in dict.fromkeys(run.run.source for run in runs)}
    return [_widened(run, margins[run.run.source]) for run in runs]


def _margin(runs: Sequence[ScoredRun], source: str) -> float:
    errors = [abs(run.allocated_error) for run in runs if run.run.source != source and run.allocated_error is not None]
    return float(np.quantile(errors, _COVERAGE)) if len(errors) >= _LEAST_RESIDUALS else _UNKNOWN_MARGIN


def _widened(run: ScoredRun, margin: float) -> ScoredRun:
    low, high = run.prediction.reserved_bytes
    widened = replace(run.prediction, reserved_bytes=(low * (1 - margin), high * (1 + margin)), margin=margin)
    return ScoredRun(run.run, widened)


def scores(runs: Sequence[ScoredRun], skipped: Sequence[Skipped]) -> Scores:
    """All measures of one group. A measure without rows is null."""
    return {
        "rows_scored": sum(run.is_scored for run in runs),
        "rows_skipped": len(skipped),
        "skipped_reasons": dict(Counter(row.reason for row in skipped).most_common()),
        **_allocated(runs),
        **_reserved(runs),
        **_out_of_memory(runs),
        **_speed(runs),
    }


def _percent(value: float) -> float:
    return round(100 * value, 2)


def _errors(prefix: str, errors: Sequence[tuple[str, float]]) -> Scores:
    sizes = np.abs([error for _, error in errors])
    worst = sorted(errors, key=lambda pair: -abs(pair[1]))[:WORST]
    return {
        f"{prefix}_rows": len(errors),
        f"{prefix}_median_abs_error_pct": _percent(float(np.median(sizes))) if errors else None,
        f"{prefix}_p90_abs_error_pct": _percent(float(np.quantile(sizes, 0.9))) if errors else None,
        f"{prefix}_median_error_pct": _percent(float(np.median([error for _, error in errors]))) if errors else None,
        f"{prefix}_worst": [{"id": name, "error_pct": _percent(error)} for name, error in worst],
    }


def _allocated(runs: Sequence[ScoredRun]) -> Scores:
    return _errors("allocated", [(run.run.id, run.allocated_error) for run in runs if run.allocated_error is not None])


def _reserved(runs: Sequence[ScoredRun]) -> Scores:
    scored = [run for run in runs if run.is_inside is not None]
    outside = [run for run in scored if not run.is_inside]
    return {
        "reserved_rows": len(scored),
        "reserved_inside_interval_pct": _percent(1 - len(outside) / len(scored)) if scored else None,
        "reserved_outside": [run.run.id for run in outside],
        "reserved_margin_pct": _percent(float(np.mean([run.prediction.margin for run in scored]))) if scored else None,
        "reserved_median_width_pct": _percent(float(np.median([_width(run) for run in scored]))) if scored else None,
    }


def _width(run: ScoredRun) -> float:
    low, high = run.prediction.reserved_bytes
    return high / low - 1


def _out_of_memory(runs: Sequence[ScoredRun]) -> Scores:
    """Rows at the boundary are not counted: whichever side of it a prediction falls on, its error is what matters."""
    known = [run for run in runs if run.is_predicted_out_of_memory is not None]
    decided = [run for run in known if not run.run.is_boundary]
    boundary = [(run.run.id, run.capacity_error) for run in known if run.run.is_boundary]
    ran_out = [run for run in decided if run.run.measured.outcome == "out_of_memory"]
    ran = [run for run in decided if run.run.measured.outcome == "ran"]
    failed = [run for run in decided if run.run.measured.outcome == "failed"]
    caught = [run for run in ran_out if run.is_predicted_out_of_memory]
    false_alarms = [run.run.id for run in ran if run.is_predicted_out_of_memory]
    foretold = len(caught) + len(false_alarms)
    return {
        "oom_rows": len(ran_out),
        "oom_rows_that_ran": len(ran),
        "oom_recall": round(len(caught) / len(ran_out), 4) if ran_out else None,
        "oom_precision": round(len(caught) / foretold, 4) if foretold else None,
        "oom_missed": [run.run.id for run in ran_out if run not in caught],
        "oom_false_alarms": list(false_alarms),
        "failed_rows": len(failed),
        "failed_predicted_oom_pct": (
            _percent(sum(bool(run.is_predicted_out_of_memory) for run in failed) / len(failed)) if failed else None
        ),
        "failed_not_predicted": [run.run.id for run in failed if not run.is_predicted_out_of_memory],
        **_errors("boundary", boundary),
    }


def _has_speed(run: ScoredRun) -> bool:
    return run.run.measured.tokens_per_s is not None and run.prediction.tokens_per_s is not None


def speed_errors(runs: Sequence[ScoredRun]) -> list[tuple[str, float]]:
    """Relative errors of tokens/s, by id.

    Each source's rows are split in two by turns, in the order of the table: one constant a source, the median ratio of
    measured to predicted over one half, corrects the other half, and the other way round. A source with one row only
    has no other half and is left out.
    """
    errors = []
    for source in dict.fromkeys(run.run.source for run in runs):
        own = [run for run in runs if run.run.source == source and _has_speed(run)]
        for half, other in ((own[::2], own[1::2]), (own[1::2], own[::2])):
            if not other:
                continue
            constant = math.exp(float(np.median([_log_ratio(run) for run in other])))
            errors += [(run.run.id, constant / math.exp(_log_ratio(run)) - 1) for run in half]
    return errors


def _log_ratio(run: ScoredRun) -> float:
    measured, predicted = run.run.measured.tokens_per_s, run.prediction.tokens_per_s
    assert measured is not None
    assert predicted is not None
    return math.log(measured / predicted)


_LEAST_ROWS_TO_RANK = 3


def rank_correlation(runs: Sequence[ScoredRun]) -> float | None:
    """Spearman's, of predicted and measured tokens/s within each source, their mean weighted by rows."""
    found = []
    for source in dict.fromkeys(run.run.source for run in runs):
        own = [run for run in runs if run.run.source == source and _has_speed(run)]
        predicted = [run.prediction.tokens_per_s for run in own]
        measured = [run.run.measured.tokens_per_s for run in own]
        if len(set(predicted)) < _LEAST_ROWS_TO_RANK or len(set(measured)) < _LEAST_ROWS_TO_RANK:
            continue
        found.append((float(spearmanr(predicted, measured).statistic), len(own)))
    rows = sum(count for _, count in found)
    return round(sum(value * count for value, count in found) / rows, 4) if rows else None


def _speed(runs: Sequence[ScoredRun]) -> Scores:
    return {**_errors("tokens_per_s", speed_errors(runs)), "tokens_per_s_rank_correlation": rank_correlation(runs)}


@dataclass(frozen=True)
class Target:
    """What a figure has to reach in a group of rows."""

    group: str
    measure: str
    limit: float
    is_ceiling: bool

    def is_met(self, groups: dict[str, Scores]) -> bool:
        """A figure without rows misses its target."""
        value = groups.get(self.group, {}).get(self.measure)
        if not isinstance(value, int | float):
            return False
        return value <= self.limit if self.is_ceiling else value >= self.limit


_ACCURACY = (
    ("allocated_median_abs_error_pct", 3.0, True),
    ("allocated_p90_abs_error_pct", 10.0, True),
    ("reserved_inside_interval_pct", 90.0, False),
    ("tokens_per_s_median_abs_error_pct", 10.0, True),
    ("tokens_per_s_rank_correlation", 0.9, False),
)
_OUTCOMES = (("oom_recall", 0.95, False), ("oom_precision", 0.95, False))
TARGETS = (
    *(Target("tier_a", measure, limit, ceiling) for measure, limit, ceiling in _ACCURACY),
    *(Target("total", measure, limit, ceiling) for measure, limit, ceiling in _OUTCOMES),
)
