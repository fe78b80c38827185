"""A run to be priced: where the profile's laws are evaluated, and the engine around the model."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.contract.profile import Dtype, Point

EngineKind = Literal["deepspeed", "torch", "fsdp"]
"""`torch`: a plain loop, with DistributedDataParallel on several ranks. `fsdp`: full shard, one unit a layer."""
OffloadDevice = Literal["none", "cpu", "nvme"]
OptimizerRule = Literal["adamw", "sgd", "adafactor", "adamw_8bit"]
OptimizerLoop = Literal["fused", "foreach", "for_loop"]
"""How the update walks over the weights: `foreach` holds a temporary of all of them, `fused` none."""


@dataclass(frozen=True)
class Job:
    """One run. Bucket sizes and thresholds are in elements, as in DeepSpeed's configuration."""

    point: Point
    world_size: int = 1
    ranks_on_node: int = 1
    gradient_accumulation: int = 1
    engine: EngineKind = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: OffloadDevice = "none"
    offload_param: OffloadDevice = "none"
    pin_memory: bool = True
    optimizer: OptimizerRule = "adamw"
    optimizer_loop: OptimizerLoop = "fused"
    master_dtype: Dtype | None = "fp32"
    """Of the copy that the optimizer updates; None: the weights themselves are updated, states in their dtype."""
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    """None: DeepSpeed's default, on in stage 3 only."""
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000
    loads_sharded: bool = True
    """Under stage 3 and FSDP: weights are born in shards, not as a whole copy on every rank."""
    quantised_storage: Literal["model", "uint8"] = "model"
    """Element type of packed quantised weights (`bnb_4bit_quant_storage`): the model's 16-bit one, or bitsandbytes'
    default, which stage 3 and FSDP leave whole on every rank."""
    expandable_segments: bool = False
    """The caching allocator's `expandable_segments` setting."""
