"""Third-party kernels that keep less for the backward pass than a model's own operations do.

Norms save their input and one number a row, and write their gradient over the output's; rotary embeddings turn queries
and keys in place; the gated product saves its two factors and writes their gradients over them (Liger-Kernel
`ops/{rms_norm,rope,swiglu}.py`; fms-acceleration and unsloth `kernels/{rms_layernorm,rope_embedding}.py` without the
last).
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from orchestrator.contract.profile import Kernels

_ROTARY = "apply_rotary_pos_emb"


@contextmanager
def fused_kernels(model: nn.Module, kernels: Kernels) -> Iterator[None]:
    """While active, `model`, a transformers model, computes with `kernels`."""
    with ExitStack() as stack:
        if kernels is not Kernels.TRANSFORMERS:
            for module_class in {type(module) for module in model.modules()}:
                _patch(stack, module_class, kernels)
        yield


def _patch(stack: ExitStack, module_class: type[nn.Module], kernels: Kernels) -> None:
    if module_class.__name__.endswith("RMSNorm"):
        stack.enter_context(mock.patch.object(module_class, "forward", _norm))
    elif module_class.__name__.endswith("MLP") and kernels is Kernels.LIGER:
        stack.enter_context(mock.patch.object(module_class, "forward", _gated(module_class.forward)))
    elif module_class.__name__.endswith("Attention"):
        code = sys.modules[module_class.__module__]
        if hasattr(code, _ROTARY):
            stack.enter_context(mock.patch.object(code, _ROTARY, _rotated))


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Norm.apply(hidden_states, module.weight)
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scales = torch.empty(hidden.shape[:-1], dtype=torch.float32, device=hidden.device)
        ctx.save_for_backward(hidden, weight, scales)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, weight, _ = ctx.saved_tensors
        return gradients[0], torch.empty_like(weight) if weight.requires_grad else None


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def _gated(own_forward: Any) -> Any:
    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not {"gate_proj", "up_proj", "down_proj"} <= set(dict(module.named_children())):
            result: torch.Tensor = own_forward(module, hidden_states)
            return result
        product = _Gate.apply(module.gate_proj(hidden_states), module.up_proj(hidden_states))
        result = module.down_proj(product)
        return result

    return forward


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return gate, up
