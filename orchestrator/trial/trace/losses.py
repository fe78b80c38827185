"""The ways from logits to a loss that change which storages a step makes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from orchestrator.contract.profile import LossPath

_Loss = Callable[..., torch.Tensor]


def install_loss(model: nn.Module, loss: LossPath) -> None:
    """Make `model`, a transformers model, compute its loss by `loss`.

    The orders of operations are those of transformers 4.45.2 (`modeling_llama.py`), 4.48.1 (`loss/loss_utils.py`) and
    of the in-place kernels of fms-acceleration and unsloth, which write the gradient over the float32 logits.
    """
    if loss in (LossPath.TRANSFORMERS, LossPath.FUSED_LINEAR):
        return
    if loss in (LossPath.TRANSFORMERS_4_45, LossPath.INPLACE_4_45):
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_hook(lambda module, args, output: output.float())
    model.loss_function = _SHIFTED[loss]  # type: ignore[assignment]


def _shifted(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **rest: Any) -> torch.Tensor:
    return _shifted_uncast(logits.float(), labels, vocab_size)


def _shifted_uncast(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **rest: Any) -> torch.Tensor:
    kept = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return functional.cross_entropy(kept, labels[..., 1:].contiguous().view(-1))


def _shifted_in_place(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **rest: Any) -> torch.Tensor:
    return _uncast_in_place(logits.float(), labels, vocab_size)


def _uncast_in_place(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **rest: Any) -> torch.Tensor:
    kept = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return _InPlace.apply(kept, labels[..., 1:].contiguous().view(-1))


_SHIFTED: dict[LossPath, _Loss] = {
    LossPath.TRANSFORMERS_4_45: _shifted,
    LossPath.TRANSFORMERS_4_48: _shifted,
    LossPath.TRANSFORMERS_UNCAST: _shifted_uncast,
    LossPath.INPLACE_4_45: _shifted_in_place,
    LossPath.INPLACE_4_48: _shifted_in_place,
    LossPath.INPLACE_UNCAST: _uncast_in_place,
}


class _InPlace(torch.autograd.Function):
    """Cross-entropy whose gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        log_sums = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, log_sums, labels)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, _, _ = ctx.saved_tensors
        return logits, None


def fused_linear_loss(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Loss of `model`, a transformers causal LM, by chunks of rows, without whole logits.

    One chunk stands for all, since each frees its logits before the next: rows / 2^floor(log2(ceil(V / H))), as in
    Liger-Kernel's `ops/fused_linear_cross_entropy.py` (the next power of two of rows / ceil(V / H)).
    """
    base: Any = model
    labels = inputs["labels"]
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    hidden = getattr(base, base.base_model_prefix)(**arguments)[0]
    head = base.get_output_embeddings()
    return _FusedLinear.apply(hidden.view(-1, hidden.shape[-1]), head.weight, labels.view(-1))


class _FusedLinear(torch.autograd.Function):
    """Head, cross-entropy and both their gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows, width = hidden.shape
        vocab = weight.shape[0]
        chunks = 2 ** math.floor(math.log2(math.ceil(vocab / width)))
        gradient = torch.zeros_like(hidden)
        weight_gradient = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        # a row of the chunk for each `chunks` rows, in one dimension so that the size stays an exact law
        logits = torch.empty(rows * vocab // chunks, dtype=hidden.dtype, device=hidden.device)
        if weight_gradient is not None:
            weight_gradient += torch.empty_like(weight)
        del logits
        ctx.save_for_backward(gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        return gradient, weight_gradient, None
