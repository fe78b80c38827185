"""One fully resolved trial: all that the trial plane needs to know, and its identity."""

import hashlib
import json
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Frozen(BaseModel):
    """Immutable, refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Method(StrEnum):
    """What is trained: all weights, or low-rank adapters on frozen weights."""

    FULL = "full"
    LORA = "lora"


class Offload(StrEnum):
    """Where a state lives between uses."""

    NONE = "none"
    CPU = "cpu"


class Checkpointing(StrEnum):
    """Which activations are recomputed in the backward pass."""

    NONE = "none"
    FULL = "full"


class Precision(StrEnum):
    """`bf16`: weights and compute in bfloat16, fp32 masters held by DeepSpeed."""

    FP32 = "fp32"
    BF16 = "bf16"


class Attention(StrEnum):
    """transformers' `attn_implementation`."""

    EAGER = "eager"
    SDPA = "sdpa"


class Optimizer(StrEnum):
    """The optimizer's update rule."""

    ADAMW = "adamw"
    SGD = "sgd"


class Knobs(Frozen):
    """A point of the search space in canonical form: a knob that has no effect beside the others is None.

    `orchestrator.space.knobs` declares what each knob means and when it has an effect. Bucket sizes and thresholds
    are counts of elements, as in DeepSpeed's configuration.
    """

    method: Method
    lora_rank: int | None = Field(default=None, ge=1)
    lora_targets: tuple[str, ...] | Literal["all-linear"] | None = None
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    gradient_checkpointing: Checkpointing = Checkpointing.NONE
    micro_batch: int = Field(ge=1)
    precision: Precision = Precision.FP32
    attention: Attention = Attention.SDPA
    optimizer: Optimizer = Optimizer.ADAMW
    reduce_bucket_size: int | None = Field(default=None, ge=1)
    allgather_bucket_size: int | None = Field(default=None, ge=1)
    overlap_comm: bool | None = None
    stage3_max_live_parameters: int | None = Field(default=None, ge=0)
    stage3_max_reuse_distance: int | None = Field(default=None, ge=0)
    stage3_prefetch_bucket_size: int | None = Field(default=None, ge=0)
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0)
    sub_group_size: int | None = Field(default=None, ge=1)


class ModelSource(Frozen):
    """Where the model comes from: exactly one of `config` (a transformers config as written in a config.json),
    `path` (absolute: a config.json or a checkpoint folder) and `id` (of the hub)."""

    config: dict[str, JsonValue] | None = None
    path: str | None = None
    id: str | None = None
    revision: str | None = None
    weights: Literal["random", "pretrained"] = "random"
    trust_remote_code: bool = False


class DataSource(Frozen):
    """Prepared training rows: token ids in `directory` (see `orchestrator.trial.data`).

    `digest` is the hash of the rows' content, the tokenizer and the settings that shaped them.
    """

    directory: str
    digest: str
    sequence_length: int = Field(ge=2)
    packing: bool = False


class TrainSettings(Frozen):
    """Training settings that stay the same over a sweep. `global_batch` counts rows per optimizer step, all ranks."""

    global_batch: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clipping: float = Field(default=1.0, ge=0)
    lora_alpha: int | None = Field(default=None, ge=1)
    """None: twice the rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    seed: int = 0


class Limits(Frozen):
    """Bytes that a trial may use. `device_memory_bytes` holds for each rank's device, `host_memory_bytes` for a node.

    A trial that runs but leaves less than `headroom_bytes` of its device is `over_limit`.
    """

    device_memory_bytes: int | None = Field(default=None, gt=0)
    host_memory_bytes: int | None = Field(default=None, gt=0)
    headroom_bytes: int = Field(default=0, ge=0)


class QualitySettings(Frozen):
    """After measuring speed, how long a trial trains from its first weights and on how many rows its loss is taken.

    Every candidate of a sweep trains on the same rows in the same order: whole optimizer steps until `train_tokens`
    non-padding tokens of all ranks are used up.
    """

    train_tokens: int = Field(ge=1)
    eval_rows: int = Field(default=32, ge=1)
    """Rows of the data that are held out and never trained on."""


class MeasureSettings(Frozen):
    """How long a trial measures. Steps are optimizer steps over the whole global batch."""

    warmup_steps: int = Field(default=1, ge=0)
    min_steps: int = Field(default=3, ge=2)
    max_steps: int = Field(default=20, ge=2)
    relative_precision: float = Field(default=0.02, gt=0, lt=1)
    """Measuring ends when the 95 % confidence interval of tokens/s is within this fraction of the mean."""
    max_measure_s: float = Field(default=120.0, gt=0)
    step_timeout_s: float = Field(default=300.0, gt=0)
    """A rank that shows no progress for this long is `hang`."""
    trial_timeout_s: float = Field(default=1800.0, gt=0)
    quality: QualitySettings | None = None
    """None: the loss on held-out rows is not measured."""


NOT_IDENTITY: dict[str, bool | dict[str, bool]] = {
    "data": {"directory": True},
    "measure": True,
    "version": True,
    "beat_tokens_per_second": True,
}
"""Parts of a `TrialConfig` that do not change what is run."""


class Layout(NamedTuple):
    """How many ranks a trial has, and over how many nodes they are spread alike; None: over as few as hold them."""

    world_size: int
    nodes: int | None = None


class TrialConfig(Frozen):
    """Everything that the trial plane needs to run one trial on `world_size` ranks."""

    version: Literal[1] = 1
    knobs: Knobs
    model: ModelSource
    data: DataSource
    train: TrainSettings
    limits: Limits = Limits()
    measure: MeasureSettings = MeasureSettings()
    world_size: int = Field(ge=1)
    nodes: int | None = Field(default=None, ge=1)
    """See `Layout`."""
    gradient_accumulation: int = Field(ge=1)
    """`global_batch == micro_batch * gradient_accumulation * world_size`, exactly."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = Field(default=1, ge=1)
    beat_tokens_per_second: float | None = Field(default=None, gt=0)
    """Measuring ends as soon as the trial is surely slower than this; None: it never ends for that."""

    @property
    def candidate(self) -> str:
        """Identity by content: 12 hex digits over all that changes what is run, not where its files lie."""
        return content_hash(self.identity())

    @property
    def layout(self) -> Layout:
        """What its ranks need."""
        return Layout(self.world_size, self.nodes)

    def identity(self) -> dict[str, JsonValue]:
        """All that changes what is run. Nodes that nobody asked for are left out, so that candidates keep the ids that
        they had before a trial could ask for nodes."""
        content: dict[str, JsonValue] = self.model_dump(mode="json", exclude=NOT_IDENTITY)
        if self.nodes is None:
            del content["nodes"]
        return content


def content_hash(content: JsonValue) -> str:
    """12 hex digits of the SHA-256 of `content` in canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
