"""DeepSpeed's ZeRO stages 0 to 2: weights are whole on every rank, masters and states are divided from stage 1 on.

Line numbers are those of deepspeed 0.19.8: `runtime/zero/stage_1_and_2.py` where no file is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.profile import DTYPE_BYTES, Dtype
from orchestrator.predict.job import Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.optimizer import Updated, state_bytes, step_bytes
from orchestrator.predict.terms import EngineTerms, Terms, add, greater, largest, total
from orchestrator.predict.weights import Weight, pinned_bytes, stored_terms, trained, whole_terms

_ALIGNMENT = 2
"""Elements: parts of the flat weights start on 4 bytes (:373, `nccl_start_alignment_factor`)."""
NORM_BYTES = 8
"""Gradient norms are taken in float64 (runtime/zero/utils.py:59): a copy of one gradient at a time."""


@dataclass(frozen=True)
class Part:
    """A rank's part of the flat trained weights: the weights that reach into it, in their order."""

    numel: int
    weights: tuple[Weight, ...]
    pieces: tuple[int, ...]
    """Elements of each weight that lie in the part."""

    def whole_numel(self) -> int:
        """Elements of the weights in it, those at its edges whole."""
        return sum(weight.numel for weight in self.weights)


@remembered(identities=1, size=256)
def aligned_numel(weights: Sequence[Weight], ranks: int) -> int:
    """Elements of the flat trained weights (:432, `flatten_dense_tensors_aligned`)."""
    step = _ALIGNMENT * ranks
    return -(-sum(weight.numel for weight in trained(weights)) // step) * step


@remembered(identities=1, size=256)
def parts(weights: Sequence[Weight], ranks: int) -> tuple[Part, ...]:
    """Every rank's part (:2559, `get_data_parallel_partitions`; :2579, `get_partition_info`)."""
    size = aligned_numel(weights, ranks) // ranks
    held: list[list[tuple[Weight, int]]] = [[] for _ in range(ranks)]
    start = 0
    for weight in trained(weights):
        end = start + weight.numel
        for rank in range(start // size, -(-end // size)):
            held[rank].append((weight, min(end, (rank + 1) * size) - max(start, rank * size)))
        start = end
    return tuple(Part(size, tuple(weight for weight, _ in row), tuple(piece for _, piece in row)) for row in held)


@remembered(identities=1, size=256)
def fullest_part(weights: Sequence[Weight], ranks: int) -> int:
    """The rank that keeps the most gradient elements: weights at the edges of its part are kept whole. Of equal ones
    the last, whose gradients are there first."""
    whole = [part.whole_numel() for part in parts(weights, ranks)]
    return max(range(ranks), key=lambda rank: (whole[rank], rank))


def unsharded_terms(weights: Sequence[Weight], job: Job, precision: Dtype) -> EngineTerms:
    """Stage 0: every rank updates all weights.

    In 16 bits the engine takes FP16_UnfusedOptimizer (runtime/engine.py:2321, 2599; FusedAdam alone is flattened):
    float32 masters of each weight, states from a step on zeros while it is built, and in the step float32 copies of
    all gradients beside the gradients themselves (runtime/fp16/unfused_optimizer.py:56, 194-199, 412-427).
    """
    whole = whole_terms(weights)
    has_masters = precision != "fp32"
    element_bytes = DTYPE_BYTES[job.master_dtype or "fp32"] if has_masters else DTYPE_BYTES[precision]
    updated = tuple(Updated(weight.numel, element_bytes, weight.largest_axis) for weight in trained(weights))
    copies_bytes = sum(tensor.bytes for tensor in updated) if has_masters else 0
    gradients_bytes = sum(weight.bytes for weight in trained(weights))
    masters = {"master_weights": copies_bytes}
    states = {"optimizer_states": state_bytes(job.optimizer, updated)}
    temporaries = {"optimizer_temporaries": copies_bytes + step_bytes(job.optimizer, job.optimizer_loop, updated)}
    first_step = add(whole, masters, states, {"gradients": gradients_bytes}, temporaries)
    return EngineTerms(
        resident=add(whole, masters, states),
        load=stored_terms(weights),
        init=first_step if has_masters else add(whole),
        step=add({"gradients": gradients_bytes}, temporaries),
        between={"gradients": gradients_bytes},
        host_load=load_copies(weights, job),
    )


def partitioned_terms(weights: Sequence[Weight], job: Job, precision: Dtype) -> EngineTerms:
    """Stages 1 and 2 on the rank whose part keeps the most gradient."""
    part = parts(weights, job.world_size)[fullest_part(weights, job.world_size)]
    if job.offload_optimizer != "none":
        return _offloaded_terms(weights, job, precision, part)
    low_bytes, master_bytes = DTYPE_BYTES[precision], DTYPE_BYTES[job.master_dtype or "fp32"]
    flat = _flat_terms(weights, job, low_bytes)
    master = Updated(part.numel, master_bytes)
    masters = {"master_weights": master.bytes}
    return EngineTerms(
        resident=add(flat, masters, {"optimizer_states": state_bytes(job.optimizer, [master])}),
        load=stored_terms(weights),
        init=_init_terms(weights, flat, part.numel * low_bytes if low_bytes != master_bytes else 0, master.bytes),
        step=_step_terms(part, job, low_bytes, master),
        between=between_terms(weights, job, precision, part),
        host_load=load_copies(weights, job),
    )


def _flat_terms(weights: Sequence[Weight], job: Job, low_bytes: int) -> Terms:
    return whole_terms(weights) | {"trained_weights": aligned_numel(weights, job.world_size) * low_bytes}


def _init_terms(weights: Sequence[Weight], flat: Terms, clone_bytes: int, master_bytes: int) -> Terms:
    """Flattening holds weights and flat copy (:461); then a clone becomes the master (:507), then a gradient of zeros
    stands beside it (:923)."""
    flattening = add(whole_terms(weights), {"optimizer_temporaries": flat["trained_weights"]})
    masters = {"master_weights": master_bytes}
    return greater(
        flattening,
        add(flat, masters, {"optimizer_temporaries": clone_bytes}),
        add(flat, masters, {"optimizer_temporaries": master_bytes}),
    )


def _step_terms(part: Part, job: Job, low_bytes: int, master: Updated) -> Terms:
    """The norm (:2685), the float32 gradient beside the flat one (:3113-3120), then the update (:3140)."""
    kept = {"gradients": part.whole_numel() * low_bytes}
    is_flattened = len(part.pieces) > 1 or sum(part.pieces) < part.numel
    flat_bytes = part.numel * low_bytes if is_flattened else 0
    copy_bytes = master.bytes if low_bytes != master.element_bytes else 0
    gradient_bytes = copy_bytes or flat_bytes
    return greater(
        add(kept, {"optimizer_temporaries": NORM_BYTES * largest(part.pieces)}),
        add(kept, {"optimizer_temporaries": flat_bytes + copy_bytes}),
        {"optimizer_temporaries": gradient_bytes + step_bytes(job.optimizer, job.optimizer_loop, [master])},
    )


def between_terms(weights: Sequence[Weight], job: Job, precision: Dtype, part: Part) -> Terms:
    """Gradients that wait for the last micro-step: all of them and the open bucket in stage 1, whose reduction waits
    too (:2286-2294; the bucket made at :3256 is dropped by the epilogue alone), the part's own in stage 2 (:1019)."""
    low_bytes = DTYPE_BYTES[precision]
    if job.zero_stage == 1:
        buckets = {"reduce_buckets": bucket_bytes(job, precision)}
        return add({"gradients": sum(weight.bytes for weight in trained(weights))}, buckets)
    return {"gradients": part.whole_numel() * low_bytes}


def bucket_bytes(job: Job, precision: Dtype) -> int:
    """Buckets that every backward pass of stages 1 and 2 makes, of full size whatever is trained (:3263-3276)."""
    overlaps = bool(job.overlap_comm)
    return job.reduce_bucket_size * DTYPE_BYTES[precision] * (2 if overlaps else 1)


def _offloaded_terms(weights: Sequence[Weight], job: Job, precision: Dtype, part: Part) -> EngineTerms:
    low_bytes = DTYPE_BYTES[precision]
    flat = _flat_terms(weights, job, low_bytes)
    widest_bytes = largest(weight.numel for weight in trained(weights)) * low_bytes
    staging = {"reduce_buckets": widest_bytes}
    clone_bytes = part.numel * low_bytes
    return EngineTerms(
        resident=add(flat, staging),
        load=stored_terms(weights),
        init=greater(
            add(whole_terms(weights), {"optimizer_temporaries": flat["trained_weights"]}),
            add(flat, {"optimizer_temporaries": clone_bytes}),
        ),
        step={},
        host=scaled(_offload_host(weights, job, low_bytes, part, widest_bytes), job.ranks_on_node),
        host_load=load_copies(weights, job),
    )


def _offload_host(weights: Sequence[Weight], job: Job, low_bytes: int, part: Part, widest_bytes: int) -> Terms:
    """A rank's host buffers: master, float32 gradient, 16-bit copy of the part (:507-524, :923), a staging buffer of
    the widest weight (:656), and with accumulation each weight's gradient (:1822); the states are not pinned."""
    master = Updated(part.numel, DTYPE_BYTES[job.master_dtype or "fp32"])
    staging = [part.numel * low_bytes, widest_bytes]
    if job.gradient_accumulation > 1:
        staging += [weight.numel * low_bytes for weight in part.weights]
    return host_buffers([master.bytes, master.bytes], staging, state_bytes(job.optimizer, [master]), job)


def host_buffers(optimizer: Sequence[int], staging: Sequence[int], states_bytes: int, job: Job) -> Terms:
    """Masters and gradients of an offloaded optimizer with its states, and `pinned_buffers`: staging buffers and what
    pinning adds to all of them."""
    plain_bytes = sum(optimizer)
    sizes = [*optimizer, *staging]
    held_bytes = sum(pinned_bytes(size_bytes) for size_bytes in sizes) if job.pin_memory else sum(sizes)
    return add({"offloaded_optimizer": plain_bytes + states_bytes, "pinned_buffers": held_bytes - plain_bytes})


def load_copies(weights: Sequence[Weight], job: Job) -> Terms:
    """A whole copy on the host for each rank; where loading is sharded rank 0 alone reads the values
    (transformers 5.24 modeling_utils.py:4532)."""
    copies = 1 if job.loads_sharded and (job.engine == "fsdp" or job.zero_stage == 3) else job.ranks_on_node
    return {"load_copy": total(stored_terms(weights)) * copies}


def scaled(terms: Terms, factor: int) -> Terms:
    return {name: size_bytes * factor for name, size_bytes in terms.items()}
