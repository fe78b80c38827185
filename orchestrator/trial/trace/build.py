"""The weightless model of a trace: real transformers and peft code on the meta device."""

import inspect
from typing import Any, Literal

import peft
import torch
from peft import get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from orchestrator.contract.config import Checkpointing
from orchestrator.contract.profile import Quantization, TraceRequest
from orchestrator.trial.model import load_config
from orchestrator.trial.trace.dtypes import DTYPES
from orchestrator.trial.trace.losses import install_loss
from orchestrator.trial.unusable import Unusable

_CLASSES = {
    "causal_lm": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "masked_lm": AutoModelForMaskedLM,
    "seq2seq_lm": AutoModelForSeq2SeqLM,
}
BITS_PER_WEIGHT = {
    Quantization.NF4: 4 + 32 / 64,
    Quantization.NF4_DOUBLE: 4 + 8 / 64 + 32 / (64 * 256),
    Quantization.INT4: 4 + (16 + 4) / 128,
    Quantization.INT8: 8.0,
}
"""With their scales: float32 for 64 weights in NF4, 8 bits for 64 and float32 for 256 of those with double
quantisation (bitsandbytes `functional.py`); float16 scale and 4-bit zero for 128 in GPTQ."""


def build(request: TraceRequest, lora_rank: int, device: Literal["meta", "cpu"] = "meta") -> nn.Module:
    """The model of `request`, without data unless `device` says otherwise, ready to train. Raises Unusable."""
    with torch.device(device):
        model = _base(request)
        if request.quantization is not Quantization.NONE:
            _quantise(model, request.quantization)
        if request.kbit_preparation:
            _prepare_for_kbit_training(model, norms_only=request.kbit_norms_only)
        install_loss(model, request.loss)
        if request.gradient_checkpointing is Checkpointing.FULL:
            _enable_checkpointing(model, request)
        wrapped: nn.Module = model
        if request.adapter is not None:
            wrapped = _adapted(model, request, lora_rank)
    return wrapped.train()


def _base(request: TraceRequest) -> PreTrainedModel:
    config = load_config(request.model)
    # the kernels of a flash attention package cannot run here; sdpa without a mask takes the same ones
    attention = "sdpa" if request.attention == "flash_attention_2" else request.attention
    dtype = DTYPES[request.dtype]
    model_class = _CLASSES[request.task]
    trust = request.model.trust_remote_code
    try:
        model = model_class.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust)
    except ValueError as error:
        if attention == "eager" or "scaled_dot_product_attention" not in str(error):
            raise Unusable("model", f"no {request.task} model can be built from it: {error}") from error
        model = model_class.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust)
    model.config.use_cache = False
    _untie(model, request)
    return model


def _untie(model: PreTrainedModel, request: TraceRequest) -> None:
    """transformers 5 ties some heads (T5 v1.1, mT5) whose checkpoints have a head of their own, as the config says."""
    head: Any = model.get_output_embeddings()
    is_untied = (request.model.config or {}).get("tie_word_embeddings") is False
    if is_untied and head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight))


def _adapted(model: PreTrainedModel, request: TraceRequest, lora_rank: int) -> nn.Module:
    assert request.adapter is not None
    arguments: dict[str, Any] = dict(request.adapter)
    kind = str(arguments.pop("peft_type", "LORA"))
    config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING.get(kind)
    if config_class is None:
        raise Unusable("adapter.peft_type", f"peft knows no {kind}")
    if request.has_rank:
        arguments["r"] = lora_rank
    if "task_type" not in arguments and "task_type" in inspect.signature(config_class).parameters:
        arguments["task_type"] = "CAUSAL_LM" if request.task == "causal_lm" else None
    try:
        wrapped = get_peft_model(model, config_class(**arguments))
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise Unusable("adapter", f"peft cannot adapt the model: {str(error).splitlines()[0]}") from error
    for module in wrapped.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, QuantisedLinear):
            base.is_adapted = True
    if request.adapter_dtype is not None:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[request.adapter_dtype])
    return wrapped


def _enable_checkpointing(model: PreTrainedModel, request: TraceRequest) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": request.use_reentrant})
    if request.adapter is not None:
        model.enable_input_require_grads()


def _prepare_for_kbit_training(model: PreTrainedModel, *, norms_only: bool) -> None:
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
            is_cast = "norm" in path if norms_only else not isinstance(module, QuantisedLinear)
            if is_cast and not hasattr(parameter, STORED_BITS):
                parameter.data = parameter.data.to(torch.float32)


_EXPERT_DIMENSIONS = 3
STORED_BITS = "stored_bits"
"""Attribute of a quantised weight that is no linear layer's: bits per element with its scales."""


class QuantisedLinear(nn.Linear):
    """A frozen linear layer stored in few bits: each product makes the whole weight anew, as bitsandbytes does.

    Its weight keeps the shape of the original, so that peft finds its sizes; `bits` says what is stored.
    """

    bits: float
    is_dequantised: bool
    is_adapted: bool = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # the product is in the type that the model was loaded in, the result in that of the input
        product = _Product.apply(input.to(self.weight.dtype), self.weight, self.bias, self.is_dequantised)
        result: torch.Tensor = product.to(input.dtype)
        # peft's 4-bit layers add the adapter to a copy of the result (`tuners/lora/bnb.py`)
        return result.clone() if self.is_dequantised and self.is_adapted else result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dequantises: bool
    ) -> torch.Tensor:
        ctx.weight, ctx.dequantises, ctx.dtype = weight, dequantises, input.dtype
        return functional.linear(input, _whole(weight, input.dtype, dequantises), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight = _whole(ctx.weight, gradients[0].dtype, ctx.dequantises)
        return gradients[0] @ weight, None, None, None


def _whole(weight: torch.Tensor, dtype: torch.dtype, dequantises: bool) -> torch.Tensor:
    if not dequantises:
        return weight if weight.dtype == dtype else torch.empty_like(weight, dtype=dtype)
    return torch.empty(weight.shape, dtype=dtype, device=weight.device)


def _quantise(model: PreTrainedModel, quantization: Quantization) -> None:
    head: Any = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear | Conv1D) or child is head:
                continue
            features = child.weight.shape if isinstance(child, nn.Linear) else child.weight.shape[::-1]
            layer = QuantisedLinear(features[1], features[0], bias=child.bias is not None, dtype=child.weight.dtype)
            layer.bits = BITS_PER_WEIGHT[quantization]
            layer.is_dequantised = quantization in (Quantization.NF4, Quantization.NF4_DOUBLE)
            layer.requires_grad_(False)
            setattr(module, name, layer)
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == _EXPERT_DIMENSIONS:
                # experts are stacked here, but were linear layers of their own when quantisers met them
                setattr(parameter, STORED_BITS, BITS_PER_WEIGHT[quantization])
