"""A model's shape from its config alone: parameters, linear layers and adapter sizes, without weights or libraries.

Covers the decoder families whose parameter count follows from a few fields. The counts are those of transformers'
modules (`modeling_llama.py`, `modeling_mistral.py`, `modeling_qwen2.py`, `modeling_qwen3.py`, `modeling_mixtral.py`,
`modeling_gpt2.py`); the preflight reads the same facts from the real model and is the last word.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from orchestrator.contract.facts import LinearLayer, ModelFacts

Config = Mapping[str, JsonValue]

DEFAULT_LORA_TARGETS = {
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
    "gpt2": ("c_attn",),
}
"""PEFT's own targets where a user names none (`peft/utils/constants.py`)."""


@dataclass(frozen=True)
class _Family:
    """Where a family departs from Llama. None: the field has to be in the config."""

    key_value_heads: int | None = None
    """Key and value heads where the config names none; None: as many as heads."""
    head_dim: int | None = None
    query_bias: bool = False
    head_norms: bool = False
    """A norm of head_dim weights on queries and one on keys, in each layer."""
    sliding_window: int | None = None
    """Tokens, where the config does not name it."""
    asks_for_window: bool = False
    """The window counts only with use_sliding_window: true."""


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(key_value_heads=8, sliding_window=4096),
    "mixtral": _Family(key_value_heads=8),
    "qwen2": _Family(key_value_heads=32, query_bias=True, asks_for_window=True),
    "qwen3": _Family(key_value_heads=32, head_dim=128, head_norms=True, asks_for_window=True),
}


def shape_of(config: Config) -> ModelFacts:
    """The shape of the model that `config` (the content of a config.json) describes.

    Raises ValueError when the family is not covered or a field is missing, naming the field.
    """
    nested = config.get("text_config")
    if isinstance(nested, dict) and "hidden_size" not in config:
        config = nested
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return _gpt2(config)
    if model_type not in _FAMILIES:
        known = ", ".join([*_FAMILIES, "gpt2"])
        raise ValueError(f"the shape of model_type {model_type!r} is not known from its config; known are {known}")
    return _llama_like(config, str(model_type), _FAMILIES[str(model_type)])


def lora_parameters(model: ModelFacts, targets: tuple[str, ...] | str, rank: int) -> int:
    """Weights of adapters of `rank` on the layers named in `targets`, or on all adaptable ones for `all-linear`."""
    names = model.adaptable if targets == "all-linear" else targets
    return sum(
        rank * (layer.in_features + layer.out_features) * layer.count
        for layer in model.linear_layers
        if layer.name in names and not layer.is_output_head
    )


def _whole(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"the model's config needs {name}, a whole number of at least 1, not {value!r}")
    return value


def _optional(config: Config, name: str) -> int | None:
    return None if config.get(name) is None else _whole(config, name)


