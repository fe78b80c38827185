"""From what failed to what became of the trial: a pure function over the error's type, its text and the limit."""

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.outcome import Crashed, Diverged, Infra, Invalid, OomDevice, OomHost, Outcome, Phase
from orchestrator.contract.units import GIB, KIB, MIB, TIB

EVIDENCE_CHARACTERS = 20_000
_NEAR_LIMIT_BYTES = 64 * MIB
_NEAR_LIMIT_FRACTION = 0.9

_LIBRARY_ERRORS = frozenset(
    {"RuntimeError", "OutOfMemoryError", "AcceleratorError", "MemoryError", "DistBackendError", "OSError"}
)
"""Types that libraries use for a failed allocation; the same words in another error are a user's own."""

_DEVICE_OOM = (
    "CUDA out of memory",
    "HIP out of memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "cudaErrorMemoryAllocation",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
_PINNED_OOM = ("cudaHostAlloc", "hipHostMalloc", "cudaHostRegister", "pinned memory")
_HOST_OOM = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "not enough memory", "[Errno 12]")
_AMBIGUOUS = (
    "Resource temporarily unavailable",
    "can't start new thread",
    "[Errno 11]",
    "could not create a primitive",
    "could not execute a primitive",
)
"""Said for want of memory and for other reasons too; the first is gloo's, the last are oneDNN's."""
_ADDRESS_IN_USE = ("EADDRINUSE", "address already in use")
_DISK_FULL = ("No space left on device", "[Errno 28]", "Disk quota exceeded")
_BROKEN_DEVICE = ("uncorrectable ECC", "ECC error", "NVLink error", "fallen off the bus", "device is lost")
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket Timeout",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Watchdog caught collective operation timeout",
    "remote process exited",
)

_UNITS = {"B": 1, "BYTES": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB, "KB": 1000, "MB": 10**6, "GB": 10**9}
_SIZE = r"(\d+(?:\.\d+)?)\s*(bytes|[KMGT]iB|[KMG]B)"
_REQUESTED = (re.compile(rf"[Tt]ried to allocate {_SIZE}"), re.compile(r"you tried to allocate (\d+) (bytes)"))
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_RESERVED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


@dataclass(frozen=True)
class Failure:
    """An error and where it happened. `types` are the names of its class and base classes.

    `peak_bytes` is the highest use so far of what `limit_bytes` limits, `reserved_bytes` what the allocator held.
    """

    types: tuple[str, ...]
    text: str
    traceback: str
    phase: Phase
    rank: int
    device: Literal["cpu", "cuda"]
    step: int = 0
    batch_tokens: int | None = None
    limit_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def first_line(self) -> str:
        """The error as Python prints it, cut to its first line."""
        lines = self.text.strip().splitlines()
        return f"{self.types[0]}: {lines[0]}" if lines else self.types[0]

    @property
    def evidence(self) -> str:
        """The traceback, its middle left out when it is long."""
        if len(self.traceback) <= EVIDENCE_CHARACTERS:
            return self.traceback
        half = EVIDENCE_CHARACTERS // 2
        return f"{self.traceback[:half]}\n[...]\n{self.traceback[-half:]}"

    @property
    def is_at_limit(self) -> bool:
        """Whether the rank had used up its limit, as far as 64 MiB or a tenth of it tell."""
        if self.limit_bytes is None or self.peak_bytes is None:
            return False
        near_bytes = max(_NEAR_LIMIT_BYTES, (1 - _NEAR_LIMIT_FRACTION) * self.limit_bytes)
        return self.limit_bytes - self.peak_bytes <= near_bytes


@dataclass(frozen=True)
class Verdict:
    """The outcome, and whether it only follows from a peer's end."""

    outcome: Outcome
    is_consequence: bool = False


