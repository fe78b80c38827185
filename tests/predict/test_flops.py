"""FLOPs against counts worked out by hand, and what must not change them."""

import pytest

from orchestrator.contract.config import Checkpointing, Knobs, Method
from orchestrator.contract.errors import StateError
from orchestrator.contract.facts import LinearLayer, ModelFacts
from orchestrator.contract.outcome import Measurement, RankMemory
from orchestrator.predict.flops import Work, attention_forward_flops, flops_per_token, hfu, measured_work, mfu

# One layer, hidden 4, 2 heads of 2, MLP width 8, 10 words.
# q, k, v, o: 4 x 16 = 64; gate, up, down: 3 x 32 = 96; head: 4 x 10 = 40. Together 200 weights in matrix products.
BODY, HEAD = 64 + 96, 40


def _layer(name: str, in_features: int, out_features: int, count: int = 1, share: float = 1.0) -> LinearLayer:
    return LinearLayer(
        name=name, in_features=in_features, out_features=out_features, count=count, active_fraction=share
    )


def _model(kv_out: int = 4, **change: object) -> ModelFacts:
    layers = (
        _layer("q_proj", 4, 4),
        _layer("k_proj", 4, kv_out),
        _layer("v_proj", 4, kv_out),
        _layer("o_proj", 4, 4),
        _layer("gate_proj", 4, 8),
        _layer("up_proj", 4, 8),
        _layer("down_proj", 8, 4),
        LinearLayer(name="lm_head", in_features=4, out_features=10, count=1, is_output_head=True),
    )
    shape: dict[str, object] = {
        "model_type": "llama",
        "total_parameters": 252,
        "linear_layers": layers,
        "adaptable": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "hidden_size": 4,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 10,
        "tied_embeddings": False,
    }
    return ModelFacts.model_validate(shape | change)


def _knobs(method: Method = Method.FULL, checkpointing: Checkpointing = Checkpointing.NONE, **more: object) -> Knobs:
    return Knobs.model_validate({"method": method, "gradient_checkpointing": checkpointing, "micro_batch": 1, **more})


def _measured(tokens: int = 100, padding: int = 0, squares: int = 1000, micro_batch: int = 1) -> Measurement:
    return Measurement(
        tokens_per_second=50.0,
        tokens_per_second_low=49.0,
        tokens_per_second_high=51.0,
        tokens=tokens,
        padding_tokens=padding,
        padding_fraction=padding / (tokens + padding),
        sequences=10,
        sum_squared_lengths=squares,
        measured_steps=2,
        measured_s=2.0,
        step_s=(1.0, 1.0),
        peak_memory_bytes=1,
        peak_resident_bytes=1,
        ranks=(RankMemory(rank=0, peak_memory_bytes=1, peak_resident_bytes=1),),
        probe_row_tokens=10,
        reaches_sequence_length=True,
        trainable_parameters=1,
        total_parameters=1,
        first_loss=1.0,
        last_loss=1.0,
        device="cpu",
        device_name="test",
        threads_per_rank=1,
        resolved={"train_micro_batch_size_per_gpu": micro_batch},
    )


def test_full_fine_tuning_costs_six_per_weight_and_token() -> None:
    assert flops_per_token(_model(), _knobs()) == 6 * (BODY + HEAD)


def test_frozen_weights_get_no_gradient() -> None:
    knobs = _knobs(Method.LORA, lora_rank=2, lora_targets=("q_proj", "v_proj"))
    adapters = 2 * (4 + 4) * 2
    assert flops_per_token(_model(), knobs) == 4 * (BODY + HEAD) + 6 * adapters


def test_all_linear_leaves_the_output_head_out() -> None:
    knobs = _knobs(Method.LORA, lora_rank=1, lora_targets="all-linear")
    adapters = 4 * (4 + 4) + 3 * (4 + 8)
    assert flops_per_token(_model(), knobs) == 4 * (BODY + HEAD) + 6 * adapters


