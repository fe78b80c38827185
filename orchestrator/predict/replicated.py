"""Whole weights on every rank: a plain loop in torch, and DistributedDataParallel on several ranks."""

from collections.abc import Sequence

from orchestrator.contract.profile import DTYPE_BYTES
from orchestrator.predict.job import Job
from orchestrator.predict.optimizer import Updated, state_bytes, step_bytes
from orchestrator.predict.terms import EngineTerms, Terms, add
from orchestrator.predict.weights import Weight, stored_terms, trained


def updated_tensors(weights: Sequence[Weight], job: Job) -> tuple[Updated, ...]:
    """What the optimizer updates: the weights themselves, or a master copy of each."""
    master_bytes = None if job.master_dtype is None else DTYPE_BYTES[job.master_dtype]
    return tuple(
        Updated(weight.numel, master_bytes or weight.element_bytes, weight.largest_axis) for weight in trained(weights)
    )


def replicated_terms(weights: Sequence[Weight], job: Job) -> EngineTerms:
    """Terms of a plain loop; gradients are dropped after each step (`zero_grad(set_to_none=True)`)."""
    updated = updated_tensors(weights, job)
    gradients_bytes = sum(weight.bytes for weight in trained(weights))
    masters = {"master_weights": sum(tensor.bytes for tensor in updated) if job.master_dtype is not None else 0}
    buckets = {"reduce_buckets": gradients_bytes if job.world_size > 1 else 0}
    whole = stored_terms(weights)
    master_gradients_bytes = masters["master_weights"]
    return EngineTerms(
        resident=add(whole, masters, buckets, {"optimizer_states": state_bytes(job.optimizer, updated)}),
        load=whole,
        init=add(whole, masters, buckets),
        step=add(
            {"gradients": gradients_bytes},
            {"optimizer_temporaries": master_gradients_bytes + step_bytes(job.optimizer, job.optimizer_loop, updated)},
        ),
        between={"gradients": gradients_bytes},
        host_load=_load_copies(whole, job),
    )


def _load_copies(whole: Terms, job: Job) -> Terms:
    return {"load_copy": sum(whole.values()) * job.ranks_on_node}