def classify(failure: Failure) -> Verdict:
    """What became of a trial that ended by `failure`."""
    if "InvalidTrial" in failure.types or "PreflightError" in failure.types:
        return Verdict(Invalid(phase=failure.phase, reason=failure.text.strip()))
    if "LossDiverged" in failure.types:
        return Verdict(Diverged(phase=failure.phase, step=failure.step, evidence=failure.text.strip()))
    return _surroundings(failure) or _memory(failure) or _peer(failure) or Verdict(_crashed(failure))


def _surroundings(failure: Failure) -> Verdict | None:
    causes: tuple[tuple[tuple[str, ...], str, Literal["device", "node"] | None], ...] = (
        (_ADDRESS_IN_USE, "a port of the rank group was taken by another process", None),
        (_DISK_FULL, "the disk is full", "node"),
        (_BROKEN_DEVICE, "the device reports a hardware error", "device"),
    )
    for texts, cause, blames in causes:
        if _is_library_error(failure) and _has(failure, texts):
            words = f"{cause}: {failure.first_line}" if blames == "device" else cause
            return Verdict(Infra(cause=words, evidence=failure.evidence, blames=blames))
    return None


def _memory(failure: Failure) -> Verdict | None:
    if not _is_library_error(failure):
        return None
    if _has(failure, _PINNED_OOM) and _has(failure, ("out of memory", "memory allocation")):
        return Verdict(_oom_host(failure))
    if "OutOfMemoryError" in failure.types or _has(failure, _DEVICE_OOM):
        return Verdict(_oom_device(failure))
    is_allocation = "MemoryError" in failure.types or _has(failure, _HOST_OOM)
    is_at_cpu_limit = failure.device == "cpu" and failure.limit_bytes is not None
    if is_allocation:
        return Verdict(_oom_device(failure) if is_at_cpu_limit else _oom_host(failure))
    if _has(failure, _AMBIGUOUS) and is_at_cpu_limit and failure.is_at_limit:
        return Verdict(_oom_device(failure))
    return None


def _peer(failure: Failure) -> Verdict | None:
    if "DistNetworkError" in failure.types or "DistStoreError" in failure.types:
        return Verdict(_crashed(failure), is_consequence=True)
    if _is_library_error(failure) and _has(failure, _PEER_GONE):
        return Verdict(_crashed(failure), is_consequence=True)
    return None


def _is_library_error(failure: Failure) -> bool:
    return failure.types[0] in _LIBRARY_ERRORS or not _LIBRARY_ERRORS.isdisjoint(failure.types)


def _has(failure: Failure, texts: tuple[str, ...]) -> bool:
    text = failure.text.lower()
    return any(each.lower() in text for each in texts)


def _oom_device(failure: Failure) -> OomDevice:
    allocated_bytes = _size_bytes(_ALLOCATED, failure.text)
    unallocated_bytes = _size_bytes(_RESERVED, failure.text)
    reserved_bytes = failure.reserved_bytes
    if allocated_bytes is not None and unallocated_bytes is not None:
        reserved_bytes = allocated_bytes + unallocated_bytes
    requested = [_size_bytes(pattern, failure.text) for pattern in _REQUESTED]
    return OomDevice(
        phase=failure.phase,
        rank=failure.rank,
        requested_bytes=next((each for each in requested if each is not None), None),
        allocated_bytes=failure.peak_bytes if allocated_bytes is None else allocated_bytes,
        reserved_bytes=reserved_bytes,
        limit_bytes=failure.limit_bytes,
        step=failure.step,
        tokens=failure.batch_tokens,
        evidence=failure.evidence,
    )


def _oom_host(failure: Failure) -> OomHost:
    return OomHost(phase=failure.phase, rank=failure.rank, evidence=failure.evidence)


def _crashed(failure: Failure) -> Crashed:
    return Crashed(
        phase=failure.phase, rank=failure.rank, error=failure.first_line, exit_code=1, evidence=failure.evidence
    )


def _size_bytes(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return round(float(match[1]) * _UNITS[match[2].upper()]) if match else None
