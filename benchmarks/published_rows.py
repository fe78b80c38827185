"""A row of published measurements as a run that can be predicted, or the reason why it cannot."""

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from benchmarks import published_cells as cells
from benchmarks.published_adapters import as_computed, lora, other_method
from benchmarks.published_cells import NotPriced, Row, Versions
from benchmarks.published_devices import Card, card
from benchmarks.published_measured import Measured, OutcomeOfRow, measured, outcome_of
from benchmarks.published_shapes import Shape, shape
from benchmarks.published_sources import Conventions, conventions
from orchestrator.contract.config import Checkpointing, ModelSource
from orchestrator.contract.profile import Dtype, Kernels, LossPath, Point, Quantization, TraceRequest
from orchestrator.predict.job import Job

TIERS = ("A", "B")
"""C rows are approximate and D rows are not to be scored."""


@dataclass(frozen=True)
class PublishedRun:
    """One row, ready to be predicted.

    `splits_layers`: consecutive layers lie on different ones of `devices`; only the outcome of such a row is compared.
    `shortest_tokens` is below the point's sequence where the row states a cap that its batches stay under;
    `mean_tokens` is then the mean length of its rows. `is_boundary`: the row states the longest sequence that fits, not
    one that was seen to fit with room to spare.
    """

    id: str
    source: str
    tier: str
    request: TraceRequest
    clock_request: TraceRequest
    job: Job
    card: Card
    devices: int
    splits_layers: bool
    shortest_tokens: int
    mean_tokens: int
    lengths_vary: bool
    is_boundary: bool
    trained_numel: int | None
    measured: Measured


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored, and why."""

    id: str
    source: str
    tier: str
    outcome: OutcomeOfRow
    reason: str


def source_of(row: Row) -> str:
    """The row's group: its id without the number at the end."""
    return re.sub(r"-\d+$", "", row["id"])


def interpret(row: Row) -> PublishedRun | Skipped:
    """The run of `row`, or the reason why it is not predicted."""
    try:
        return _run(row)
    except NotPriced as error:
        return Skipped(row["id"], source_of(row), row["tier"], outcome_of(row), str(error))


def _run(row: Row) -> PublishedRun:
    if row["tier"] not in TIERS:
        raise NotPriced(f"tier {row['tier']}")
    habits = conventions(row)
    if habits.unpriced is not None:
        raise NotPriced(habits.unpriced)
    if re.match("unsloth", row.get("notes", ""), re.IGNORECASE):
        raise NotPriced("unsloth's own kernels are not traced")
    if row.get("compile", "") == "yes":
        raise NotPriced("torch.compile is not traced")
    engine = cells.parallelism(row["parallelism"])
    numbers = _numbers(row, engine, habits)
    model = shape(row["model"])
    point, shortest_tokens = _point(row, model)
    request = _request(row, model, point, numbers, habits)
    return PublishedRun(
        id=row["id"],
        source=source_of(row),
        tier=row["tier"],
        request=request,
        clock_request=as_computed(row, request, engine.kind),
        job=_job(row, request, point, engine, numbers, habits),
        card=card(row["gpu"], cells.whole(row, "gpu_gb") or habits.gpu_gb),
        devices=cells.whole(row, "n_gpus") or 1,
        splits_layers=engine.splits_layers,
        shortest_tokens=shortest_tokens,
        mean_tokens=_mean_tokens(row, point) if shortest_tokens < point.sequence_tokens else point.sequence_tokens,
        lengths_vary=cells.has_lengths(row),
        is_boundary="boundary" in row.get("notes", ""),
        trained_numel=_stated_trained(row),
        measured=measured(row, point, is_whole=not engine.splits_layers),
    )


def _versions(row: Row, habits: Conventions) -> Versions:
    stated = cells.stated_versions(row.get("notes", ""))
    return Versions(stated.torch or habits.versions.torch, stated.transformers or habits.versions.transformers)


def _numbers(row: Row, engine: cells.Engine, habits: Conventions) -> cells.Numbers:
    """The row's dtypes once its engine and its source's habits are known."""
    numbers = cells.precision(row["precision"])
    if engine.kind == "deepspeed" and numbers.compute != "fp32":
        return cells.Numbers(numbers.compute, numbers.compute, is_mixed=False, adapters=numbers.adapters)
    is_alone = re.fullmatch(r"|bf16|fp16|fp16/bf16", row["precision"].strip()) is not None
    is_quantised = cells.quantization(row) is not Quantization.NONE
    is_mixed = numbers.is_mixed or (is_alone and habits.autocasts) or (is_quantised and habits.quantised_autocasts)
    if not is_mixed or numbers.compute == "fp32":
        return numbers
    has_half_weights = habits.half_weights if habits.half_weights is not None else is_alone
    weights = numbers.compute if has_half_weights or is_quantised else "fp32"
    return cells.Numbers(weights, numbers.compute, is_mixed=True, adapters=numbers.adapters)


