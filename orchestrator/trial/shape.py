"""A model's shape, read from the real transformers model built without weights."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from orchestrator.contract.config import ModelSource
from orchestrator.contract.facts import LinearLayer, ModelFacts
from orchestrator.trial.unusable import Unusable

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k")


def weightless_model(config: PretrainedConfig, source: ModelSource) -> PreTrainedModel:
    """The model of `config` on the meta device: every module and shape, no memory. Raises Unusable."""
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            field = "model.config" if source.config is not None else "model.path" if source.path else "model.id"
            lines = str(error).strip().splitlines()
            raise Unusable(
                field, f"no causal language model can be built from it: {lines[0] if lines else error}"
            ) from error


def model_facts(model: PreTrainedModel) -> ModelFacts:
    """The facts of a weightless model."""
    config = model.config.get_text_config()
    # the attributes also answer to a family's own names; what a family leaves out is missing in both
    values = config.to_dict()
    layers = list(_linear_layers(model))
    heads = int(config.num_attention_heads)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    return ModelFacts(
        model_type=model.config.model_type,
        total_parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear_layers=_grouped(layers),
        adaptable=tuple(sorted({layer.name for layer in layers if layer.is_adaptable})),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or config.hidden_size // heads),
        vocab_size=int(embedding.shape[0]),
        tied_embeddings=head is not None and head.weight is embedding,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        sliding_window=_sliding_window(values),
    )


@dataclass(frozen=True)
class _Layer:
    path: str
    in_features: int
    out_features: int
    is_output_head: bool = False
    is_adaptable: bool = True
    active_fraction: float = 1.0
    count: int = 1

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def _linear_layers(model: PreTrainedModel) -> Iterator[_Layer]:
    head = model.get_output_embeddings()
    active_fraction = _active_fraction(model.config.get_text_config())
    for path, module in model.named_modules():
        share = active_fraction if _is_in_experts(path) else 1.0
        if isinstance(module, Conv1D):
            yield _Layer(path, module.weight.shape[0], module.weight.shape[1], active_fraction=share)
        elif isinstance(module, nn.Linear):
            is_head = module is head
            sizes = (module.in_features, module.out_features)
            yield _Layer(path, *sizes, is_output_head=is_head, is_adaptable=not is_head, active_fraction=share)
        elif _is_in_experts(path):
            yield from _fused_experts(path, module, active_fraction)


def _fused_experts(path: str, module: nn.Module, active_fraction: float) -> Iterator[_Layer]:
    """Experts in one tensor of (experts, out, in); some families swap the last two, which changes no product."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            experts, outputs, inputs = parameter.shape
            yield _Layer(
                path=f"{path}.{name}",
                in_features=inputs,
                out_features=outputs,
                is_adaptable=False,
                active_fraction=active_fraction,
                count=experts,
            )


def _is_in_experts(path: str) -> bool:
    return "experts" in path.split(".")


def _active_fraction(config: PretrainedConfig) -> float:
    """Experts per token over experts. Families name the two differently; a dense model has neither."""
    values = config.to_dict()
    experts = next((values[name] for name in _EXPERTS if values.get(name)), None)
    per_token = next((values[name] for name in _EXPERTS_PER_TOKEN if values.get(name)), None)
    return min(1.0, per_token / experts) if experts and per_token else 1.0


def _grouped(layers: list[_Layer]) -> tuple[LinearLayer, ...]:
    counts: Counter[tuple[str, int, int, bool, float]] = Counter()
    for layer in layers:
        key = (layer.name, layer.in_features, layer.out_features, layer.is_output_head, layer.active_fraction)
        counts[key] += layer.count
    return tuple(
        LinearLayer(
            name=name,
            in_features=inputs,
            out_features=outputs,
            count=count,
            is_output_head=is_output_head,
            active_fraction=active_fraction,
        )
        for (name, inputs, outputs, is_output_head, active_fraction), count in counts.items()
    )


def _sliding_window(values: dict[str, Any]) -> int | None:
    if values.get("use_sliding_window") is False:
        return None
    window = values.get("sliding_window")
    return int(window) if window else None


def check_lora_targets(model: PreTrainedModel, target_sets: tuple[tuple[str, ...], ...]) -> None:
    """Raise Unusable for a name that ends the path of none of the model's linear layers (peft's rule)."""
    paths = [layer.path for layer in _linear_layers(model) if layer.is_adaptable]
    for target in sorted({target for targets in target_sets for target in targets} - {"all-linear"}):
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            names = ", ".join(sorted({path.rpartition(".")[2] for path in paths}))
            raise Unusable(
                "search.lora_targets", f"{target} is no linear layer of this model; its linear layers are {names}"
            )
