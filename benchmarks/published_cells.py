"""What a single cell of a table of published measurements means."""

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.config import Checkpointing
from orchestrator.contract.profile import Dtype, Quantization
from orchestrator.predict.job import EngineKind, OffloadDevice, OptimizerLoop, OptimizerRule

Row = dict[str, str]
"""One row of the table by the names of its columns; an empty cell means that the source does not state it."""


class NotPriced(Exception):
    """The row cannot be predicted; the message says why, in words that many rows share."""


def number(row: Row, column: str) -> float | None:
    """The figure in a cell; None when it is empty. Raises NotPriced when it is no number."""
    cell = row.get(column, "").strip()
    if not cell:
        return None
    try:
        return float(cell)
    except ValueError as error:
        raise NotPriced(f"{column} is not a number") from error


def whole(row: Row, column: str) -> int | None:
    """The count in a cell; None when it is empty."""
    found = number(row, column)
    return None if found is None else round(found)


@dataclass(frozen=True)
class Versions:
    """Library versions as (major, minor); None: not stated."""

    torch: tuple[int, int] | None = None
    transformers: tuple[int, int] | None = None


def stated_versions(notes: str) -> Versions:
    """Versions written in the notes, such as `torch 2.13.0+cu130, transformers 5.13.1`."""
    found = {}
    for library in ("torch", "transformers"):
        match = re.search(rf"\b{library}[ =]+v?(\d+)\.(\d+)", notes)
        found[library] = None if match is None else (int(match[1]), int(match[2]))
    return Versions(**found)


@dataclass(frozen=True)
class Numbers:
    """The dtypes of a run. `is_mixed`: the step computes under autocast or an engine's mixed precision."""

    weights: Dtype
    compute: Dtype
    is_mixed: bool
    adapters: Dtype | None = None


def precision(cell: str) -> Numbers:
    """`bf16-pure` and `bf16-true`: weights, computation and optimizer in bfloat16. `bf16-amp` and `bf16-mixed`:
    computation in bfloat16 under mixed precision; the weights are float32 unless the row's framework loads them in
    half precision. `bf16` alone leaves to the engine what it means. An empty cell is read as `bf16`."""
    text = cell.strip().lower() or "bf16"
    if text.startswith("fp32"):
        return Numbers("fp32", "fp32", is_mixed=False)
    match = re.match(r"(bf16|fp16|mixed)", text)
    if match is None:
        raise NotPriced(f"precision {cell} is not priced")
    half: Dtype = "fp16" if match[1] == "fp16" and "/bf16" not in text else "bf16"
    adapters: Dtype | None = "fp32" if "fp32 adapters" in text else None
    if "pure" in text or "true" in text:
        return Numbers(half, half, is_mixed=False, adapters="bf16" if "true" in text else None)
    if "amp" in text or "-mixed" in text or "fp32 master" in text:
        return Numbers("fp32", half, is_mixed=True)
    return Numbers(half, half, is_mixed=False, adapters=adapters)


@dataclass(frozen=True)
class Engine:
    """Who drives the ranks. `splits_layers`: consecutive layers lie on different devices (a naive device map)."""

    kind: EngineKind
    zero_stage: Literal[0, 1, 2, 3] = 0
    splits_layers: bool = False


_ZERO_STAGES: dict[str, Literal[0, 1, 2, 3]] = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_FULL_SHARD = re.compile(r"fsdp(\((full_shard|zero3)[^)]*\))?")


def parallelism(cell: str) -> Engine:
    """Raises NotPriced for tensor, pipeline, context and sequence parallelism, and for shardings other than full."""
    text = cell.strip().lower()
    if text in ("single", "ddp"):
        return Engine("torch")
    if text in _ZERO_STAGES:
        return Engine("deepspeed", _ZERO_STAGES[text])
    if _FULL_SHARD.fullmatch(text):
        return Engine("fsdp")
    if text.startswith("device_map"):
        return Engine("torch", splits_layers=True)
    raise NotPriced(f"engine not priced: {re.split(r'[,(]', text)[0].strip() or 'not stated'}")


@dataclass(frozen=True)
class Offload:
    """Where DeepSpeed keeps optimizer states and weights."""

    optimizer: OffloadDevice = "none"
    param: OffloadDevice = "none"


def offload(cell: str, engine: Engine) -> Offload:
    """`optimizer cpu`, `cpu params` and the like under DeepSpeed. Raises NotPriced elsewhere and for activations."""
    text = cell.strip().lower()
    if text in ("", "none"):
        return Offload()
    if "activations" in text:
        raise NotPriced("activations offloaded to the host are not priced")
    if engine.kind != "deepspeed":
        raise NotPriced(f"offload under {engine.kind} is not priced")
    return Offload("cpu" if "optimizer" in text else "none", "cpu" if "param" in text else "none")


