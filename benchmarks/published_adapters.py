"""The peft configuration of a published row, from its method, targets and the name of its experiment."""

import re

from pydantic import JsonValue

from benchmarks.published_cells import NotPriced, Row, whole
from orchestrator.contract.profile import TraceRequest
from orchestrator.predict.job import EngineKind

Config = dict[str, JsonValue]

_LINEAR_NAMES = {
    "query": ("q_proj",),
    "q": ("q_proj",),
    "k": ("k_proj",),
    "value": ("v_proj",),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "gate": ("gate_proj",),
    "up": ("up_proj",),
    "down": ("down_proj",),
    "output_proj": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "c_proj": ("o_proj", "down_proj"),
    "w1": ("gate_proj",),
    "w2": ("up_proj",),
    "wte": ("embed_tokens",),
}
"""Names that sources use for the linear layers of a Llama-like block. `c_attn`, `c_proj`, `w1` and `w2` are those of
Qwen's first generation (`modeling_qwen.py`), whose native equal has the query, key and value weights apart."""

_FUSED_ATTENTION = {"gpt2", "gpt_bigcode", "gpt_neox", "falcon", "bloom", "mpt"}
"""Model types whose modules bear names of their own, so that a row's names are taken as they are."""

_ALL_LINEAR = re.compile(r"^(all|all[- ]linear|\*_proj)\b|\(all linear\)", re.IGNORECASE)


def lora_targets(cell: str, model_type: str, default: tuple[str, ...] | None) -> tuple[str, ...] | str:
    """Module names, or `all-linear`. Raises NotPriced when the row names none and its source has no default."""
    text = cell.split(" + ")[0].strip()
    if "(DEFAULT)" in text and default is not None:
        return default
    if _ALL_LINEAR.search(text):
        return "all-linear"
    words = re.sub(r"\([^)]*\)", "", text).split()
    if not words:
        if default is None:
            raise NotPriced("lora_targets not stated")
        return default
    if model_type in _FUSED_ATTENTION:
        return tuple(words)
    return tuple(dict.fromkeys(name for word in words for name in _LINEAR_NAMES.get(word, (word,))))


def lora(row: Row, model_type: str, default_targets: tuple[str, ...] | None, dropout: float) -> Config:
    """Plain LoRA and its variants that the experiment's name tells; the rank is left to the point."""
    cell = row["lora_targets"]
    targets = lora_targets(cell, model_type, default_targets)
    config: Config = {"peft_type": "LORA", "lora_dropout": dropout}
    config["target_modules"] = targets if isinstance(targets, str) else list(targets)
    if "fully trained" in cell:
        names = [name for word in cell.split(" + ")[1].split() for name in _LINEAR_NAMES.get(word, (word,))]
        config["modules_to_save"] = [name for name in names if name in ("embed_tokens", "lm_head")]
    return config | _variant("LORA", experiment(row))


_EXPERIMENT = re.compile(r"^[a-z0-9_]+/[^;\s]+")


def experiment(row: Row) -> str:
    """The experiment's name at the head of the notes, such as `lora/llama-3.2-3B-rank32-dora`; empty without one."""
    match = _EXPERIMENT.match(row.get("notes", ""))
    return "" if match is None else match[0]


