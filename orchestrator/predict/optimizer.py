"""What an optimizer holds and what its update needs for a moment.

Sources: torch 2.13 torch/optim/{adam,sgd,_adafactor}.py; bitsandbytes' blockwise 8-bit states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.predict.job import OptimizerLoop, OptimizerRule
from orchestrator.predict.terms import largest

_BLOCK = 256
"""Elements that share a float32 scale (bitsandbytes functional.py, `quantize_blockwise`, optimizer states)."""
_LEAST_8BIT_NUMEL = 4096
"""Smaller tensors keep float32 states (bitsandbytes optim/optimizer.py, `min_8bit_size`)."""
_STEP_BYTES = 4
"""AdamW's count of steps, a float32 scalar for each tensor (adam.py:164-177)."""


@dataclass(frozen=True)
class Updated:
    """A tensor that the optimizer updates: a weight, its master copy, or a flat part of many."""

    numel: int
    element_bytes: int
    largest_axis: int = 1
    """Of a matrix; 1: the tensor is flat."""

    @property
    def bytes(self) -> int:
        """Of the tensor itself."""
        return self.numel * self.element_bytes


def state_bytes(rule: OptimizerRule, tensors: Sequence[Updated]) -> int:
    """Bytes of the optimizer's states; they are born in the first step, in the type of the updated tensor."""
    return sum(_state_bytes(rule, tensor) for tensor in tensors if tensor.numel)


def _state_bytes(rule: OptimizerRule, tensor: Updated) -> int:
    match rule:
        case "adamw":
            return 2 * tensor.bytes + _STEP_BYTES
        case "adamw_8bit":
            if tensor.numel < _LEAST_8BIT_NUMEL:
                return 2 * tensor.numel * 4
            return 2 * (tensor.numel + 4 * -(-tensor.numel // _BLOCK))
        case "adafactor":
            if tensor.largest_axis <= 1 or tensor.largest_axis == tensor.numel:
                return 4 * tensor.numel
            return 4 * (tensor.largest_axis + tensor.numel // tensor.largest_axis)
        case "sgd":
            return 0


def step_bytes(rule: OptimizerRule, loop: OptimizerLoop, tensors: Sequence[Updated]) -> int:
    """Temporaries of one update of `tensors` together, beside weights, gradients and states.

    `foreach` AdamW makes the square roots of all second moments at once (adam.py:790, `_foreach_sqrt`); a loop makes
    the root and its quotient of one tensor (adam.py:541-543); fused kernels make nothing. Adafactor builds one
    tensor's update and its square in float32 at a time.
    """
    if rule == "adamw_8bit":
        return 0
    biggest = largest(tensor.bytes for tensor in tensors)
    if rule == "adafactor":
        return 2 * 4 * largest(tensor.numel for tensor in tensors)
    if loop == "fused":
        return 0
    if rule == "sgd":
        # without momentum and weight decay the update is added in place
        return 0
    return 2 * biggest if loop == "for_loop" else sum(tensor.bytes for tensor in tensors)
