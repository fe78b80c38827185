"""DeepSpeed's ZeRO stage 3: every weight is divided for itself, frozen ones too; masters and states by sub-groups.

Line numbers are those of deepspeed 0.19.8: `runtime/zero/stage3.py` where no file is named.
"""

from collections.abc import Sequence

from orchestrator.contract.profile import DTYPE_BYTES, Dtype
from orchestrator.predict.job import Job
from orchestrator.predict.optimizer import Updated, state_bytes, step_bytes
from orchestrator.predict.terms import EngineTerms, Terms, add, greater, largest, total
from orchestrator.predict.weights import Weight, pinned_bytes, sharded_terms, trained
from orchestrator.predict.zero import NORM_BYTES, host_buffers, load_copies, scaled

_NVME_OPTIMIZER_BUFFERS = 4
"""`buffer_count` of offload_optimizer (runtime/zero/offload_config.py:68): each as large as the largest sub-group."""
_NVME_WEIGHT_BUFFER_NUMEL = 5 * 100_000_000
"""`buffer_count` times `buffer_size` of offload_param (runtime/zero/offload_config.py:31, 34)."""


def is_persistent(weight: Weight, job: Job) -> bool:
    """Small enough to stay gathered (runtime/zero/parameter_offload.py:330)."""
    return weight.numel <= job.stage3_param_persistence_threshold


def sub_groups(weights: Sequence[Weight], job: Job) -> tuple[int, ...]:
    """Elements of each sub-group of a rank's trained parts (:1205, `_create_fp16_sub_groups`)."""
    sizes, open_numel = [], 0
    for weight in trained(weights):
        open_numel += weight.shard_numel(job.world_size)
        if open_numel >= job.sub_group_size:
            sizes.append(open_numel)
            open_numel = 0
    return tuple([*sizes, open_numel] if open_numel else sizes)


def sharded_zero_terms(weights: Sequence[Weight], job: Job, precision: Dtype) -> EngineTerms:
    """Stage 3. All ranks hold the same; without the window of gathered weights (`orchestrator.predict.live`)."""
    groups = sub_groups(weights, job)
    shards = sharded_terms(weights, job.world_size)
    on_device = shards if job.offload_param == "none" else _scales(weights)
    low_bytes, master_bytes = DTYPE_BYTES[precision], DTYPE_BYTES[job.master_dtype or "fp32"]
    updated = [Updated(numel, master_bytes) for numel in groups]
    offloads = job.offload_optimizer != "none"
    masters = {} if offloads else {"master_weights": sum(group.bytes for group in updated)}
    states = {} if offloads else {"optimizer_states": state_bytes(job.optimizer, updated)}
    gradients = {} if offloads else {"gradients": sum(groups) * low_bytes}
    buckets = {"reduce_buckets": job.reduce_bucket_size * low_bytes}
    gathered = {"gathered_weights": persistent_bytes(weights, job)}
    resident = add(on_device, masters, states, gradients, buckets, gathered)
    return EngineTerms(
        resident=resident,
        load=_load_terms(weights, on_device, job),
        init=_init_terms(weights, add(on_device), updated, add(masters, gradients, buckets), job),
        step={} if offloads else _step_terms(weights, job, low_bytes, updated),
        host=scaled(_host_terms(weights, job, low_bytes, updated), job.ranks_on_node),
        host_load=load_copies(weights, job),
        host_init=scaled({"load_copy": sum(groups) * low_bytes}, job.ranks_on_node),
        disk_bytes=_disk_bytes(weights, job, updated) * job.ranks_on_node,
    )


def persistent_bytes(weights: Sequence[Weight], job: Job) -> int:
    """Weights that stay gathered; each in a buffer of its padded size. One rank's parts are whole weights already."""
    if job.world_size == 1 and job.offload_param == "none":
        return 0
    return sum(weight.padded_bytes(job.world_size) for weight in weights if is_persistent(weight, job))


def _scales(weights: Sequence[Weight]) -> Terms:
    return {"frozen_weights": sum(weight.scales_bytes for weight in weights)}


def _load_terms(weights: Sequence[Weight], on_device: Terms, job: Job) -> Terms:
    """Each weight is whole on the device until it is divided (runtime/zero/partition_parameters.py:1211, 1238)."""
    return add(on_device, {"gathered_weights": largest(weight.bytes for weight in weights)})