def _llama_like(config: Config, model_type: str, family: _Family) -> ModelFacts:
    hidden, layers = _whole(config, "hidden_size"), _whole(config, "num_hidden_layers")
    heads, vocab = _whole(config, "num_attention_heads"), _whole(config, "vocab_size")
    kv_heads = _whole(config, "num_key_value_heads", family.key_value_heads or heads)
    head_dim = _whole(config, "head_dim", family.head_dim or hidden // heads)
    query, key_value = heads * head_dim, kv_heads * head_dim
    attention = (
        LinearLayer(name="q_proj", in_features=hidden, out_features=query, count=layers),
        LinearLayer(name="k_proj", in_features=hidden, out_features=key_value, count=layers),
        LinearLayer(name="v_proj", in_features=hidden, out_features=key_value, count=layers),
        LinearLayer(name="o_proj", in_features=query, out_features=hidden, count=layers),
    )
    mlp = _mlp(config, hidden, layers)
    head = LinearLayer(name="lm_head", in_features=hidden, out_features=vocab, count=1, is_output_head=True)
    tied = config.get("tie_word_embeddings", False) is True
    biases = 0
    if family.query_bias or config.get("attention_bias") is True:
        biases += layers * (query + 2 * key_value)
    if config.get("attention_bias") is True and not family.query_bias:
        biases += layers * hidden
    if config.get("mlp_bias") is True:
        biases += layers * (2 * _whole(config, "intermediate_size") + hidden)
    norms = layers * (2 * hidden + (2 * head_dim if family.head_norms else 0)) + hidden
    embeddings = vocab * hidden * (1 if tied else 2)
    is_mixture = model_type == "mixtral"
    return ModelFacts(
        model_type=model_type,
        total_parameters=embeddings + _weights((*attention, *mlp)) + biases + norms,
        linear_layers=(*attention, *mlp, head),
        # a mixture's experts are stacked tensors, which PEFT's all-linear does not see
        adaptable=tuple(layer.name for layer in (attention if is_mixture else (*attention, *mlp))),
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tied_embeddings=tied,
        max_position_embeddings=_optional(config, "max_position_embeddings"),
        sliding_window=_sliding_window(config, family),
    )


def _sliding_window(config: Config, family: _Family) -> int | None:
    if family.asks_for_window and config.get("use_sliding_window") is not True:
        return None
    return _optional(config, "sliding_window") if "sliding_window" in config else family.sliding_window


def _mlp(config: Config, hidden: int, layers: int) -> tuple[LinearLayer, ...]:
    width = _whole(config, "intermediate_size")
    if config.get("model_type") != "mixtral":
        return (
            LinearLayer(name="gate_proj", in_features=hidden, out_features=width, count=layers),
            LinearLayer(name="up_proj", in_features=hidden, out_features=width, count=layers),
            LinearLayer(name="down_proj", in_features=width, out_features=hidden, count=layers),
        )
    experts, chosen = _whole(config, "num_local_experts", 8), _whole(config, "num_experts_per_tok", 2)
    share = chosen / experts
    return (
        LinearLayer(name="gate", in_features=hidden, out_features=experts, count=layers),
        LinearLayer(
            name="gate_up_proj",
            in_features=hidden,
            out_features=2 * width,
            count=layers * experts,
            active_fraction=share,
        ),
        LinearLayer(
            name="down_proj", in_features=width, out_features=hidden, count=layers * experts, active_fraction=share
        ),
    )


def _weights(layers: tuple[LinearLayer, ...]) -> int:
    return sum(layer.in_features * layer.out_features * layer.count for layer in layers)


def _gpt2(config: Config) -> ModelFacts:
    hidden, layers, heads = _whole(config, "n_embd", 768), _whole(config, "n_layer", 12), _whole(config, "n_head", 12)
    vocab, positions = _whole(config, "vocab_size", 50257), _whole(config, "n_positions", 1024)
    width = _whole(config, "n_inner", 4 * hidden)
    linear = (
        LinearLayer(name="c_attn", in_features=hidden, out_features=3 * hidden, count=layers),
        LinearLayer(name="c_proj", in_features=hidden, out_features=hidden, count=layers),
        LinearLayer(name="c_fc", in_features=hidden, out_features=width, count=layers),
        LinearLayer(name="c_proj", in_features=width, out_features=hidden, count=layers),
    )
    head = LinearLayer(name="lm_head", in_features=hidden, out_features=vocab, count=1, is_output_head=True)
    tied = config.get("tie_word_embeddings", True) is True
    biases = layers * (3 * hidden + hidden + width + hidden)
    norms = layers * 4 * hidden + 2 * hidden
    embeddings = (vocab * (1 if tied else 2) + positions) * hidden
    return ModelFacts(
        model_type="gpt2",
        total_parameters=embeddings + _weights(linear) + biases + norms,
        linear_layers=(*linear, head),
        adaptable=("c_attn", "c_fc", "c_proj"),
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tied_embeddings=tied,
        max_position_embeddings=positions,
    )
