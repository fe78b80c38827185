"""What an engine sends over links in one optimizer step of one rank: collectives between ranks, copies to the host.

Rules of DeepSpeed 0.19.8 as read in runtime/zero/{stage_1_and_2,stage3,partitioned_param_coordinator}.py; of
DistributedDataParallel and FullyShardedDataParallel as accelerate runs them: gradients meet once a step (`no_sync`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from orchestrator.contract.config import Checkpointing
from orchestrator.contract.profile import DTYPE_BYTES, Parameter, Profile
from orchestrator.predict.job import EngineKind, Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.reentrant import is_reentrant

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather"]
TrafficPhase = Literal["forward", "backward", "optimizer_step"]

_DDP_BUCKET_BYTES = 25 * 2**20
"""torch 2.13, torch/nn/parallel/distributed.py, `bucket_cap_mb`."""
_MASTER_BYTES = 4


@dataclass(frozen=True)
class Collective:
    """`payload_bytes` is the whole tensor, as every rank has it before a reduction or after a gather."""

    name: str
    kind: CollectiveKind
    phase: TrafficPhase
    payload_bytes: float
    calls: int
    times: int
    """Occurrences in one optimizer step."""
    overlaps: bool
    """Runs beside the computation of its phase."""


@dataclass(frozen=True)
class Transfer:
    """A copy of one rank. `bytes_per_step` is of one direction: PCIe is full duplex. `place`: what it goes through."""

    name: str
    phase: TrafficPhase
    bytes_per_step: float
    place: Literal["host_link", "disk"]
    overlaps: bool


@dataclass(frozen=True)
class _Sizes:
    """Bytes and elements that an engine moves. `gathered` leaves out what always stays whole on every rank."""

    trained_numel: float
    gradient_bytes: float
    gathered_bytes: float
    gathered_numel: float
    persistent_bytes: float
    gathered_modules: int
    layer_numel: float


def _engine_bytes(parameter: Parameter, profile: Profile, engine: EngineKind) -> float:
    """Of one element: DeepSpeed casts to its precision; autocast under FSDP gathers in the computation's type."""
    own = parameter.bytes_per_element
    if engine == "deepspeed":
        return min(own, DTYPE_BYTES[profile.request.dtype])
    if engine == "fsdp" and profile.request.autocast:
        return min(own, DTYPE_BYTES[profile.request.autocast])
    return own


def _sizes(profile: Profile, job: Job) -> _Sizes:
    threshold = job.stage3_param_persistence_threshold if job.engine == "deepspeed" else 0
    return _sizes_at(profile, job.point.lora_rank, job.engine, threshold)


@remembered(identities=1, size=256)
def _sizes_at(profile: Profile, lora_rank: int, engine: EngineKind, threshold: int) -> _Sizes:
    numels = [parameter.numel(lora_rank) for parameter in profile.parameters]
    element_bytes = [_engine_bytes(parameter, profile, engine) for parameter in profile.parameters]
    moved = [index for index, numel in enumerate(numels) if numel > threshold]
    trained = [index for index, parameter in enumerate(profile.parameters) if parameter.is_trained]
    layers: dict[int, float] = {}
    for index in moved:
        layers[profile.parameters[index].layer] = layers.get(profile.parameters[index].layer, 0.0) + numels[index]
    layers.pop(-1, None)
    moved_set = set(moved)
    gathered_bytes = sum(numels[index] * element_bytes[index] for index in moved)
    return _Sizes(
        trained_numel=sum(numels[index] for index in trained),
        gradient_bytes=sum(numels[index] * element_bytes[index] for index in trained),
        gathered_bytes=gathered_bytes,
        gathered_numel=sum(numels[index] for index in moved),
        persistent_bytes=sum(n * b for n, b in zip(numels, element_bytes, strict=True)) - gathered_bytes,
        gathered_modules=sum(1 for module in profile.modules if moved_set.intersection(module.parameters)),
        layer_numel=max(layers.values(), default=0.0),
    )