def _init_terms(weights: Sequence[Weight], shards: Terms, updated: Sequence[Updated], rest: Terms, job: Job) -> Terms:
    """A sub-group's float32 copy is cloned to become the master, and the copy lives on until the next one is made
    (:1183-1186); then a gradient of zeros as large as the largest sub-group (:1293); hooks gather each weight alone
    (:1513)."""
    if job.offload_optimizer != "none":
        return add(shards, rest, {"gathered_weights": _largest_gather(weights, job)})
    moments, done_bytes, previous_bytes = [shards], 0, 0
    for group in updated:
        moments.append(
            add(shards, {"master_weights": done_bytes, "optimizer_temporaries": previous_bytes + group.bytes})
        )
        done_bytes += group.bytes
        moments.append(add(shards, {"master_weights": done_bytes, "optimizer_temporaries": group.bytes}))
        previous_bytes = group.bytes
    zeros_bytes = largest(group.bytes for group in updated)
    moments.append(add(shards, {"master_weights": done_bytes, "optimizer_temporaries": zeros_bytes}))
    moments.append(add(shards, rest, {"gathered_weights": _largest_gather(weights, job)}))
    return greater(*moments)


def _largest_gather(weights: Sequence[Weight], job: Job) -> int:
    return largest(weight.padded_bytes(job.world_size) for weight in trained(weights))


def _step_terms(weights: Sequence[Weight], job: Job, low_bytes: int, updated: Sequence[Updated]) -> Terms:
    """A norm of one part at a time (:2452), then sub-group by sub-group the flat gradient, its float32 copy (:2686)
    and the update; the gradient buffer itself stays."""
    copies = len(trained(weights)) > 1
    moments: list[Terms] = [
        {
            "optimizer_temporaries": NORM_BYTES
            * largest(weight.shard_numel(job.world_size) for weight in trained(weights))
        }
    ]
    for group in updated:
        flat_bytes = group.numel * low_bytes if copies else 0
        gradient_bytes = group.bytes if low_bytes != group.element_bytes else flat_bytes
        if low_bytes != group.element_bytes:
            moments.append({"optimizer_temporaries": flat_bytes + gradient_bytes})
        update_bytes = step_bytes(job.optimizer, job.optimizer_loop, [group])
        moments.append({"optimizer_temporaries": gradient_bytes + update_bytes})
    return greater(*moments)


def _host_terms(weights: Sequence[Weight], job: Job, low_bytes: int, updated: Sequence[Updated]) -> Terms:
    return add(_optimizer_host(job, low_bytes, updated), _weights_host(weights, job))


def _optimizer_host(job: Job, low_bytes: int, updated: Sequence[Updated]) -> Terms:
    """Masters (:1173, not pinned), their float32 gradients (:1318) and the buffer of 16-bit gradients (:791)."""
    numel = sum(group.numel for group in updated)
    states_bytes = state_bytes(job.optimizer, updated)
    match job.offload_optimizer:
        case "none":
            return {}
        case "cpu":
            masters_bytes = sum(group.bytes for group in updated)
            return host_buffers(
                [group.bytes for group in updated], [numel * low_bytes], masters_bytes + states_bytes, job
            )
        case "nvme":
            swapped_bytes = _NVME_OPTIMIZER_BUFFERS * largest(group.bytes for group in updated)
            return add({"pinned_buffers": swapped_bytes}, host_buffers([], [numel * low_bytes], 0, job))


def _weights_host(weights: Sequence[Weight], job: Job) -> Terms:
    """Each weight's part is pinned for itself (runtime/zero/partition_parameters.py:1835); trained parts then move to
    one flat pinned buffer (:909), and the freed blocks stay with torch's allocator."""
    if job.offload_param == "none":
        return {}
    if job.offload_param == "nvme":
        return {"pinned_buffers": _NVME_WEIGHT_BUFFER_NUMEL * largest(weight.element_bytes for weight in weights)}
    parts = [weight.shard_bytes(job.world_size) for weight in weights]
    flat_bytes = sum(weight.shard_bytes(job.world_size) for weight in trained(weights))
    plain_bytes = sum(parts)
    if not job.pin_memory:
        return {"offloaded_weights": plain_bytes}
    held_bytes = sum(pinned_bytes(size_bytes) for size_bytes in parts) + pinned_bytes(flat_bytes)
    return {"offloaded_weights": plain_bytes, "pinned_buffers": held_bytes - plain_bytes}


def _disk_bytes(weights: Sequence[Weight], job: Job, updated: Sequence[Updated]) -> int:
    masters_bytes = sum(group.bytes for group in updated)
    optimizer_bytes = 2 * masters_bytes + state_bytes(job.optimizer, updated)
    weights_bytes = total(sharded_terms(weights, job.world_size))
    return (optimizer_bytes if job.offload_optimizer == "nvme" else 0) + (
        weights_bytes if job.offload_param == "nvme" else 0
    )
