"""From a trial's configuration to what has to be traced and priced for it."""

from typing import Literal

from pydantic import JsonValue

from orchestrator.contract.config import Method, Offload, Precision, TrialConfig
from orchestrator.contract.profile import Dtype, Point, TraceRequest
from orchestrator.predict.job import Job, OffloadDevice

_DTYPES: dict[Precision, Dtype] = {Precision.FP32: "fp32", Precision.BF16: "bf16"}


def trace_request(config: TrialConfig, device: Literal["cuda", "cpu"], is_padded: bool = False) -> TraceRequest:
    """The structure of a trial, as `orchestrator.trial.model` builds it. Trials that differ in sizes alone share it."""
    knobs = config.knobs
    adapter: dict[str, JsonValue] | None = None
    adapter_dtype: Dtype | None = None
    if knobs.method is Method.LORA:
        targets: JsonValue = (
            knobs.lora_targets if isinstance(knobs.lora_targets, str) else list(knobs.lora_targets or ())
        )
        adapter = {"target_modules": targets, "lora_dropout": config.train.lora_dropout}
        # DeepSpeed casts peft's float32 adapters to the weights' type, but not where weights were born in shards
        adapter_dtype = "fp32" if knobs.zero_stage == 3 else _DTYPES[knobs.precision]
    return TraceRequest(
        model=config.model.model_copy(update={"weights": "random"}),
        device=device,
        dtype=_DTYPES[knobs.precision],
        adapter=adapter,
        adapter_dtype=adapter_dtype,
        gradient_checkpointing=knobs.gradient_checkpointing,
        attention=knobs.attention.value,
        is_padded=is_padded,
        beyond_window=_is_beyond_window(config),
    )


def _is_beyond_window(config: TrialConfig) -> bool:
    """Whether rows are longer than the window of a model whose configuration is written down."""
    values = config.model.config or {}
    window = values.get("sliding_window") or values.get("attention_chunk_size")
    return isinstance(window, int) and config.data.sequence_length > window


def job_of(
    config: TrialConfig, device: Literal["cuda", "cpu"], row_tokens: int | None = None, ranks_on_node: int | None = None
) -> Job:
    """The run of a trial. `row_tokens`: of the longest row that the data has (None: the sequence length);
    `ranks_on_node` (None: all on one)."""
    knobs = config.knobs
    sizes = {
        name: value
        for name in (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "overlap_comm",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "sub_group_size",
        )
        if (value := getattr(knobs, name)) is not None
    }
    return Job(
        point=Point(knobs.micro_batch, row_tokens or config.data.sequence_length, knobs.lora_rank or 0),
        world_size=config.world_size,
        ranks_on_node=ranks_on_node or config.world_size,
        gradient_accumulation=config.gradient_accumulation,
        engine="deepspeed",
        zero_stage=knobs.zero_stage,
        offload_optimizer=_offload(knobs.offload_optimizer),
        offload_param=_offload(knobs.offload_param),
        pin_memory=device == "cuda",
        optimizer=knobs.optimizer.value,
        optimizer_loop="fused",
        master_dtype="fp32",
        **sizes,
    )


def _offload(offload: Offload | None) -> OffloadDevice:
    return "cpu" if offload is Offload.CPU else "none"
