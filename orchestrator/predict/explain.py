"""Which tensor a failed allocation asked for: its size says what it was to hold."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.contract.profile import DTYPE_BYTES, Place, Point, Profile
from orchestrator.predict.job import Job
from orchestrator.predict.memory import PLACE_TERMS
from orchestrator.predict.weights import Weight, trained, weights_of
from orchestrator.predict.zero import aligned_numel
from orchestrator.predict.zero3 import sub_groups

TOLERANCE = 0.003
"""Relative. Error texts print two decimals, of which the last is worth 0.26 % at 1.95 GiB."""
_LEAST_BYTES = 32 * 2**20
"""Smaller requests are too many to be told apart."""


@dataclass(frozen=True)
class Reading:
    """What a request of some size was for. `note`: what follows from it; empty where nothing does."""

    term: str
    note: str = ""


def which_term(profile: Profile, job: Job, requested_bytes: int) -> Reading | None:
    """The term of the bill that a tensor of `requested_bytes` belongs to; None when no tensor of the job is as large.

    Where only a job that offloads nothing has such a tensor, the reading says that the offload is not in force.
    """
    term = _matching(profile, job, requested_bytes)
    if term is not None:
        return Reading(term, _SHARD_NOTE if term == "master_weights" else "")
    if job.offload_optimizer == "none":
        return None
    term = _matching(profile, replace(job, offload_optimizer="none"), requested_bytes)
    return Reading(term, _OFFLOAD_NOTE) if term == "master_weights" else None


_SHARD_NOTE = (
    "this rank's part of the masters or of an optimizer state, made when the optimizer is built or in its first step: "
    "a smaller micro-batch does not change it, more ranks, a higher stage or offload_optimizer do"
)
_OFFLOAD_NOTE = (
    "this rank's part of the masters, on the device although offload_optimizer is set: the offload appears not to be "
    "applied, and a smaller micro-batch does not help"
)


def _matching(profile: Profile, job: Job, requested_bytes: int) -> str | None:
    if requested_bytes < _LEAST_BYTES:
        return None
    found = [
        (abs(size_bytes - requested_bytes), term)
        for term, size_bytes in _tensors(profile, job)
        if abs(size_bytes - requested_bytes) <= TOLERANCE * requested_bytes
    ]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _tensors(profile: Profile, job: Job) -> Iterator[tuple[str, int]]:
    """Every large tensor of the job; those of the engine first, since of equal distances the first one counts."""
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    yield from _engine_tensors(weights, job, DTYPE_BYTES[profile.request.dtype])
    yield from _stream_tensors(profile, job.point)
    for weight in weights:
        yield ("trained_weights" if weight.is_trained else "frozen_weights"), weight.bytes


def _engine_tensors(weights: tuple[Weight, ...], job: Job, low_bytes: int) -> Iterator[tuple[str, int]]:
    """The flat tensors of DeepSpeed (`orchestrator.predict.zero`, `zero3`); the other engines have one a weight."""
    if job.engine != "deepspeed" or job.zero_stage == 0:
        return
    if job.zero_stage == 3:
        groups = sub_groups(weights, job)
    else:
        groups = (aligned_numel(weights, job.world_size) // job.world_size,)
        yield "trained_weights", aligned_numel(weights, job.world_size) * low_bytes
    if job.offload_optimizer == "none":
        master_bytes = DTYPE_BYTES[job.master_dtype or "fp32"]
        yield from (("master_weights", numel * master_bytes) for numel in groups)
        yield "gradients", sum(groups) * low_bytes
    yield "reduce_buckets", job.reduce_bucket_size * low_bytes
    if job.zero_stage == 3:
        yield "gathered_weights", max((weight.padded_bytes(job.world_size) for weight in weights), default=0)
        yield "gathered_weights", max((weight.padded_bytes(job.world_size) for weight in trained(weights)), default=0)


def _stream_tensors(profile: Profile, point: Point) -> Iterator[tuple[str, int]]:
    sizes = profile.storage_bytes(point)
    for place, term in PLACE_TERMS.items():
        for size_bytes in np.unique(sizes[profile.storage_place == Place(place)]).tolist():
            yield term, size_bytes
    for size_bytes in np.unique(sizes[profile.storage_place == Place.GRADIENT]).tolist():
        yield "gradients", size_bytes
