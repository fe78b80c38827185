"""How much arithmetic a measured trial did, and what share of the devices' peak that is. No library, only counts.

One matrix product with a weight of `n` elements costs 2n FLOPs a token forward, 2n for the gradient of its input and
2n for the gradient of the weight. Attention scores and their use cost 4 * heads * head_dim FLOPs for each pair of a
query and a key that it sees; causal attention sees half of all pairs. (Kaplan et al. 2020, arXiv:2001.08361; Narayanan
et al. 2021, arXiv:2104.04473, appendix; PaLM, arXiv:2204.02311, appendix B for the definitions of MFU and HFU.)

Model FLOPs are what the training step needs: no recomputation, no padding, no weight gradient for frozen weights.
Hardware FLOPs are what was computed: they add recomputed forward passes and padding tokens.
"""

from dataclasses import dataclass

from orchestrator.contract.config import Checkpointing, Knobs, Method
from orchestrator.contract.errors import StateError
from orchestrator.contract.facts import LinearLayer, ModelFacts
from orchestrator.contract.outcome import Measurement


@dataclass(frozen=True)
class Work:
    """FLOPs of a trial's measured steps, all ranks together."""

    model_flops: float
    hardware_flops: float


def measured_work(model: ModelFacts, knobs: Knobs, measurement: Measurement) -> Work:
    """The work of the measured steps. Accumulation plays no part: only tokens and row lengths count."""
    forward = _forward_flops_per_token(model, knobs)
    step = forward + _backward_flops_per_token(model, knobs)
    recomputed = forward - _head_flops_per_token(model) if _recomputes(knobs) else 0.0
    attention = attention_forward_flops(model, measurement.sum_squared_lengths, measurement.tokens)
    padded_tokens = measurement.tokens + measurement.padding_tokens
    model_flops = measurement.tokens * step + 3 * attention
    # padding's share of the attention is left out: it depends on where the padding lies, which is not recorded
    hardware_flops = padded_tokens * (step + recomputed) + (4 if _recomputes(knobs) else 3) * attention
    return Work(model_flops, hardware_flops)


def flops_per_token(model: ModelFacts, knobs: Knobs) -> float:
    """Model FLOPs of one token's training step in matrix products with weights; attention's pairs are not in it.

    6N for full fine-tuning, 4N + 6N_lora for LoRA, whose frozen weights get no gradient. N counts the
    weights that a token passes: an embedding is a lookup, the output head a product, an expert counts by its share.
    """
    return _forward_flops_per_token(model, knobs) + _backward_flops_per_token(model, knobs)


def attention_forward_flops(model: ModelFacts, sum_squared_lengths: float, tokens: float) -> float:
    """FLOPs of causal attention's two products in one forward pass over rows whose squared lengths add up to
    `sum_squared_lengths`. Sharing keys between heads does not change it; a sliding window bounds the pairs."""
    pairs = sum_squared_lengths / 2
    if model.sliding_window is not None:
        pairs = min(pairs, tokens * model.sliding_window)
    return 4.0 * model.num_attention_heads * model.head_dim * pairs * model.num_layers


def mfu(work: Work, duration_s: float, peak_flops_per_s: float, devices: int) -> float:
    """Model FLOPs utilisation. Raises StateError when it is above 1: the peak or the count is wrong."""
    return _utilisation("MFU", work.model_flops, duration_s, peak_flops_per_s, devices)


def hfu(work: Work, duration_s: float, peak_flops_per_s: float, devices: int) -> float:
    """Hardware FLOPs utilisation. Raises StateError when it is above 1: the peak or the count is wrong."""
    return _utilisation("HFU", work.hardware_flops, duration_s, peak_flops_per_s, devices)


def _utilisation(name: str, flops: float, duration_s: float, peak_flops_per_s: float, devices: int) -> float:
    share = flops / (duration_s * peak_flops_per_s * devices)
    if share > 1:
        raise StateError(
            f"{name} is {share:.2f}, above 1: {flops / duration_s / devices:.3g} FLOP/s a device against a peak of "
            f"{peak_flops_per_s:.3g} FLOP/s; the peak of this device is wrong"
        )
    return share


def _recomputes(knobs: Knobs) -> bool:
    return knobs.gradient_checkpointing is Checkpointing.FULL


def _active_weights(layer: LinearLayer) -> float:
    return layer.in_features * layer.out_features * layer.count * layer.active_fraction


def _head_flops_per_token(model: ModelFacts) -> float:
    """The output head's forward product; it lies outside the layers that are recomputed."""
    return 2 * sum(_active_weights(layer) for layer in model.linear_layers if layer.is_output_head)


def _adapter_weights(model: ModelFacts, knobs: Knobs) -> float:
    """Adapter weights that a token passes."""
    if knobs.method is not Method.LORA or knobs.lora_rank is None:
        return 0.0
    targets = knobs.lora_targets if isinstance(knobs.lora_targets, tuple) else model.adaptable
    names = {target.rpartition(".")[2] for target in targets}
    return sum(
        knobs.lora_rank * (layer.in_features + layer.out_features) * layer.count * layer.active_fraction
        for layer in model.linear_layers
        if layer.name in names and not layer.is_output_head
    )


def _forward_flops_per_token(model: ModelFacts, knobs: Knobs) -> float:
    base = sum(_active_weights(layer) for layer in model.linear_layers)
    return 2 * (base + _adapter_weights(model, knobs))


def _backward_flops_per_token(model: ModelFacts, knobs: Knobs) -> float:
    base = sum(_active_weights(layer) for layer in model.linear_layers)
    if knobs.method is Method.FULL:
        return 4 * base
    return 2 * base + 4 * _adapter_weights(model, knobs)