def gathered_modules(profile: Profile, job: Job) -> int:
    """Modules around which stage 3 gathers and releases a weight in every pass; small weights stay gathered."""
    is_sharded = job.engine == "deepspeed" and job.zero_stage == 3
    return _sizes(profile, job).gathered_modules if is_sharded else 0


def bucketed_bytes(profile: Profile, job: Job) -> float:
    """Of gradients that DeepSpeed copies into its bucket and out of it in one step on a single rank, where nothing is
    reduced: in every micro-step from stage 2 on (`contiguous_gradients`), once in stage 1."""
    if job.engine != "deepspeed" or job.zero_stage == 0 or job.world_size > 1:
        return 0.0
    times = job.gradient_accumulation if job.zero_stage > 1 else 1
    return times * _sizes(profile, job).gradient_bytes


def collectives(profile: Profile, job: Job) -> Iterator[Collective]:
    """All collectives of one optimizer step; none on a single rank."""
    if job.world_size == 1:
        return
    sizes = _sizes(profile, job)
    if job.engine == "torch":
        buckets = max(1, ceil(sizes.gradient_bytes / _DDP_BUCKET_BYTES))
        yield Collective("gradients", "all_reduce", "backward", sizes.gradient_bytes, buckets, 1, True)
    elif job.engine == "fsdp":
        yield from _fsdp(profile, job, sizes)
    elif job.zero_stage == 3:
        yield from _stage_3(profile, job, sizes)
    else:
        yield from _stages_0_to_2(job, sizes)


def _stages_0_to_2(job: Job, sizes: _Sizes) -> Iterator[Collective]:
    """Buckets are all-reduced even where only a part is kept (`use_multi_rank_bucket_allreduce`, on by default,
    zero/config.py:119). Stage 2 reduces in every micro-step, stages 0 and 1 in the last (stage_1_and_2.py:2294)."""
    calls = max(1, ceil(sizes.trained_numel / job.reduce_bucket_size))
    times = job.gradient_accumulation if job.zero_stage == 2 else 1
    overlaps = bool(job.overlap_comm) and job.zero_stage > 0
    yield Collective("gradients", "all_reduce", "backward", sizes.gradient_bytes, calls, times, overlaps)
    if job.zero_stage > 0:
        calls = max(1, ceil(sizes.trained_numel / job.allgather_bucket_size))
        yield Collective(
            "updated_weights", "all_gather", "optimizer_step", sizes.gradient_bytes, calls, 1, overlaps=False
        )


def _stage_3(profile: Profile, job: Job, sizes: _Sizes) -> Iterator[Collective]:
    """Weights are gathered in every pass, ahead of their use where a prefetch bucket allows it."""
    overlaps = job.stage3_prefetch_bucket_size > 0
    calls = sizes.gathered_modules
    if overlaps:
        calls = min(calls, ceil(sizes.gathered_numel / job.stage3_prefetch_bucket_size) + 1)
    for name, phase, share in gathers(profile, job, sizes.gathered_numel, sizes.layer_numel):
        if share > 0:
            payload_bytes, part_calls = share * sizes.gathered_bytes, max(1, ceil(share * calls))
            yield Collective(name, "all_gather", phase, payload_bytes, part_calls, job.gradient_accumulation, overlaps)
    reduces = max(1, ceil(sizes.trained_numel / job.reduce_bucket_size))
    overlaps = job.overlap_comm is None or job.overlap_comm
    times = job.gradient_accumulation
    yield Collective("gradients", "reduce_scatter", "backward", sizes.gradient_bytes, reduces, times, overlaps)
    if sizes.persistent_bytes:
        yield Collective("updated_weights", "all_gather", "optimizer_step", sizes.persistent_bytes, 1, 1, False)


