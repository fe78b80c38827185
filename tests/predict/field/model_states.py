"""DeepSpeed's own estimators, which count model states only: no activations, buckets, gathered weights or context.

deepspeed 0.19.8 `runtime/zero/stage3.py:4016` (`estimate_zero3_model_states_mem_needs`), and the formula of
`runtime/zero/stage_1_and_2.py` before deepspeedai/DeepSpeed PR 5099.
"""

BUFFER_FACTOR = 1.5


def zero3_model_states_only(
    parameters: float, largest_layer: float, ranks: int, offloads_optimizer: bool, offloads_weights: bool
) -> tuple[float, float]:
    """Bytes of a node's host and of one device, with `zero.Init`, on one node."""
    layer_bytes = 4 * largest_layer
    if offloads_weights:
        return 18 * parameters * BUFFER_FACTOR, layer_bytes
    if offloads_optimizer:
        return 16 * parameters * BUFFER_FACTOR, layer_bytes + 2 * parameters / ranks
    return layer_bytes * ranks * BUFFER_FACTOR, layer_bytes + 18 * parameters / ranks


def zero2_model_states_only(parameters: float, ranks: int, offloads_optimizer: bool) -> tuple[float, float]:
    """Bytes of a node's host and of one device, as printed before PR 5099."""
    host_bytes = max(4 * ranks, 16) * parameters * BUFFER_FACTOR
    if offloads_optimizer:
        return host_bytes, 2 * parameters
    return max(4 * ranks, 16) * parameters * BUFFER_FACTOR, 4 * parameters + 16 * parameters / ranks
