"""Parameter counts are exact: published counts of known models (logs, model cards and PEFT's own print-outs)."""

import pytest

from orchestrator.spec.model import DEFAULT_LORA_TARGETS, lora_parameters, shape_of


def _config(
    model_type: str, shape: tuple[int, int, int, int, int], vocab: int, tied: bool = False
) -> dict[str, object]:
    hidden, width, layers, heads, kv_heads = shape
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


LLAMA3_8B = _config("llama", (4096, 14336, 32, 32, 8), 128256)
LLAMA31_70B = _config("llama", (8192, 28672, 80, 64, 8), 128256)
TINYLLAMA = _config("llama", (2048, 5632, 22, 32, 4), 32000)
LLAMA2_7B = _config("llama", (4096, 11008, 32, 32, 32), 32000)
LLAMA2_13B = _config("llama", (5120, 13824, 40, 40, 40), 32000)
QWEN2_05B = _config("qwen2", (896, 4864, 24, 14, 2), 151936, tied=True)
QWEN25_3B = _config("qwen2", (2048, 11008, 36, 16, 2), 151936, tied=True)
MIXTRAL_8X7B = _config("mixtral", (4096, 14336, 32, 32, 8), 32000)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA31_70B, 70_553_706_496),
        (TINYLLAMA, 1_100_048_384),
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA2_13B, 13_015_864_320),
        (QWEN2_05B, 494_032_768),
        (QWEN25_3B, 3_085_938_688),
        (MIXTRAL_8X7B, 46_702_792_704),
        ({"model_type": "gpt2"}, 124_439_808),
    ],
)
def test_total_parameters(config: dict[str, object], parameters: int) -> None:
    assert shape_of(config).total_parameters == parameters


@pytest.mark.parametrize(
    ("config", "targets", "rank", "parameters"),
    [
        (TINYLLAMA, "all-linear", 64, 50_462_720),
        (QWEN2_05B, "all-linear", 64, 35_192_832),
        (LLAMA2_7B, ("q_proj", "v_proj"), 8, 4_194_304),
        (LLAMA2_13B, ("q_proj", "v_proj"), 8, 6_553_600),
        (QWEN25_3B, DEFAULT_LORA_TARGETS["qwen2"], 16, 3_686_400),
    ],
)
def test_adapter_parameters(
    config: dict[str, object], targets: tuple[str, ...] | str, rank: int, parameters: int
) -> None:
    assert lora_parameters(shape_of(config), targets, rank) == parameters


def test_a_composite_config_is_read_through_its_text_part() -> None:
    assert shape_of({"model_type": "vision", "text_config": TINYLLAMA}) == shape_of(TINYLLAMA)


def test_a_window_counts_where_the_family_uses_it() -> None:
    assert shape_of({**QWEN2_05B, "sliding_window": 1024}).sliding_window is None
    assert shape_of({**QWEN2_05B, "sliding_window": 1024, "use_sliding_window": True}).sliding_window == 1024
    assert shape_of({**LLAMA2_7B, "model_type": "mistral"}).sliding_window == 4096
    assert shape_of({**LLAMA2_7B, "model_type": "mistral", "sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
        ({"hidden_size": None}, "needs hidden_size, a whole number of at least 1, not None"),
        ({"vocab_size": "32k"}, "needs vocab_size, a whole number of at least 1, not '32k'"),
    ],
)
def test_what_is_missing_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of({**TINYLLAMA, **change})