_SHORTEST_OF_CAP = 0.8
"""Where a row's length is a cap that the source's batches stay under, its longest batch is taken to be between this
share of the cap and the cap."""


def _point(row: Row, model: Shape) -> tuple[Point, int]:
    micro_batch = cells.whole(row, "micro_batch") or 1
    sequence = cells.whole(row, "seq_len")
    if sequence is None and "any length" in row.get("notes", ""):
        sequence = _SHORTEST_USEFUL_TOKENS
    if sequence is None:
        raise NotPriced("seq_len not stated")
    is_cap = "cap" in row.get("notes", "") and "padded to longest" in row.get("packed", "")
    shortest = round(sequence * _SHORTEST_OF_CAP) if is_cap else sequence
    rank = cells.whole(row, "lora_rank") if _is_lora(row) else 0
    if rank is None:
        raise NotPriced("lora_rank not stated")
    return Point(micro_batch, sequence, rank), shortest


_SHORTEST_USEFUL_TOKENS = 16
"""Of a row whose notes say that no length fits."""


def _is_lora(row: Row) -> bool:
    return row["method"].startswith(("lora", "qlora"))


def _request(
    row: Row, model: Shape, point: Point, numbers: cells.Numbers, habits: Conventions
) -> TraceRequest:  # fmt: skip
    method = row["method"]
    adapter: dict[str, JsonValue] | None = None
    if _is_lora(row):
        adapter = lora(row, model.model_type, habits.default_targets, habits.lora_dropout)
    elif method.startswith("peft:"):
        adapter = other_method(row)
    elif not method.startswith("full"):
        raise NotPriced(f"method not priced: {method.split(' ')[0]}")
    quantization = cells.quantization(row)
    half: Literal["bf16", "fp16"] = "fp16" if numbers.compute == "fp16" else "bf16"
    versions = _versions(row, habits)
    is_padded = cells.is_padded(row, point.micro_batch)
    return TraceRequest(
        model=ModelSource(config=model.config),
        task=model.task,
        dtype=numbers.weights,
        autocast=half if numbers.is_mixed else None,
        adapter=adapter,
        adapter_dtype=_adapter_dtype(adapter, numbers, row),
        has_rank=_is_lora(row),
        quantization=quantization,
        kbit_preparation=_casts_for_kbit(row, quantization, habits),
        kbit_norms_only=habits.casts_back and _casts_for_kbit(row, quantization, habits),
        gradient_checkpointing=cells.checkpointing(row["grad_ckpt"]),
        use_reentrant=_is_reentrant(row, versions, habits),
        attention=cells.attention(row["attention"]),
        is_padded=is_padded,
        loss=_loss(row, model, versions),
        kernels=_kernels(row),
        keeps_outputs=habits.keeps_outputs,
        beyond_window=model.window_tokens is not None and point.sequence_tokens > model.window_tokens,
    )


def _adapter_dtype(adapter: dict[str, JsonValue] | None, numbers: cells.Numbers, row: Row) -> Dtype | None:
    """DeepSpeed casts adapters with all other weights, but not in a model that stage 3 built in shards; FSDP with mixed
    precision computes with them in half precision. Else they are as peft makes them."""
    if adapter is None:
        return None
    engine = cells.parallelism(row["parallelism"])
    is_cast = engine.kind == "deepspeed" and engine.zero_stage < _BUILDS_IN_SHARDS and numbers.compute != "fp32"
    if is_cast or (engine.kind == "fsdp" and numbers.is_mixed):
        return numbers.compute
    return numbers.adapters if numbers.adapters != "fp32" else None


_BUILDS_IN_SHARDS = 3


def _is_reentrant(row: Row, versions: Versions, habits: Conventions) -> bool:
    if cells.checkpointing(row["grad_ckpt"]) is Checkpointing.NONE:
        return False
    if habits.is_reentrant is not None:
        return habits.is_reentrant
    return (versions.transformers or _NOT_REENTRANT_SINCE) < _NOT_REENTRANT_SINCE


_NOT_REENTRANT_SINCE = (5, 0)
"""`gradient_checkpointing_enable` of transformers (`modeling_utils.py`): `use_reentrant` is true by default before."""


def _casts_for_kbit(row: Row, quantization: Quantization, habits: Conventions) -> bool:
    """peft's preparation leaves GPTQ models as they are (`peft/utils/other.py`), TRL leaves it out where the quantised
    weights are sharded (`is_sharded_qlora`)."""
    is_sharded = cells.parallelism(row["parallelism"]).kind == "fsdp"
    if is_sharded or quantization not in (Quantization.NF4, Quantization.NF4_DOUBLE, Quantization.INT8):
        return False
    return habits.casts_for_kbit or "prepare_model_for_kbit_training" in row.get("notes", "")


