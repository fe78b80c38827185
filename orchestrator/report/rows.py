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
    Health,
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
from orchestrator.contract.record import SweepState, TrialRecord
from orchestrator.contract.units import format_bytes, format_duration
from orchestrator.search.leak import leak_of
from orchestrator.search.reported import Reported, thrashes

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
    """Launches so far, those of the confirmation included; 0 before the first."""
    config: dict[str, JsonValue]
    """Every knob by name; None where it has no effect beside the others."""
    outcome: dict[str, JsonValue] | None
    """The outcome with `kind` and `phase` (None for one that ran), and all else it states."""
    summary: str
    """The outcome in a few words."""
    tokens_per_second: float | None = None
    """Of the confirmation's runs when there are any, else of the search; the interval likewise."""
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    search_tokens_per_second: float | None = None
    """What the search measured."""
    confirmation_runs: int = 0
    """Runs of the confirmation that came to their end."""
    is_confirming: bool = False
    """The trial is being measured again now."""
    failed_confirmation: bool = False
    """It ran in the search and failed when it was measured again: `outcome` tells how."""
    is_thrashing: bool = False
    """The allocator found memory only after it had given its cache back, so the speed hangs on luck."""
    raced_out: bool = False
    """Measuring ended early, since the trial was surely slower than the best before it."""
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
    nodes: int | None = None
    """Nodes that the spec asks for; None: as few as hold its ranks."""
    gradient_accumulation: int
    node: str | None = None
    rank_nodes: tuple[str, ...] = ()
    """The node of each rank of the last launch, once it has ended."""


def trial_row(record: TrialRecord, sweep_state: SweepState, figures: Reported | None) -> TrialRow:
    """The row of `record`, seen while its sweep is in `sweep_state`. `figures`: what is reported of one that ran."""
    last = record.attempts[-1] if record.attempts else None
    standing, has_failed = record.standing, record.standing is not record.outcome
    limit_bytes = _limit_bytes(record)
    row = TrialRow(
        trial=record.trial,
        candidate=record.candidate,
        label=record.label,
        is_baseline=record.is_baseline,
        state=_state(record, sweep_state),
        attempt=last.attempt if last and not isinstance(standing, Rejected) else 0,
        config=record.config.knobs.model_dump(mode="json"),
        outcome=_outcome_json(standing),
        summary="" if standing is None else f"{describe(standing)}{', when measured again' if has_failed else ''}",
        limit_bytes=limit_bytes,
        needed_bytes=standing.needed_bytes if isinstance(standing, OomDevice) else None,
        shortfall_bytes=_shortfall_bytes(record, limit_bytes),
        is_confirming=record.running in record.confirmations and sweep_state is SweepState.RUNNING,
        failed_confirmation=has_failed,
        launch_overhead_s=last.launch_overhead_s if last else None,
        world_size=record.config.world_size,
        nodes=record.config.nodes,
        gradient_accumulation=record.config.gradient_accumulation,
        node=last.node if last else None,
        rank_nodes=last.nodes if last else (),
    )
    measurement = record.measurement
    if measurement is None or figures is None:
        return row
    row = row.model_copy(update={"search_tokens_per_second": measurement.tokens_per_second})
    if not isinstance(standing, Ok | OverLimit):
        return row
    return row.model_copy(
        update={
            "tokens_per_second": figures.tokens_per_second,
            "tokens_per_second_low": figures.tokens_per_second_low,
            "tokens_per_second_high": figures.tokens_per_second_high,
            "confirmation_runs": figures.runs,
            "is_thrashing": thrashes(record),
            "raced_out": measurement.raced_out,
            "peak_memory_bytes": figures.peak_memory_bytes,
            "peak_resident_bytes": figures.peak_resident_bytes,
            "padding_fraction": measurement.padding_fraction,
            "step_s": figures.mean_step_s,
            "mfu": figures.mfu,
            "hfu": figures.hfu,
            "eval_loss": measurement.eval_loss,
            "trained_tokens": measurement.trained_tokens,
            "reaches_sequence_length": measurement.reaches_sequence_length,
        }
    )


def _leaking(measurement: Measurement) -> str:
    leak = leak_of(measurement)
    if leak is None:
        return ""
    until = "" if leak.steps_to_limit is None else f", and meets the limit after {leak.steps_to_limit} more"
    return f", leaking: memory grows by {format_bytes(round(leak.bytes_per_step))} a step{until}"


def describe(outcome: Outcome) -> str:
    """`outcome` in a few words, its phase and its main number included."""
    match outcome:
        case Ok(health=health, measurement=measurement):
            early = ", ended early: slower than the best" if measurement.raced_out else ""
            state = "ok" if health is Health.GOOD else f"ok, {health}"
            return f"{state}{_leaking(measurement)}{early}"
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
        case Preempted(node=node):
            return f"preempted: node {node} was taken away" if node is not None else "preempted"
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
    if isinstance(record.standing, OomDevice) and record.standing.limit_bytes is not None:
        return record.standing.limit_bytes
    return record.config.limits.device_memory_bytes


def _shortfall_bytes(record: TrialRecord, limit_bytes: int | None) -> int | None:
    """None for a trial that fits, and where the sizes are not known."""
    if limit_bytes is None:
        return None
    match record.standing:
        case OverLimit(measurement=measurement):
            return measurement.peak_memory_bytes + record.config.limits.headroom_bytes - limit_bytes
        case OomDevice(needed_bytes=int(needed_bytes)):
            return needed_bytes + record.config.limits.headroom_bytes - limit_bytes
        case _:
            return None
