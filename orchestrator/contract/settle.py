"""From how every rank of an attempt ended to the attempt's one outcome.

The first failure that has a cause of its own wins. A rank that fails because a peer went away (its report says
`is_consequence`), or that was ended because its group was over, never decides while another rank has a cause.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.handoff import EXIT_STORAGE
from orchestrator.contract.outcome import Crashed, Infra, Ok, OomHost, Outcome, OverLimit, Phase
from orchestrator.contract.rank import RankReport

NO_RESULT = "ended without a result"
TORN_RESULT = "ended with a damaged result"


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    `status` is the exit code, or minus the signal; None when it never ran. `phase` is the last one that its events
    name. `order` counts ends in the order in which they were seen.
    """

    rank: int
    status: int | None
    order: int
    report: RankReport | None = None
    is_report_torn: bool = False
    phase: Phase = Phase.START
    log_tail: str = ""
    was_ended_by_group: bool = False
    """True: it was killed because its group was already over."""
    oom_evidence: str | None = None
    """What shows that the kernel or Ray ended it for want of host memory (a cgroup counter, the memory monitor)."""

    @property
    def has_succeeded(self) -> bool:
        """Whether its whole report says that the trial ran."""
        return self.report is not None and isinstance(self.report.outcome, Ok | OverLimit)

    @property
    def is_secondary(self) -> bool:
        """Whether its failure follows from another one."""
        if self.report is not None:
            return self.report.is_consequence
        return self.was_ended_by_group


def settle(ends: Sequence[RankEnd]) -> Outcome:
    """The outcome of an attempt whose ranks ended like `ends` (one for each rank, at least one)."""
    failures = [end for end in ends if not end.has_succeeded]
    if not failures:
        first = min(ends, key=lambda end: end.rank)
        assert first.report is not None
        return first.report.outcome
    primary = [end for end in failures if not end.is_secondary] or [end for end in failures if end.report is not None]
    decisive = min(primary or failures, key=_when)
    return _outcome_of(decisive)


def _when(end: RankEnd) -> tuple[int, float, int]:
    """Reports carry the time of the error itself; without one, only the order of the ends is known."""
    return (0, end.report.time_s, end.order) if end.report is not None else (1, 0.0, end.order)


def _outcome_of(end: RankEnd) -> Outcome:
    if end.report is None:
        return _without_report(end)
    return end.report.outcome


def _without_report(end: RankEnd) -> Outcome:
    if end.status is not None and end.status < 0:
        return _ended_by_signal(end, -end.status)
    if end.status == EXIT_STORAGE:
        return Infra(cause=f"rank {end.rank} could not write its files", evidence=end.log_tail)
    error = TORN_RESULT if end.is_report_torn else NO_RESULT
    return Crashed(
        phase=end.phase,
        rank=end.rank,
        error=f"rank {end.rank} {error} (exit code {end.status})",
        exit_code=end.status,
        evidence=end.log_tail,
    )


def _ended_by_signal(end: RankEnd, number: int) -> Outcome:
    name = signal_name(number)
    if number == signal.SIGKILL and end.oom_evidence is not None:
        return OomHost(phase=end.phase, rank=end.rank, evidence=end.oom_evidence)
    return Crashed(
        phase=end.phase,
        rank=end.rank,
        error=f"rank {end.rank} was ended by {name}",
        signal=name,
        evidence=end.log_tail,
    )


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` where the platform has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
