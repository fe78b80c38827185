"""Makes code on tensors without data take the way that it takes on a device with data.

On the meta device PyTorch chooses attention by its plain formula and dropout by a mask of the input's type, and
transformers reads masks, which hold nothing here. Checked in torch 2.13 (`aten/src/ATen/native/transformers`) and
transformers 5.24 (`masking_utils.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental import _config as fx_config
from torch.nn import functional
from transformers import PreTrainedModel, masking_utils

from orchestrator.contract.profile import TraceRequest

aten = torch.ops.aten
_FLASH_MAX_HEAD_DIM = 256
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def device_kernels(request: TraceRequest) -> Iterator[None]:
    """While active, attention, dropout and mask checks behave as on `request.device`."""
    with ExitStack() as stack:
        attention = _cuda_attention if request.device == "cuda" else _cpu_attention
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
        if request.device == "cuda":
            stack.enter_context(mock.patch.object(functional, "dropout", _fused_dropout))
        stack.enter_context(mock.patch.object(functional, "grouped_mm", _grouped_product))
        if request.task == "sequence_classification":
            # DeBERTa picks the rows that have a label: here all have
            stack.enter_context(mock.patch.object(fx_config, "meta_nonzero_assume_all_nonzero", True))
        stack.enter_context(mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask"))
        stack.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None))
        stack.enter_context(mock.patch.object(masking_utils, "fast_all", return_value=not request.is_padded))
        stack.enter_context(mock.patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", _ignores_mask(request)))
        yield


def _ignores_mask(request: TraceRequest) -> Callable[..., bool]:
    """transformers' rule for masks of encoders, without a look at the mask."""

    def ignores(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        is_local = local_attention_size is not None and kv_length >= local_attention_size
        return not is_local and (padding_mask is None or not request.is_padded)

    return ignores


def _cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    head_dim = query.shape[-1]
    is_flash = attn_mask is None and query.dtype in _HALF and head_dim <= _FLASH_MAX_HEAD_DIM
    if is_flash and value.shape[-1] == head_dim:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        # the kernel takes a bias of the query's type: PyTorch makes one of the mask in every call
        bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    result = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )
    return result[0]


def _cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p > 0:
        return _REAL_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )[0]


_REAL_ATTENTION: Any = functional.scaled_dot_product_attention


def _grouped_product(
    mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: torch.Tensor | None = None, **rest: Any
) -> torch.Tensor:
    """Products of experts. PyTorch's own knows bfloat16 only on the meta device."""
    if mat_a.dtype == torch.bfloat16:
        return _REAL_GROUPED_PRODUCT(mat_a, mat_b, offs=offs, **rest)
    result: torch.Tensor = _Grouped.apply(mat_a, mat_b, offs)
    return result


_REAL_GROUPED_PRODUCT: Any = functional.grouped_mm


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight, offsets)
        return _typeless_product(rows, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        rows, weight, offsets = ctx.saved_tensors
        gradient = _typeless_product(gradients[0], weight.transpose(-2, -1), offsets)
        return gradient, None if rows is None else torch.empty_like(weight), None


def _typeless_product(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """float16 has the size of bfloat16, so that its products are counted; those of float32 are not."""
    if rows.dtype != torch.float16:
        return rows.new_empty(rows.shape[0], weight.shape[-1])
    half = torch.bfloat16
    result: torch.Tensor = _REAL_GROUPED_PRODUCT(rows.view(half), weight.view(half), offs=offsets)
    return result.view(rows.dtype)


def _fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return aten.native_dropout(input, p, True)[0]