_WITHOUT_RANK = {"ADAPTION_PROMPT", "IA3", "LN_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "OSF", "BOFT"}
_PROMPTS = {"PREFIX_TUNING": 200, "PROMPT_TUNING": 200, "P_TUNING": 20}

_METHOD_SETTINGS: dict[str, Config] = {
    "ADALORA": {"init_r": 64, "target_r": 32, "tinit": 200, "tfinal": 500, "total_step": 5000},
    "ADAMSS": {"num_subspaces": 32, "r": 100},
    "ADAPTION_PROMPT": {"adapter_layers": 28, "adapter_len": 100},
    "C3A": {"block_size": 64},
    "FOURIERFT": {"scaling": 300},
    "OFT": {"oft_block_size": 0},
    "LILY": {"stride_A": 14},
    "PSOFT": {"psoft_alpha": 256},
    "ROAD": {"variant": "road_2"},
    "TRAINABLE_TOKENS": {"token_indices": [128000, 128001]},
    "FROD": {"runtime_offload_base_weight": True},
}
"""Settings of huggingface/peft `method_comparison/MetaMathQA/experiments/*/*/adapter_config.json` at 5d602fd that
differ from peft's defaults and change sizes."""

_VARIANTS: tuple[tuple[str, str, Config], ...] = (
    ("LORA", "dora", {"use_dora": True}),
    ("LORA", "rslora", {"use_rslora": True}),
    ("LORA", "mica", {"init_lora_weights": "mica"}),
    (
        "LORA",
        "bdlora",
        {
            "use_bdlora": {
                "target_modules_bd_a": ["o_proj", "down_proj"],
                "target_modules_bd_b": ["q_proj", "v_proj", "k_proj", "up_proj", "gate_proj"],
                "nblocks": 2,
            }
        },
    ),
    ("MISS", "bat", {"init_weights": "bat"}),
    ("MISS", "mini", {"init_weights": "mini", "mini_r": 64}),
    ("DEFT", "para", {"para": True, "decomposition_method": "qr"}),
    ("FOURIERFT", "n_frequency-5000", {"n_frequency": 5000}),
    ("WAVEFT", "n_frequency-5000", {"n_frequency": 5000}),
    ("FROD", "sparse0.02", {"sparse_rate": 0.02}),
    ("GLORA", "vector-paths", {"config_A_B": "vector", "config_C": "vector"}),
    ("PREFIX_TUNING", "tokens50", {"num_virtual_tokens": 50}),
    ("PSOFT", "fast", {"psoft_svd": "lowrank", "use_cayley_neumann": True}),
    ("TINYLORA", "weight-tying", {"weight_tying": 1.0}),
    ("LOKR", "factor4", {"decompose_factor": 4}),
    ("IA3", "all-attn", {"feedforward_modules": ["down_proj", "gate_proj", "up_proj"]}),
)
"""Method, a word of the experiment's name, and what it sets (same files)."""


def _variant(kind: str, name: str) -> Config:
    found: Config = {}
    for method, word, settings in _VARIANTS:
        if method == kind and re.search(rf"[-_/]{re.escape(word)}(-|$)", name):
            found |= settings
    return found


_TARGETS_OF_THEIR_OWN = {"ADAPTION_PROMPT", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "TRAINABLE_TOKENS"}


def other_method(row: Row) -> Config:
    """The configuration of a `peft:NAME` row, its rank among the arguments."""
    kind = row["method"].removeprefix("peft:").upper()
    if kind in ("ADAPTER", "ADAPTER_V2", "LLAMAPRO"):
        raise NotPriced("its own model code is not traced")
    config: Config = {"peft_type": kind}
    if kind not in _TARGETS_OF_THEIR_OWN:
        config["target_modules"] = list(row["lora_targets"].split())
    rank = whole(row, "lora_rank")
    if rank is not None and kind not in _WITHOUT_RANK:
        config["r"] = rank
    if kind in _PROMPTS:
        config["num_virtual_tokens"] = _PROMPTS[kind]
    if kind == "OSF":
        config["rank_pattern"] = {
            name: 896 if name in ("k_proj", "v_proj") else 2944 for name in row["lora_targets"].split()
        }
    config |= _METHOD_SETTINGS.get(kind, {}) | _variant(kind, experiment(row))
    if kind == "ADALORA":
        del config["r"]
    return config


_FUSED_ADAPTERS = re.compile(r"framework_config=accelerated-peft-\S*foak")
"""fms-acceleration's fast kernels fuse LoRA where the base is quantised (`fast_quantized_peft.yaml`), not beside a
dense one (`fast_kernels.yaml`; both in plugins/fused-ops-and-kernels/configs)."""


def as_computed(row: Row, request: TraceRequest, engine: EngineKind) -> TraceRequest:
    """The structure whose kernels run, where it is not the one whose storages are held.

    Fused adapters compute in the input's type. peft casts an adapter's input to the type of its weight
    (`peft/tuners/lora/layer.py`, `_cast_input_dtype`), which under FSDP is still the float32 shard then: each adapter's
    weight is a unit of its own (`fsdp_auto_wrap_policy`), gathered in half precision after that.
    """
    if request.adapter is None or request.autocast is None:
        return request
    if _FUSED_ADAPTERS.search(row.get("notes", "")):
        return request.model_copy(update={"adapter_dtype": request.autocast})
    return request.model_copy(update={"adapter_dtype": None}) if engine == "fsdp" else request
