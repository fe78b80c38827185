"""The structures that the cases name, by name: what has to be traced once for all of them."""

from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from orchestrator.contract.config import Checkpointing, ModelSource
from orchestrator.contract.profile import Dtype, LossPath, Quantization, TraceRequest
from orchestrator.spec.catalog import known

FULL = Checkpointing.FULL


def model(name: str, **changes: JsonValue) -> ModelSource:
    """The built-in shape of `name`, with values of its config changed."""
    entry = known(name)
    assert entry is not None, name
    return ModelSource(config={**entry.config, **changes})


def lora(*targets: str, dropout: float = 0.0, saved: tuple[str, ...] = ()) -> dict[str, JsonValue]:
    """peft's configuration on `targets` (none: all linear layers), `saved` trained as a whole."""
    config: dict[str, JsonValue] = {"peft_type": "LORA", "lora_dropout": dropout}
    config["target_modules"] = list(targets) if targets else "all-linear"
    if saved:
        config["modules_to_save"] = list(saved)
    return config


@dataclass(frozen=True)
class Llm:
    """Settings that many requests share, as differences from a 16-bit causal language model."""

    name: str
    dtype: Dtype = "bf16"
    autocast: Literal["bf16", "fp16"] | None = None
    checkpointing: bool = True
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "flash_attention_2"

    def full(self, loss: LossPath = LossPath.TRANSFORMERS, **changes: JsonValue) -> TraceRequest:
        """All weights are trained."""
        return self.adapted(None, loss, **changes)

    def adapted(
        self,
        adapter: dict[str, JsonValue] | None,
        loss: LossPath = LossPath.TRANSFORMERS,
        quantization: Quantization = Quantization.NONE,
        is_prepared: bool = False,
        is_reentrant: bool = False,
        adapter_dtype: Dtype | None = None,
        **changes: JsonValue,
    ) -> TraceRequest:
        """`adapter` on frozen weights; `is_prepared`: by peft's `prepare_model_for_kbit_training`."""
        return TraceRequest(
            model=model(self.name, **changes),
            dtype=self.dtype,
            autocast=self.autocast,
            adapter=adapter,
            adapter_dtype=adapter_dtype,
            has_rank=adapter is not None,
            quantization=quantization,
            kbit_preparation=is_prepared,
            gradient_checkpointing=FULL if self.checkpointing else Checkpointing.NONE,
            use_reentrant=is_reentrant,
            attention=self.attention,
            loss=loss,
        )


def encoder(name: str, autocast: Literal["fp16"] | None = None, checkpointing: bool = False) -> TraceRequest:
    """A classifier in float32 with eager attention, as before transformers had another."""
    return TraceRequest(
        model=model(name),
        task="sequence_classification",
        dtype="fp32",
        autocast=autocast,
        has_rank=False,
        gradient_checkpointing=FULL if checkpointing else Checkpointing.NONE,
        use_reentrant=True,
        attention="eager",
    )


def translator(name: str, adapter: dict[str, JsonValue] | None) -> TraceRequest:
    """An encoder with a decoder, in float32."""
    return TraceRequest(
        model=model(name),
        task="seq2seq_lm",
        dtype="fp32",
        adapter=adapter,
        has_rank=adapter is not None,
        attention="eager",
        is_padded=True,
    )


