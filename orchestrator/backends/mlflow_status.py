"""MLflow's words for how a run stands."""

from typing import Literal, assert_never

from orchestrator.contract.outcome import (
    Cancelled,
    Crashed,
    Diverged,
    Hang,
    Infra,
    Invalid,
    LostNode,
    Ok,
    OomDevice,
    OomHost,
    Outcome,
    OverLimit,
    Preempted,
    Rejected,
    Timeout,
)
from orchestrator.contract.record import SweepState

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


def status_of(outcome: Outcome | None) -> Status:
    """MLflow's word for an attempt's outcome: KILLED when something outside ended it, FAILED when it failed itself."""
    match outcome:
        case None:
            return "RUNNING"
        case Ok() | OverLimit():
            return "FINISHED"
        case Cancelled() | Preempted() | LostNode():
            return "KILLED"
        case OomDevice() | OomHost() | Diverged() | Invalid() | Hang() | Timeout() | Crashed() | Infra() | Rejected():
            return "FAILED"
        case _:
            assert_never(outcome)


def sweep_status(state: SweepState) -> Status:
    """The word for a sweep."""
    match state:
        case SweepState.RUNNING:
            return "RUNNING"
        case SweepState.FINISHED:
            return "FINISHED"
        case SweepState.FAILED:
            return "FAILED"
        case SweepState.STOPPED | SweepState.INTERRUPTED:
            return "KILLED"
        case _:
            assert_never(state)