def checkpointing(cell: str) -> Checkpointing:
    """`full` and one checkpoint a block are the same; an empty cell is none. Raises NotPriced for selective ones."""
    text = cell.strip().lower()
    if text.startswith(("full", "per-block")):
        return Checkpointing.FULL
    if text in ("", "none"):
        return Checkpointing.NONE
    raise NotPriced(f"checkpointing not priced: {text.split(' (')[0]}")


def attention(cell: str) -> Literal["eager", "sdpa", "flash_attention_2"]:
    """Any version of flash attention keeps the same tensors; an empty cell is read as sdpa."""
    text = cell.strip().lower()
    if text.startswith("eager"):
        return "eager"
    if text.startswith("flash") or "(flash)" in text:
        return "flash_attention_2"
    if text == "" or "sdpa" in text:
        return "sdpa"
    raise NotPriced(f"attention not priced: {text}")


@dataclass(frozen=True)
class Optimizer:
    """The update rule and how it walks over the weights."""

    rule: OptimizerRule
    loop: OptimizerLoop


_FUSED_BY_DEFAULT_SINCE_TORCH = (2, 8)
"""transformers' `adamw_torch` default became `adamw_torch_fused` from torch 2.8 on (`training_args.py`)."""
_FOREACH_BY_DEFAULT_SINCE_TORCH = (2, 0)
"""`torch/optim/adam.py`: `foreach` is the default on CUDA since torch 2.0."""


def optimizer(cell: str, versions: Versions) -> Optimizer:
    """Raises NotPriced for paged and 4-bit states, optimizers in the backward pass and rules that are not priced."""
    text = cell.strip().lower()
    if "paged" in text or "in-backward" in text or "4bit" in text:
        raise NotPriced(f"optimizer not priced: {text.split(' (')[0]}")
    if "8bit" in text:
        return Optimizer("adamw_8bit", "for_loop")
    if "adafactor" in text:
        return Optimizer("adafactor", "for_loop")
    if "anyprecision" in text:
        return Optimizer("adamw", "for_loop")
    if text and "adam" not in text and text != "lora-fa":
        raise NotPriced(f"optimizer not priced: {text}")
    return Optimizer("adamw", _loop(text, versions))


def _loop(text: str, versions: Versions) -> OptimizerLoop:
    torch = versions.torch or _FOREACH_BY_DEFAULT_SINCE_TORCH
    is_trainers_default = text in ("", "adamw_torch (default)")
    if "fused" in text or (is_trainers_default and torch >= _FUSED_BY_DEFAULT_SINCE_TORCH):
        return "fused"
    return "foreach" if torch >= _FOREACH_BY_DEFAULT_SINCE_TORCH else "for_loop"


def quantization(row: Row) -> Quantization:
    """How the frozen weights are stored, by method, model and notes. bitsandbytes' NF4 is read as double quantised,
    as QLoRA's authors and the fine-tuning frameworks set it, unless the notes say `bnb.nf4` alone."""
    words = " ".join(row.get(column, "") for column in ("method", "model", "notes", "precision")).lower()
    if "qlora" not in row["method"] and "int8" not in row["method"]:
        return Quantization.NONE
    if "gptq" in words or "-int4" in words or "gptqmodel" in words:
        return Quantization.INT8 if "int8" in words else Quantization.INT4
    if "int8" in words:
        return Quantization.INT8
    if "bnb.nf4" in words and "nf4-dq" not in words:
        return Quantization.NF4
    return Quantization.NF4_DOUBLE


_IS_PADDED = ("padded", "truncated")
_IS_FULL = ("packed", "padding-free", "full length", "packed blocks", "fixed length", "concatenated")


def is_padded(row: Row, micro_batch: int) -> bool:
    """Whether rows of a batch differ in length, so that an attention mask takes part."""
    text = row.get("packed", "").lower()
    if text.startswith("truncated"):
        return micro_batch > 1
    if any(word in text for word in _IS_FULL) or text.startswith("unpadded"):
        return False
    return micro_batch > 1 and text.startswith(_IS_PADDED)


def is_full_length(row: Row) -> bool:
    """Whether every row has `seq_len` tokens, so that samples and steps can be counted in tokens."""
    text = row.get("packed", "").lower()
    is_full = any(word in text for word in _IS_FULL) or "padded to max" in text or "max len" in text
    return is_full and not has_lengths(row)


def has_lengths(row: Row) -> bool:
    """Whether batches differ in length from step to step."""
    return row.get("packed", "").lower().startswith("truncated")
