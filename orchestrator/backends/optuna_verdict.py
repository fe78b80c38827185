"""What an outcome teaches a sampler: a trial state, objective values and how far the memory constraint is broken."""

from dataclasses import dataclass
from typing import assert_never

from optuna.trial import TrialState

from orchestrator.contract.config import Limits
from orchestrator.contract.outcome import (
    Cancelled,
    Crashed,
    Diverged,
    Hang,
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
    Timeout,
)

MEMORY_CONSTRAINT = "memory"
LOSS_CONSTRAINT = "eval_loss"
"""Where the spec bounds the eval loss: how far it is above the greatest allowed, as a fraction of that."""
OUTCOME = "outcome"
"""The user attribute of a study's trial that tells which kind of outcome it had."""
SMALLEST_OVERSHOOT = 0.01
"""A failed allocation breaks the constraint by at least this fraction of the limit, whatever its sizes add up to."""
UNKNOWN_OVERSHOOT = 0.5
"""Fraction of the limit that an out-of-memory without sizes is taken to be over it."""


@dataclass(frozen=True)
class Verdict:
    """`constraint` is memory over the allowed amount as a fraction of it, feasible when <= 0; None: not told."""

    state: TrialState
    values: tuple[float, ...] | None = None
    constraint: float | None = None
    is_stand_in: bool = False
    """`values` are no measurement but keep a sampler going that needs a number."""


def verdict(outcome: Outcome, limits: Limits, values: tuple[float, ...] | None) -> Verdict:
    """The lesson of `outcome`. Memory failures are PRUNED with a broken constraint; causes that say nothing about
    memory or speed are FAIL, which samplers ignore. A run without every objective is FAIL too."""
    match outcome:
        case Ok(measurement=measurement):
            margin = min(0.0, _overshoot(measurement, limits))
            return Verdict(TrialState.COMPLETE, values, margin) if values else Verdict(TrialState.FAIL)
        case OverLimit(measurement=measurement):
            excess = max(SMALLEST_OVERSHOOT, _overshoot(measurement, limits))
            return Verdict(TrialState.COMPLETE, values, excess) if values else Verdict(TrialState.FAIL)
        case OomDevice():
            return Verdict(TrialState.PRUNED, constraint=_oom_overshoot(outcome))
        case OomHost():
            return Verdict(TrialState.PRUNED, constraint=UNKNOWN_OVERSHOOT)
        case Rejected(probability_fits=probability):
            return Verdict(TrialState.PRUNED, constraint=max(SMALLEST_OVERSHOOT, 1 - probability))
        case Diverged() | Invalid() | Hang() | Timeout() | Crashed() | LostNode() | Preempted() | Cancelled() | Infra():
            return Verdict(TrialState.FAIL)
        case _:
            assert_never(outcome)


def _overshoot(measurement: Measurement, limits: Limits) -> float:
    if limits.device_memory_bytes is None:
        return 0.0
    allowed_bytes = max(1, limits.device_memory_bytes - limits.headroom_bytes)
    return measurement.peak_memory_bytes / allowed_bytes - 1


def _oom_overshoot(oom: OomDevice) -> float:
    if oom.needed_bytes is None or oom.limit_bytes is None:
        return UNKNOWN_OVERSHOOT
    return max(SMALLEST_OVERSHOOT, oom.needed_bytes / oom.limit_bytes - 1)