def gathers(
    profile: Profile, job: Job, numel: float, layer_numel: float
) -> Iterator[tuple[str, Literal["forward", "backward"], float]]:
    """Which share of the sharded weights stage 3 gathers when, in one micro-step.

    A weight whose next use lies less than `max_reuse_distance` elements ahead stays whole
    (partitioned_param_coordinator.py:634-664): of the last layers the backward pass finds it so, and recomputation
    leaves a layer's weights to the backward pass that follows."""
    yield "weights_forward", "forward", 1.0
    kept = min(1.0, job.stage3_max_reuse_distance / (2 * numel)) if numel else 1.0
    yield "weights_backward", "backward", 1.0 - kept
    recomputes = profile.request.gradient_checkpointing is Checkpointing.FULL
    if recomputes and job.stage3_max_reuse_distance < layer_numel:
        yield "weights_recompute", "backward", 1.0


def _fsdp(profile: Profile, job: Job, sizes: _Sizes) -> Iterator[Collective]:
    """Full shard: a unit a layer, gathered in both passes, the next one ahead (BACKWARD_PRE). A recomputation under a
    reentrant checkpoint ends as a forward pass does, by dividing its unit, which the backward pass gathers again."""
    units = 1 + len({parameter.layer for parameter in profile.parameters if parameter.layer >= 0})
    times = job.gradient_accumulation
    backward = 2 * units - 1 if is_reentrant(profile.request) else units
    yield Collective("weights_forward", "all_gather", "forward", sizes.gathered_bytes, units, times, True)
    gathered_bytes = sizes.gathered_bytes * backward / units
    yield Collective("weights_backward", "all_gather", "backward", gathered_bytes, backward, times, True)
    yield Collective("gradients", "reduce_scatter", "backward", sizes.gradient_bytes, units, 1, True)


def transfers(profile: Profile, job: Job) -> Iterator[Transfer]:
    """Copies between device and host, and host and disk, of one rank's share."""
    sizes = _sizes(profile, job)
    ranks = job.world_size if job.engine == "fsdp" or job.zero_stage > 0 else 1
    trained = sizes.trained_numel / ranks
    gradient_bytes = sizes.gradient_bytes / ranks
    if job.offload_optimizer != "none":
        yield from _optimizer_copies(job, trained, gradient_bytes)
    if job.offload_param != "none" and job.zero_stage == 3:
        yield from _weight_copies(profile, job, sizes)


def _optimizer_copies(job: Job, trained: float, gradient_bytes: float) -> Iterator[Transfer]:
    """At the last micro-step gradients go down in the masters' type; before, those that stages 2 and 3 have reduced go
    down and come back to be added to (stage_1_and_2.py:1809-1856, 2166-2176; stage3.py:2024-2039)."""
    yield Transfer("gradients_to_host", "backward", trained * _MASTER_BYTES, "host_link", True)
    if job.gradient_accumulation > 1 and job.zero_stage >= 2:
        both_ways = gradient_bytes * (2 * job.gradient_accumulation - 1)
        yield Transfer("gradients_accumulated", "backward", both_ways, "host_link", True)
    yield Transfer("weights_from_host", "optimizer_step", gradient_bytes, "host_link", False)
    if job.offload_optimizer == "nvme":
        states = 2 if job.optimizer != "sgd" else 0
        # master, states and gradient are read, all but the gradient written back
        moved = trained * _MASTER_BYTES * (2 * (1 + states) + 1)
        yield Transfer("states_on_disk", "optimizer_step", moved, "disk", False)


def _weight_copies(profile: Profile, job: Job, sizes: _Sizes) -> Iterator[Transfer]:
    """Each gather first brings the rank's shard to the device."""
    shard_bytes = sizes.gathered_bytes / job.world_size * job.gradient_accumulation
    overlaps = job.stage3_prefetch_bucket_size > 0
    for name, phase, share in gathers(profile, job, sizes.gathered_numel, sizes.layer_numel):
        if share > 0:
            yield Transfer(f"{name}_from_host", phase, share * shard_bytes, "host_link", overlaps)
            if job.offload_param == "nvme":
                yield Transfer(f"{name}_from_disk", phase, share * shard_bytes, "disk", overlaps)
