"""What is said of a trial that ran: the search's figures, or those of its confirmation once there is one. Pure.

Whoever picks the fastest of many picks luck too: the figure that made a trial the winner is too high in the mean. So a
trial that was measured again is reported by those runs alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import mean, median

from orchestrator.contract.outcome import Health, Measurement, Ok, OverLimit
from orchestrator.contract.record import AttemptRecord, TrialRecord

CONFIDENCE = 0.95
_LEAST_SHARE = 1e-3
"""The lower end of an interval stays at this share of the mean at least, above zero."""


@dataclass(frozen=True)
class Reported:
    """Figures of one trial. `runs` counts the runs of its confirmation that they come from; 0: they are the search's.

    The interval of tokens/s holds the true mean in 95 % of cases. Peaks are the highest of all runs, the search's too.
    """

    runs: int
    tokens_per_second: float
    tokens_per_second_low: float
    tokens_per_second_high: float
    peak_memory_bytes: int
    peak_resident_bytes: int
    mean_step_s: float
    median_step_s: float
    mfu: float | None
    hfu: float | None


def reported(records: Iterable[TrialRecord]) -> dict[int, Reported]:
    """The figures of every trial that ran, by its number.

    How far runs of one configuration lie apart is taken from all confirmed trials of the sweep together, as a share of
    their means: two or three runs of one trial alone would say little about it.
    """
    records = list(records)
    spread = _spread({record.trial: [run for _, run in confirmed_runs(record)] for record in records})
    found = {}
    for record in records:
        if record.measurement is not None:
            found[record.trial] = _reported(record, record.measurement, spread)
    return found


def confirmed_runs(record: TrialRecord) -> list[tuple[AttemptRecord, Measurement]]:
    """Attempts of the trial's confirmation that ran to their end, with their raw numbers."""
    return [
        (attempt, attempt.outcome.measurement)
        for attempt in record.confirmations
        if isinstance(attempt.outcome, Ok | OverLimit)
    ]


def thrashes(record: TrialRecord) -> bool:
    """Whether the trial's speed hung on the luck of its allocator.

    A confirmation clears a trial that thrashed in the search when none of its runs did, and convicts one that did not.
    """
    ran = [attempt for attempt, _ in confirmed_runs(record)] or list(record.searches[-1:])
    return any(
        isinstance(attempt.outcome, Ok | OverLimit) and attempt.outcome.health is Health.THRASHING for attempt in ran
    )


def overlap(one: Reported, other: Reported) -> bool:
    """Whether the 95 % intervals of tokens/s overlap, so that neither trial can be called faster."""
    return (
        one.tokens_per_second_low <= other.tokens_per_second_high
        and other.tokens_per_second_low <= one.tokens_per_second_high
    )


@dataclass(frozen=True)
class _Spread:
    """Standard deviation of a run's tokens/s as a share of the trial's mean, from `degrees` degrees of freedom."""

    relative: float
    degrees: int

    def half_width(self, runs: int) -> float:
        """Half the interval of the mean of `runs` runs, as a share of it: Student's t."""
        from scipy.special import stdtrit  # takes 0.2 s to import: only who has confirmed anything pays it

        return float(stdtrit(self.degrees, (1 + CONFIDENCE) / 2)) * self.relative / sqrt(runs)


def _spread(runs: Mapping[int, list[Measurement]]) -> _Spread | None:
    """The pooled spread within trials (the error mean square of a one-way analysis of variance; Montgomery, Design
    and Analysis of Experiments, section 3.3); None while no trial has two runs."""
    squares, degrees = 0.0, 0
    for measurements in runs.values():
        if len(measurements) < 2:
            continue
        centre = mean(run.tokens_per_second for run in measurements)
        squares += sum((run.tokens_per_second / centre - 1) ** 2 for run in measurements)
        degrees += len(measurements) - 1
    return _Spread(sqrt(squares / degrees), degrees) if degrees else None


def _reported(record: TrialRecord, search: Measurement, spread: _Spread | None) -> Reported:
    confirmed = confirmed_runs(record)
    runs = [run for _, run in confirmed]
    shown = runs or [search]
    centre = mean(run.tokens_per_second for run in shown)
    low, high = _interval(centre, shown, spread if runs else None)
    return Reported(
        runs=len(runs),
        tokens_per_second=centre,
        tokens_per_second_low=low,
        tokens_per_second_high=high,
        peak_memory_bytes=max(run.peak_memory_bytes for run in (search, *runs)),
        peak_resident_bytes=max(run.peak_resident_bytes for run in (search, *runs)),
        mean_step_s=sum(run.measured_s for run in shown) / sum(run.measured_steps for run in shown),
        median_step_s=median(step_s for run in shown for step_s in run.step_s),
        mfu=_mean([attempt.mfu for attempt, _ in confirmed]) if runs else record.mfu,
        hfu=_mean([attempt.hfu for attempt, _ in confirmed]) if runs else record.hfu,
    )


def _interval(centre: float, shown: list[Measurement], spread: _Spread | None) -> tuple[float, float]:
    """The wider of what steps within the runs and what runs among each other allow."""
    if len(shown) == 1 and spread is None:
        return shown[0].tokens_per_second_low, shown[0].tokens_per_second_high
    halves = [(run.tokens_per_second_high - run.tokens_per_second_low) / 2 for run in shown]
    half = sqrt(sum(each**2 for each in halves)) / len(shown)
    if spread is not None:
        half = max(half, centre * spread.half_width(len(shown)))
    return max(centre - half, centre * _LEAST_SHARE), centre + half


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return mean(known) if known else None