def test_an_embedding_is_a_lookup_and_a_tied_head_a_product() -> None:
    tied = _model(tied_embeddings=True, total_parameters=212)
    assert flops_per_token(tied, _knobs()) == flops_per_token(_model(), _knobs())


def test_shared_keys_make_smaller_products_and_equal_attention() -> None:
    grouped = _model(kv_out=2, num_key_value_heads=1)
    assert flops_per_token(grouped, _knobs()) == 6 * (BODY + HEAD - 16)
    assert attention_forward_flops(grouped, 1000, 100) == attention_forward_flops(_model(), 1000, 100)


def test_an_expert_counts_by_its_share_of_the_tokens() -> None:
    experts = (
        *_model().linear_layers[:4],
        *(_layer(name, 4, 8, count=8, share=2 / 8) for name in ("gate_proj", "up_proj")),
        _layer("down_proj", 8, 4, count=8, share=2 / 8),
        _model().linear_layers[-1],
    )
    mixture = _model(linear_layers=experts)
    assert flops_per_token(mixture, _knobs()) == 6 * (64 + 2 * 96 + HEAD)


def test_causal_attention_sees_half_of_the_pairs_of_each_row() -> None:
    # a row of 10 tokens: 100 / 2 pairs, each 2 FLOPs x 2 products x 2 heads x 2 numbers
    assert attention_forward_flops(_model(), 100, 10) == 50 * 16
    one_long, two_short = attention_forward_flops(_model(), 100, 10), attention_forward_flops(_model(), 25 + 25, 10)
    assert one_long == 2 * two_short


def test_a_sliding_window_bounds_the_pairs() -> None:
    assert attention_forward_flops(_model(sliding_window=2), 100, 10) == 10 * 2 * 16
    assert attention_forward_flops(_model(sliding_window=64), 100, 10) == 50 * 16


def test_a_step_is_three_forward_passes_of_work() -> None:
    work = measured_work(_model(), _knobs(), _measured())
    assert work.model_flops == 100 * 6 * (BODY + HEAD) + 3 * 500 * 16
    assert work.hardware_flops == work.model_flops


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_recomputing_is_work_of_the_hardware_only(method: Method) -> None:
    rank = {"lora_rank": 2, "lora_targets": "all-linear"} if method is Method.LORA else {}
    adapters = 2 * (4 * 8 + 3 * 12) if method is Method.LORA else 0
    kept = measured_work(_model(), _knobs(method, **rank), _measured())
    recomputed = measured_work(_model(), _knobs(method, Checkpointing.FULL, **rank), _measured())
    assert recomputed.model_flops == kept.model_flops
    assert recomputed.hardware_flops - kept.hardware_flops == 100 * 2 * (BODY + adapters) + 500 * 16


def test_padding_is_work_of_the_hardware_only() -> None:
    packed, padded = (measured_work(_model(), _knobs(), _measured(padding=padding)) for padding in (0, 900))
    assert padded.model_flops == packed.model_flops
    assert padded.hardware_flops - packed.hardware_flops == 900 * 6 * (BODY + HEAD)


def test_accumulation_changes_nothing_at_equal_tokens() -> None:
    once = measured_work(_model(), _knobs(), _measured(micro_batch=4))
    four_times = measured_work(_model(), _knobs(), _measured(micro_batch=1))
    assert once == four_times


def test_utilisation_is_the_share_of_all_devices_peak() -> None:
    work = Work(model_flops=4e12, hardware_flops=6e12)
    assert mfu(work, 2.0, 1e12, 4) == 0.5
    assert hfu(work, 2.0, 1e12, 4) == 0.75


def test_more_than_the_peak_is_an_error_that_names_it() -> None:
    work = Work(model_flops=4e12, hardware_flops=6e12)
    with pytest.raises(StateError, match=r"HFU is 1.50, above 1: 3e\+12 FLOP/s a device against a peak of 2e\+12"):
        hfu(work, 2.0, 2e12, 1)
    with pytest.raises(StateError, match=r"MFU is 2.00, above 1"):
        mfu(work, 2.0, 1e12, 1)
