"""What the sweep's state machine hears, its events, and what it has done, its actions."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.contract.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TERMINATED
from orchestrator.contract.outcome import Rejected
from orchestrator.contract.record import SweepState, TrialRecord
from orchestrator.space.candidates import Candidate
from orchestrator.sweep.ports import Ended


class StopCause(StrEnum):
    """Who ended a sweep before its time: `brimful stop`, Ctrl-C, or SIGTERM."""

    STOP = "stop"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"


STOPPED_BY = {
    StopCause.STOP: "stopped on request",
    StopCause.INTERRUPT: "stopped by Ctrl-C",
    StopCause.TERMINATE: "stopped by SIGTERM",
}
EXIT_CODES = {
    StopCause.STOP: EXIT_STOPPED,
    StopCause.INTERRUPT: EXIT_INTERRUPTED,
    StopCause.TERMINATE: EXIT_TERMINATED,
}


@dataclass(frozen=True)
class Tick:
    """Time has passed. `has_room`: the pool would start one more trial at once, of some size that the spec asks for;
    `room_for` says it of one trial (None: of each what `has_room` says)."""

    now_s: float
    has_room: bool
    room_for: Callable[[TrialRecord], bool] | None = None


@dataclass(frozen=True)
class Proposed:
    """The strategy's answer to `Ask`: None when the space is exhausted. `rejected`: why it is not launched.

    `expected_gain`: see `ports.Strategy.expected_gain`. `has_room`: the pool would start this one at once.
    """

    candidate: Candidate | None
    now_s: float
    rejected: Rejected | None = None
    expected_gain: float | None = None
    has_room: bool = True


@dataclass(frozen=True)
class AttemptEnded:
    """An attempt is over. `launch_overhead_s` is None when it never began its first step."""

    ended: Ended
    now_s: float
    launch_overhead_s: float | None = None


@dataclass(frozen=True)
class StopAsked:
    """End soon: nothing new starts, what runs is cancelled and will be repeated on resume."""

    cause: StopCause


Event = Tick | Proposed | AttemptEnded | StopAsked


@dataclass(frozen=True)
class Ask:
    """Ask the strategy and bring its answer as `Proposed`."""


@dataclass(frozen=True)
class Launch:
    """Store `record`, then start its last attempt."""

    record: TrialRecord


@dataclass(frozen=True)
class Cancel:
    """End the attempt of `token`."""

    token: str


@dataclass(frozen=True)
class Store:
    """Store `record`, whose last attempt has ended."""

    record: TrialRecord


@dataclass(frozen=True)
class Tell:
    """Tell the strategy the final outcome of `record`."""

    record: TrialRecord


@dataclass(frozen=True)
class Finish:
    """Nothing runs and nothing more will: the sweep's end, with the command's exit code."""

    state: SweepState
    reason: str
    exit_code: int


Action = Ask | Launch | Cancel | Store | Tell | Finish