_OF_QWEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""`c_attn`, `c_proj`, `w1` and `w2` of finetune.py in the native equal of the shape; `c_proj` names the MLP's last
product too."""
_UNCAST = LossPath.TRANSFORMERS_UNCAST


def _qwen(size: str) -> dict[str, TraceRequest]:
    """finetune.py of QwenLM/Qwen: LoRA under autocast on one card; else DeepSpeed, which casts adapters to the weights'
    type."""
    name = f"Qwen/Qwen-{size}"
    half = Llm(name) if size == "72B" else Llm(name, autocast="bf16")
    cast: Dtype | None = "bf16" if size == "72B" else None
    adapter = lora(*_OF_QWEN, dropout=0.05)
    with_embeddings = lora(*_OF_QWEN, dropout=0.05, saved=("embed_tokens", "lm_head"))
    return {
        f"qwen_{size}_lora": half.adapted(adapter, _UNCAST, is_reentrant=True, adapter_dtype=cast),
        f"qwen_{size}_lora_emb": half.adapted(with_embeddings, _UNCAST, is_reentrant=True, adapter_dtype=cast),
        f"qwen_{size}_qlora": Llm(name, dtype="fp16").adapted(
            adapter, _UNCAST, Quantization.INT4, is_reentrant=True, adapter_dtype="fp16"
        ),
        f"qwen_{size}_full": Llm(name).full(_UNCAST),
    }


_LLAMA_7B, _LLAMA_70B, _TINY = "huggyllama/llama-7b", "meta-llama/Llama-2-70b-hf", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
_SMALL: dict[str, JsonValue] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1000,
}

STRUCTURES: dict[str, TraceRequest] = {
    "bert_fp32": encoder("bert-large-uncased"),
    "bert_fp32_checkpointed": encoder("bert-large-uncased", checkpointing=True),
    "bert_amp": encoder("bert-large-uncased", autocast="fp16"),
    "bert_amp_checkpointed": encoder("bert-large-uncased", autocast="fp16", checkpointing=True),
    **_qwen("1_8B"),
    **_qwen("7B"),
    **_qwen("14B"),
    **{name: request for name, request in _qwen("72B").items() if not name.endswith("full")},
    # peft before 0.12 made adapters in the type of the weights
    "llama_70b_lora": Llm(_LLAMA_70B).adapted(lora(), LossPath.TRANSFORMERS_4_45, adapter_dtype="bf16"),
    "llama_70b_qlora": Llm(_LLAMA_70B).adapted(
        lora(), LossPath.TRANSFORMERS_4_45, Quantization.NF4_DOUBLE, is_reentrant=True, adapter_dtype="bf16"
    ),
    "t0_3b_full": translator("bigscience/T0_3B", None),
    "t0_3b_lora": translator("bigscience/T0_3B", lora("q", "v", dropout=0.1)),
    "mt0_xxl_full": translator("bigscience/mt0-xxl", None),
    "mt0_xxl_lora": translator("bigscience/mt0-xxl", lora("q", "v", dropout=0.1)),
    "bloomz_7b_full": Llm("bigscience/bloomz-7b1", "fp32", attention="eager", checkpointing=False).full(),
    "bloomz_7b_lora": Llm("bigscience/bloomz-7b1", "fp32", attention="eager", checkpointing=False).adapted(
        lora("query_key_value", dropout=0.1)
    ),
    "baichuan2_13b_full": Llm("baichuan-inc/Baichuan2-13B-Base").full(),
    "qwen15_7b_full": Llm("Qwen/Qwen1.5-7B", dtype="fp16").full(),
    "qwen25_3b_full": Llm("Qwen/Qwen2.5-3B").full(),
    # of these only what lies on the host is asked, which depends on weights alone: two layers stand for all
    "qwen25_32b_full": Llm("Qwen/Qwen2.5-32B").full(num_hidden_layers=2),
    "glm4_9b_full": Llm("THUDM/glm-4-9b").full(num_hidden_layers=2),
    "opt_7b_full": Llm("facebook/opt-6.7b", "fp16").full(num_hidden_layers=2),
    "gptj_6b_full": Llm("EleutherAI/gpt-j-6b", "fp16", attention="eager").full(_UNCAST, n_layer=2),
    "llama_33b_full": Llm("huggyllama/llama-30b").full(num_hidden_layers=2),
    "llama_70b_full": Llm(_LLAMA_70B).full(num_hidden_layers=2),
    "qwen3_30b_a3b_lora": Llm("Qwen/Qwen3-30B-A3B").adapted(
        lora("q_proj", "k_proj", "v_proj", "o_proj"), num_hidden_layers=2
    ),
    "llada_8b_full": Llm("meta-llama/Meta-Llama-3-8B").full(
        num_key_value_heads=32, intermediate_size=12288, vocab_size=126464, num_hidden_layers=2
    ),
    "tiny_full": Llm(_TINY, checkpointing=False).full(),
    "tiny_lora": Llm(_TINY, checkpointing=False).adapted(lora()),
    "small_full": Llm(_TINY, checkpointing=False).full(**_SMALL),
    "small_lora": Llm(_TINY, checkpointing=False).adapted(lora(), **_SMALL),
    "small_lora_saved": Llm(_TINY, checkpointing=False).adapted(lora(saved=("embed_tokens", "lm_head")), **_SMALL),
    "small_wide_vocabulary": Llm(_TINY, checkpointing=False).full(**{**_SMALL, "vocab_size": 151_936}),
    "small_wide_vocabulary_fused": Llm(_TINY, checkpointing=False).full(
        LossPath.FUSED_LINEAR, **{**_SMALL, "vocab_size": 151_936}
    ),
    "roberta_full": encoder("FacebookAI/roberta-large"),
    "opt_1b_lora": Llm("facebook/opt-1.3b", "fp16", checkpointing=False, attention="eager").adapted(
        lora(), LossPath.TRANSFORMERS_UNCAST
    ),
    "llama_7b_full_eager": Llm(_LLAMA_7B, "fp16", checkpointing=False, attention="eager").full(
        LossPath.TRANSFORMERS_4_45
    ),
    "llama_7b_lora": Llm(_LLAMA_7B).adapted(lora("q_proj", "v_proj")),
    "llama_7b_lora_fp32_base": Llm(_LLAMA_7B, "fp32", autocast="bf16").adapted(lora("q_proj", "v_proj")),
    "llama_7b_lora_kept": Llm(_LLAMA_7B, checkpointing=False).adapted(lora("q_proj", "v_proj")),
    "llama_1b_eager": Llm("meta-llama/Llama-3.2-1B", attention="eager", checkpointing=False).full(),
    "llama_1b_sdpa": Llm("meta-llama/Llama-3.2-1B", attention="sdpa", checkpointing=False).full(),
}
STRUCTURES["roberta_lora"] = STRUCTURES["roberta_full"].model_copy(
    update={"adapter": {**lora("query", "value", dropout=0.1), "task_type": "SEQ_CLS"}, "has_rank": True}
)
