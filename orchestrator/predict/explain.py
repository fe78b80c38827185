"""Which tensor a failed allocation asked for: its size says what it was to hold."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import DTYPE_BYTES, Place, Point, Profile
from orchestrator.contract.units import MIB
from orchestrator.predict.job import Job
from orchestrator.predict.terms import largest
from orchestrator.predict.weights import Weight, weights_of
from orchestrator.predict.zero import aligned_numel
from orchestrator.predict.zero3 import sub_groups

TOLERANCE = 0.003
"""Relative. Error texts print two decimals, of which the last is worth 0.26 % at 1.95 GiB."""
_LEAST_BYTES = 32 * MIB
"""Smaller tensors are too many to be told apart."""
_OF_STREAM = {
    Place.LOGITS: "logits",
    Place.ACTIVATION: "activations",
    Place.TEMPORARY: "temporaries",
    Place.GRADIENT: "gradients",
}
_COMPUTED = frozenset({"logits", "activations", "temporaries", "gathered_weights"})
_MADE_IN: dict[Phase, frozenset[str]] = {
    Phase.LOAD: frozenset({"frozen_weights", "trained_weights"}),
    Phase.INIT: frozenset({"trained_weights", "master_weights", "gradients", "reduce_buckets", "gathered_weights"}),
    Phase.FORWARD: _COMPUTED,
    Phase.BACKWARD: _COMPUTED | {"gradients", "reduce_buckets"},
    Phase.OPTIMIZER_STEP: frozenset({"master_weights", "gradients"}),
}
"""Terms whose tensors are allocated in a phase. Optimizer states are as large as masters and stand under their name."""


@dataclass(frozen=True)
class Reading:
    """What a request of some size may have been for: terms of the bill, the likeliest first; `note` says what to do."""

    terms: tuple[str, ...]
    note: str = ""


def which_term(profile: Profile, job: Job, requested_bytes: int, phase: Phase | None = None) -> Reading | None:
    """The terms with a tensor of `requested_bytes` that is made in `phase`; None when no tensor is as large.

    Where only a job that offloads nothing has masters of that size on the device, the note says so.
    """
    terms = _matching(profile, job, requested_bytes, phase)
    if "master_weights" in terms:
        return Reading(terms, _SHARD_NOTE)
    if job.offload_optimizer != "none":
        elsewhere = _matching(profile, replace(job, offload_optimizer="none"), requested_bytes, phase)
        if "master_weights" in elsewhere:
            return Reading(elsewhere, _OFFLOAD_NOTE)
    return Reading(terms) if terms else None


_SHARD_NOTE = (
    "this rank's part of the masters or of an optimizer state: a smaller micro_batch does not change it; more devices, "
    "a higher zero_stage or offload_optimizer do"
)
_OFFLOAD_NOTE = (
    "as large as this rank's part of the masters, which should lie on the host: the offload appears not applied; a "
    "smaller micro_batch does not help"
)


def _matching(profile: Profile, job: Job, requested_bytes: int, phase: Phase | None) -> tuple[str, ...]:
    if requested_bytes < _LEAST_BYTES:
        return ()
    return tuple(
        dict.fromkeys(
            term
            for term, size_bytes in _tensors(profile, job)
            if abs(size_bytes - requested_bytes) <= TOLERANCE * requested_bytes
            and (phase not in _MADE_IN or term in _MADE_IN[phase])
        )
    )


def _tensors(profile: Profile, job: Job) -> Iterator[tuple[str, int]]:
    """Every tensor that may be large, those of which a job has few before those of which it has many."""
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    if job.engine == "deepspeed" and job.zero_stage > 0:
        yield from _engine_tensors(weights, job, DTYPE_BYTES[profile.request.dtype])
    yield from _stream_tensors(profile, job.point)
    for weight in weights:
        yield ("trained_weights" if weight.is_trained else "frozen_weights"), weight.bytes


def _engine_tensors(weights: tuple[Weight, ...], job: Job, low_bytes: int) -> Iterator[tuple[str, int]]:
    """The flat tensors of DeepSpeed (`orchestrator.predict.zero` and `zero3` have their sources)."""
    flat_numel = aligned_numel(weights, job.world_size)
    groups = sub_groups(weights, job) if job.zero_stage == 3 else (flat_numel // job.world_size,)
    if job.offload_optimizer == "none":
        master_bytes = DTYPE_BYTES[job.master_dtype or "fp32"]
        yield from (("master_weights", numel * master_bytes) for numel in groups)
        yield "gradients", sum(groups) * low_bytes
    yield "reduce_buckets", job.reduce_bucket_size * low_bytes
    if job.zero_stage == 3:
        yield "gathered_weights", largest(weight.padded_bytes(job.world_size) for weight in weights)
    else:
        yield "trained_weights", flat_numel * low_bytes


def _stream_tensors(profile: Profile, point: Point) -> Iterator[tuple[str, int]]:
    sizes = profile.storage_bytes(point)
    for place, term in _OF_STREAM.items():
        for size_bytes in np.unique(sizes[profile.storage_place == place]).tolist():
            yield term, size_bytes
