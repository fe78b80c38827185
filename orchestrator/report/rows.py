"""One trial as one flat row: what `brimful trials --json` prints and every table is made of."""

from typing import Literal, assert_never

from pydantic import JsonValue

from orchestrator.contract.config import Frozen
from orchestrator.contract.outcome import (
    OUTCOME,
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
from orchestrator.contract.record import SweepState, TrialRecord
from orchestrator.contract.units import format_bytes, format_duration

_LEAST_ODDS = 0.001
TrialState = Literal["waiting", "running", "interrupted", "done"]


class TrialRow(Frozen):
    """A trial for readers. Fields that the trial has no number for are None; nothing stands in for them."""

    trial: int
    candidate: str
    label: str
    is_baseline: bool
    state: TrialState
    attempt: int
    """Launches so far; 0 before the first."""
    config: dict[str, JsonValue]
    """Every knob by name; None where it has no effect beside the others."""
    outcome: dict[str, JsonValue] | None
    """The outcome with `kind` and `phase` (None for one that ran), and all else it states."""
    summary: str
    """The outcome in a few words."""
    tokens_per_second: float | None = None
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    peak_memory_bytes: int | None = None
    peak_resident_bytes: int | None = None
    limit_bytes: int | None = None
    needed_bytes: int | None = None
    """For a device out-of-memory: at least this much was needed."""
    shortfall_bytes: int | None = None
    """How far the trial was from fitting: bytes needed, and headroom asked for, beyond the limit."""
    padding_fraction: float | None = None
    step_s: float | None = None
    """Mean duration of a measured optimizer step."""
    mfu: float | None = None
    hfu: float | None = None
    eval_loss: float | None = None
    """Mean cross-entropy on the held-out rows, in nats a token."""
    eval_loss_excess: float | None = None
    """Fraction of the baseline's by which it is above it; negative below."""
    trained_tokens: int | None = None
    """Tokens that were trained on before the loss was taken."""
    cannot_win: str = ""
    """Why a trial that fits is ranked behind those that may win; empty: it may."""
    reaches_sequence_length: bool | None = None
    launch_overhead_s: float | None = None
    world_size: int
    gradient_accumulation: int
    node: str | None = None


def trial_row(record: TrialRecord, sweep_state: SweepState) -> TrialRow:
    """The row of `record`, seen while its sweep is in `sweep_state`."""
    last = record.attempts[-1] if record.attempts else None
    measurement = record.measurement
    limit_bytes = _limit_bytes(record)
    row = TrialRow(
        trial=record.trial,
        candidate=record.candidate,
        label=record.label,
        is_baseline=record.is_baseline,
        state=_state(record, sweep_state),
        attempt=last.attempt if last and not isinstance(record.outcome, Rejected) else 0,
        config=record.config.knobs.model_dump(mode="json"),
        outcome=_outcome_json(record.outcome),
        summary=describe(record.outcome) if record.outcome is not None else "",
        limit_bytes=limit_bytes,
        needed_bytes=record.outcome.needed_bytes if isinstance(record.outcome, OomDevice) else None,
        shortfall_bytes=_shortfall_bytes(record, limit_bytes),
        mfu=record.mfu,
        hfu=record.hfu,
        launch_overhead_s=last.launch_overhead_s if last else None,
        world_size=record.config.world_size,
        gradient_accumulation=record.config.gradient_accumulation,
        node=last.node if last else None,
    )
    if measurement is None:
        return row
    return row.model_copy(
        update={
            "tokens_per_second": measurement.tokens_per_second,
            "tokens_per_second_low": measurement.tokens_per_second_low,
            "tokens_per_second_high": measurement.tokens_per_second_high,
            "peak_memory_bytes": measurement.peak_memory_bytes,
            "peak_resident_bytes": measurement.peak_resident_bytes,
            "padding_fraction": measurement.padding_fraction,
            "step_s": measurement.measured_s / measurement.measured_steps,
            "eval_loss": measurement.eval_loss,
            "trained_tokens": measurement.trained_tokens,
            "reaches_sequence_length": measurement.reaches_sequence_length,
        }
    )


def describe(outcome: Outcome) -> str:
    """`outcome` in a few words, its phase and its main number included."""
    match outcome:
        case Ok(health=health):
            return "ok" if health == "good" else f"ok, {health}"
        case OverLimit():
            return "ran, but leaves too little headroom"
        case OomDevice(phase=phase, requested_bytes=requested_bytes):
            asked = f", asked for {format_bytes(requested_bytes)}" if requested_bytes is not None else ""
            return f"out of device memory in {phase}{asked}"
        case OomHost(phase=phase):
            return f"out of host memory in {phase}"
        case Diverged(phase=phase, step=step):
            return f"diverged in {phase} at step {step}"
        case Invalid(reason=reason):
            return f"invalid: {_first_line(reason)}"
        case Hang(phase=phase, rank=rank, silent_s=silent_s):
            return f"rank {rank} hung in {phase}, silent for {format_duration(silent_s)}"
        case Timeout(phase=phase, elapsed_s=elapsed_s):
            return f"timed out in {phase} after {format_duration(elapsed_s)}"
        case Crashed(phase=phase, error=error):
            return f"crashed in {phase}: {_first_line(error)}"
        case LostNode(node=node):
            return f"node {node} was lost"
        case Preempted():
            return "preempted"
        case Cancelled():
            return "cancelled"
        case Infra(cause=cause):
            return f"infrastructure: {_first_line(cause)}"
        case Rejected(probability_fits=probability_fits, needed_bytes=needed_bytes, memory=memory):
            where = " of host memory" if memory == "host" else ""
            needs = f", would need {format_bytes(needed_bytes)}{where}" if needed_bytes is not None else ""
            return f"not launched: fits with probability {odds(probability_fits)}{needs}"
        case _:
            assert_never(outcome)


def odds(probability: float) -> str:
    """`probability` for readers, who are never told a certainty."""
    if probability < _LEAST_ODDS:
        return f"below {_LEAST_ODDS}"
    return f"{probability:.2g}" if probability <= 1 - _LEAST_ODDS else f"above {1 - _LEAST_ODDS}"


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _state(record: TrialRecord, sweep_state: SweepState) -> TrialState:
    if not record.attempts:
        return "waiting"
    if record.outcome is not None:
        return "done"
    return "running" if sweep_state is SweepState.RUNNING else "interrupted"


def _outcome_json(outcome: Outcome | None) -> dict[str, JsonValue] | None:
    if outcome is None:
        return None
    content: dict[str, JsonValue] = OUTCOME.dump_python(outcome, mode="json")
    return {"phase": None} | content


def _limit_bytes(record: TrialRecord) -> int | None:
    if record.measurement is not None and record.measurement.limit_bytes is not None:
        return record.measurement.limit_bytes
    if isinstance(record.outcome, OomDevice) and record.outcome.limit_bytes is not None:
        return record.outcome.limit_bytes
    return record.config.limits.device_memory_bytes


def _shortfall_bytes(record: TrialRecord, limit_bytes: int | None) -> int | None:
    """None for a trial that fits, and where the sizes are not known."""
    if limit_bytes is None:
        return None
    match record.outcome:
        case OverLimit(measurement=measurement):
            return measurement.peak_memory_bytes + record.config.limits.headroom_bytes - limit_bytes
        case OomDevice(needed_bytes=int(needed_bytes)):
            return needed_bytes + record.config.limits.headroom_bytes - limit_bytes
        case _:
            return None
