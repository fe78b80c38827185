"""Reentrant checkpoints under FullyShardedDataParallel: what is kept longer, and what is not gathered ahead.

Sources: torch 2.4 `torch/distributed/fsdp/_runtime_utils.py`. A unit of frozen weights learns from a hook on its inputs
when it may be divided again (`_register_post_backward_reshard_only_hook`, `register_multi_grad_hook`); the hook is kept
until the pass ends, and with it the detached input of each recomputed layer and the gradient of that input
(`torch/utils/checkpoint.py`, CheckpointFunction). Nothing is gathered ahead, since a unit only asks for that once its
recomputed output needs a gradient (`_needs_pre_backward_unshard`). Two A100 with LoRA on Mistral-7B show both, within
0.1 % (foundation-model-stack/fms-acceleration 876e2ed, scripts/benchmarks/refs/a100_80gb.csv).
"""

from dataclasses import replace

import numpy as np

from orchestrator.contract.config import Checkpointing
from orchestrator.contract.profile import Mark, Place, Profile, TraceRequest
from orchestrator.predict.job import Job
from orchestrator.predict.stream import Stream

_SECOND_LAYER, _THIRD_LAYER = 1, 2


def is_reentrant(request: TraceRequest) -> bool:
    """Whether layers are recomputed by checkpoints that run a pass of their own."""
    return request.gradient_checkpointing is Checkpointing.FULL and request.use_reentrant


def keeps_inputs(profile: Profile, job: Job) -> bool:
    """Whether the job keeps them: some unit of it is frozen."""
    has_frozen = not all(parameter.is_trained for parameter in profile.parameters)
    return job.engine == "fsdp" and job.world_size > 1 and is_reentrant(profile.request) and has_frozen


def kept_inputs(profile: Profile, stream: Stream) -> tuple[list[int], int]:
    """Rows of marks at which layers are finished, in their order, and the bytes of a layer's input."""
    layer_of = [
        profile.parameters[module.parameters[0]].layer if module.parameters else -1 for module in profile.modules
    ]
    first_forward: dict[int, int] = {}
    last_backward: dict[int, int] = {}
    for row, (_, mark, payload) in enumerate(profile.marks.tolist()):
        is_forward = stream.mark_moments[row] < stream.backward_start
        if mark == Mark.BEFORE_FORWARD and is_forward and layer_of[payload] >= 0:
            first_forward.setdefault(layer_of[payload], row)
        elif mark == Mark.AFTER_BACKWARD and layer_of[payload] >= 0:
            last_backward[layer_of[payload]] = row
    if not {_SECOND_LAYER, _THIRD_LAYER} <= first_forward.keys():
        return [], 0
    whole = stream.whole_live_bytes
    starts = [stream.mark_moments[first_forward[layer]] for layer in (_SECOND_LAYER, _THIRD_LAYER)]
    return sorted(last_backward.values()), int(whole[starts[1]] - whole[starts[0]])


def with_kept_inputs(profile: Profile, stream: Stream) -> Stream:
    """`stream` with the inputs of finished layers and all their gradients but the latest, which it holds itself."""
    rows, input_bytes = kept_inputs(profile, stream)
    finished = np.zeros(len(stream.mark_moments), dtype=np.int64)
    finished[rows] = 1
    layers = np.cumsum(finished)
    kept = stream.over_time(input_bytes * (layers + np.maximum(layers - 1, 0)))
    live = stream.live_bytes | {Place.ACTIVATION: stream.live_bytes[Place.ACTIVATION] + kept}
    return replace(stream, live_bytes=live, whole_live_bytes=stream.whole_live_bytes + kept)
