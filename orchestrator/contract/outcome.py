"""What became of a trial: a closed union. Every `match` over it ends in `assert_never`."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter

from orchestrator.contract.config import Frozen
from orchestrator.contract.units import printable

Words = Annotated[str, AfterValidator(printable)]
"""Text that comes from a trial; control characters in it would act on the terminal that shows it."""
MAX_TOKENS_PER_SECOND = 1e12
"""A figure above is no measurement: the pre-training of Llama 3 405B on 16,384 H100s ran at some 3e6 tokens/s
(arXiv:2407.21783, 400 TFLOP/s a device)."""


class Phase(StrEnum):
    """The part of a trial that was running. LOAD builds the model, INIT builds the engine and its optimizer."""

    START = "start"
    LOAD = "load"
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVAL = "eval"
    SAVE = "save"


class Health(StrEnum):
    """`thrashing`: a training step found no memory until the allocator had given its cache back, so what it measured
    hangs on luck; `fragmented`: reserved memory lies far above allocated memory."""

    GOOD = "good"
    THRASHING = "thrashing"
    FRAGMENTED = "fragmented"


class RankMemory(Frozen):
    """Peaks of one rank, in bytes, over the whole trial.

    On CPU `peak_memory_bytes` is growth of VmPeak over the fresh fork (what the limit limits) and
    `peak_resident_bytes` growth of VmHWM. On CUDA they are `max_memory_reserved` and the host's VmHWM growth.
    """

    rank: int
    peak_memory_bytes: int
    peak_resident_bytes: int
    peak_allocated_bytes: int | None = None
    peak_device_bytes: int | None = None
    """Bytes in use on the whole device as its driver reports them (NVML); None on CPU."""
    allocation_retries: int = 0
    held_bytes: tuple[int, ...] = ()
    """After each measured step, when its tensors are gone: allocated on CUDA, writable address space on CPU."""
    peak_by_phase_bytes: dict[Phase, int] = {}


class Measurement(Frozen):
    """Raw numbers of a trial that ran. Ratios such as MFU are derived from them by the control plane."""

    tokens_per_second: float = Field(gt=0, lt=MAX_TOKENS_PER_SECOND)
    """Non-padding tokens of all ranks per second of measured steps."""
    tokens_per_second_low: float = Field(gt=0)
    tokens_per_second_high: float = Field(gt=0)
    """Ends of the 95 % confidence interval."""
    tokens: int = Field(gt=0)
    """Non-padding tokens of all ranks in the measured steps."""
    padding_tokens: int = Field(ge=0)
    padding_fraction: float = Field(ge=0, lt=1)
    sequences: int = Field(gt=0)
    sum_squared_lengths: int = Field(ge=0)
    """Sum over the measured rows of length squared, in tokens: the attention FLOPs need it."""
    measured_steps: int = Field(gt=0)
    raced_out: bool = False
    """Measuring ended early, since the trial was surely slower than what it had to beat."""
    measured_s: float = Field(gt=0)
    step_s: tuple[float, ...]
    """Duration of each measured optimizer step, in seconds."""
    peak_memory_bytes: int = Field(gt=0)
    """Maximum over ranks."""
    peak_resident_bytes: int = Field(gt=0)
    limit_bytes: int | None = None
    ranks: tuple[RankMemory, ...]
    probe_row_tokens: int = Field(gt=0)
    """Tokens, without padding, of the longest row that the memory probe ran."""
    reaches_sequence_length: bool
    """False: no row was as long as `sequence_length`, so the peak says nothing about rows of that length."""
    trainable_parameters: int = Field(gt=0)
    total_parameters: int = Field(gt=0)
    first_loss: float
    last_loss: float
    eval_loss: float | None = None
    """Mean cross-entropy on the held-out rows, in nats a token, after `trained_tokens`; None when not asked for."""
    eval_tokens: int | None = None
    """Tokens of the held-out rows that were predicted."""
    trained_tokens: int | None = None
    """Non-padding tokens of all ranks that were trained on, from the first weights on, before `eval_loss`."""
    device: Literal["cpu", "cuda"]
    device_name: str
    threads_per_rank: int
    resolved: dict[str, JsonValue]
    """The DeepSpeed configuration that every rank ran with."""


class Ok(Frozen):
    """Ran, every check passed, and the peak leaves the wished headroom."""

    kind: Literal["ok"] = "ok"
    measurement: Measurement
    health: Health = Health.GOOD


class OverLimit(Frozen):
    """Ran, but its peak leaves less headroom than asked, or its ranks took more host memory than the limit."""

    kind: Literal["over_limit"] = "over_limit"
    measurement: Measurement
    health: Health = Health.GOOD


class OomDevice(Frozen):
    """A device allocation failed. Sizes that the error did not state are None."""

    kind: Literal["oom_device"] = "oom_device"
    phase: Phase
    rank: int
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    step: int | None = None
    tokens: int | None = None
    """Tokens (padding included) of the batch that was running."""
    evidence: Words

    @property
    def needed_bytes(self) -> int | None:
        """At least this much was needed: what was held plus what was asked for."""
        if self.allocated_bytes is None or self.requested_bytes is None:
            return None
        return max(self.allocated_bytes, self.reserved_bytes or 0) + self.requested_bytes


class OomHost(Frozen):
    """Host memory ran out, with the evidence (exception text, cgroup counter, Ray's memory monitor)."""

    kind: Literal["oom_host"] = "oom_host"
    phase: Phase
    rank: int | None = None
    evidence: Words


class Diverged(Frozen):
    """The loss or a gradient became NaN or infinite."""

    kind: Literal["diverged"] = "diverged"
    phase: Phase
    step: int
    evidence: Words


class Invalid(Frozen):
    """The run did not do what the candidate says, or the configuration cannot be run."""

    kind: Literal["invalid"] = "invalid"
    phase: Phase
    reason: Words


class Hang(Frozen):
    """A rank showed no progress; `evidence` holds its stack where it could be read."""

    kind: Literal["hang"] = "hang"
    phase: Phase
    rank: int
    silent_s: float
    evidence: Words = ""


class Timeout(Frozen):
    """The trial was still making progress when its time was over."""

    kind: Literal["timeout"] = "timeout"
    phase: Phase
    elapsed_s: float


class Crashed(Frozen):
    """A rank ended by an error, a signal, or without a (whole) result; the first error of the group."""

    kind: Literal["crashed"] = "crashed"
    phase: Phase
    rank: int | None
    error: Words
    """First line: exception type and text, or how the process ended."""
    exit_code: int | None = None
    signal: str | None = None
    evidence: Words = ""
    """Traceback or the end of the rank's log."""
    node: str | None = None
    """Where the rank ran."""


class LostNode(Frozen):
    """The node that ran the trial is gone."""

    kind: Literal["lost_node"] = "lost_node"
    node: str
    evidence: Words = ""


class Preempted(Frozen):
    """The trial was taken down from outside to free its devices."""

    kind: Literal["preempted"] = "preempted"
    node: str | None = None
    evidence: Words = ""


class Cancelled(Frozen):
    """The user stopped the sweep while the trial ran."""

    kind: Literal["cancelled"] = "cancelled"


class Infra(Frozen):
    """The surroundings failed, not the candidate: a bind race, a stale build lock, a full disk."""

    kind: Literal["infra"] = "infra"
    cause: Words
    evidence: Words = ""
    node: str | None = None
    """Where it failed."""
    blames: Literal["device", "node"] | None = None
    """`device`: it reports a hardware error, or others hold its memory. `node`: what failed there may fail again, or
    was bad luck. None: nothing of the place is to blame, as for a port that was taken."""


class Rejected(Frozen):
    """Predicted not to fit; never launched. All figures are predicted."""

    kind: Literal["rejected"] = "rejected"
    probability_fits: float
    bill: dict[str, int]
    """Bytes of one device, or of one node's host, at the highest moment, by term."""
    phase: Phase | None = None
    """Where that moment is."""
    memory: Literal["device", "host"] = "device"
    """Of which there is too little."""
    needed_bytes: int | None = None
    """The least that it must have."""
    capacity_bytes: int | None = None
    """What it has."""


Outcome = Annotated[
    Ok
    | OverLimit
    | OomDevice
    | OomHost
    | Diverged
    | Invalid
    | Hang
    | Timeout
    | Crashed
    | LostNode
    | Preempted
    | Cancelled
    | Infra
    | Rejected,
    Field(discriminator="kind"),
]
OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)

RETRIED_KINDS = frozenset({"lost_node", "preempted", "infra"})
"""Causes that lie outside the candidate: retried, up to MAX_RETRIES times each."""
MAX_RETRIES = 3
KILLED_RETRIES = 1
"""Of a rank that was killed from outside with nothing that tells why (docs/decisions/0017)."""
INTERRUPTED_KINDS = frozenset({"cancelled"})
"""Ends that say nothing about the candidate and are run again on resume without counting as a retry."""


def retries_of(outcome: Outcome) -> int:
    """How often a trial that ends so, whatever the candidate, is launched again."""
    if outcome.kind in RETRIED_KINDS:
        return MAX_RETRIES
    return KILLED_RETRIES if isinstance(outcome, Crashed) and outcome.signal == "SIGKILL" else 0
