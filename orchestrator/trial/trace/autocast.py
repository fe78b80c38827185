"""PyTorch's autocast for tensors without data: the meta device has no key of its own for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from orchestrator.contract.profile import Dtype
from orchestrator.trial.trace.dtypes import DTYPES

_LOWER = frozenset(
    {
        functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm,
        torch.mm, torch.Tensor.mm, torch.addmm, torch.baddbmm, torch.Tensor.addmm, torch.einsum,
    }
)  # fmt: skip
_FLOAT32 = frozenset(
    {
        functional.softmax, torch.softmax, torch.Tensor.softmax, functional.log_softmax, torch.log_softmax,
        functional.layer_norm, functional.cross_entropy, functional.nll_loss, torch.exp, torch.pow, torch.Tensor.pow,
        torch.rsqrt, torch.Tensor.rsqrt, torch.cumsum, torch.Tensor.cumsum, torch.norm,
    }
)  # fmt: skip
"""Both lists are those of CUDA in `aten/src/ATen/autocast_mode.h`, as far as language models call them."""


@contextmanager
def autocast(dtype: Dtype | None) -> Iterator[None]:
    """While active, matrix products run in `dtype` and sensitive functions in float32; None: as written."""
    if dtype is None:
        yield
        return
    with _Autocast(DTYPES[dtype]):
        yield


class _Autocast(TorchFunctionMode):
    """Casts arguments by function. A weight that is trained is cast once in a forward pass, as the cache does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._cache: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOWER or getattr(func, "__name__", "") == "scaled_dot_product_attention":
            args, kwargs = tree_map(self._lower, (args, kwargs))
        elif func in _FLOAT32:
            args, kwargs = tree_map(self._raise, (args, kwargs))
        return func(*args, **kwargs)

    def _lower(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == self._dtype:
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
            return value.to(self._dtype)
        if id(value) not in self._cache:
            self._cache[id(value)] = value.to(self._dtype)
        return self._cache[id(value)]

    def _raise(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.float()
        return value