_LOSS_OF_LOSS_UTILS_SINCE, _UNSHIFTED_LOGITS_SINCE = (4, 46), (4, 49)
"""`loss/loss_utils.py` came with transformers 4.46, before that each model had its own loss; from 4.49 on the labels
are shifted, not the logits (sources of the wheels 4.45.2, 4.48.1, 4.49.0)."""


def _kernels(row: Row) -> Kernels:
    """fms-acceleration's fast kernels fuse norms beside the loss, with Liger's loss as well; Liger-Kernel by itself
    fuses the MLP too."""
    if "foak" in row.get("notes", "") or "in-place" in row.get("fused_ce", ""):
        return Kernels.FUSED_NORMS
    return Kernels.LIGER if "liger" in row.get("fused_ce", "").lower() else Kernels.TRANSFORMERS


_CAST_EVERYWHERE_SINCE = (4, 50)
_UNCAST_BEFORE = {"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "bloom", "opt", "falcon", "mpt", "stablelm"}
"""Architectures whose loss took the logits in the model's dtype before they used `loss/loss_utils.py` (same wheels)."""
_UNCAST_REMOTE = re.compile(r"^Qwen/Qwen-\d")
"""Qwen's first generation: the hub's `modeling_qwen.py` shifts the logits in the model's dtype."""


def _loss(row: Row, model: Shape, versions: Versions) -> LossPath:
    text = row.get("fused_ce", "").lower()
    version = versions.transformers or _CAST_EVERYWHERE_SINCE
    if model.task != "causal_lm":
        return LossPath.TRANSFORMERS
    if "chunked" in text:
        raise NotPriced("loss not priced: chunked cross-entropy")
    if "liger" in text or "fused linear" in text or "cut-cross" in text:
        return LossPath.FUSED_LINEAR
    is_uncast = version < _CAST_EVERYWHERE_SINCE and model.model_type in _UNCAST_BEFORE
    is_uncast = is_uncast or _UNCAST_REMOTE.match(row["model"]) is not None
    if "in-place" in text:
        cast = LossPath.INPLACE_4_45 if version < _LOSS_OF_LOSS_UTILS_SINCE else LossPath.INPLACE_4_48
        return LossPath.INPLACE_UNCAST if is_uncast else cast
    if is_uncast:
        return LossPath.TRANSFORMERS_UNCAST
    if version >= _UNSHIFTED_LOGITS_SINCE:
        return LossPath.TRANSFORMERS
    return LossPath.TRANSFORMERS_4_45 if version < _LOSS_OF_LOSS_UTILS_SINCE else LossPath.TRANSFORMERS_4_48


def _job(
    row: Row, request: TraceRequest, point: Point, engine: cells.Engine, numbers: cells.Numbers, habits: Conventions
) -> Job:  # fmt: skip
    world_size = cells.whole(row, "n_gpus") or 1
    update = cells.optimizer(row["optimizer"], _versions(row, habits))
    away = cells.offload(row["offload"], engine)
    master: Dtype | None = None
    if engine.kind == "deepspeed" and (engine.zero_stage > 0 or numbers.compute != "fp32"):
        master = "fp32"
    elif engine.kind == "fsdp" and numbers.is_mixed:
        # accelerate makes trained flat parameters float32 under mixed precision (`accelerator.py`, prepare_model)
        master = "fp32"
    return Job(
        point=point,
        world_size=1 if engine.splits_layers else world_size,
        ranks_on_node=1 if engine.splits_layers else min(world_size, habits.node_devices),
        gradient_accumulation=cells.whole(row, "grad_accum") or 1,
        engine=engine.kind,
        zero_stage=engine.zero_stage,
        offload_optimizer=away.optimizer,
        offload_param=away.param,
        optimizer=update.rule,
        optimizer_loop=update.loop,
        master_dtype=master,
    )


def _stated_trained(row: Row) -> int | None:
    match = re.search(r"trainable=([\d,]+)", row.get("notes", ""))
    return None if match is None else int(match[1].replace(",", ""))


def _mean_tokens(row: Row, point: Point) -> int:
    """Of a row of the batch: tokens of a step, which are its rate times its duration, over the rows of a step."""
    rate, step_s = cells.number(row, "tokens_per_s_per_gpu"), cells.number(row, "step_time_s")
    if rate is None or step_s is None:
        return point.sequence_tokens
    rows = point.micro_batch * (cells.whole(row, "grad_accum") or 1)
    return min(point.sequence_tokens, max(1, round(rate * step_s / rows)))
