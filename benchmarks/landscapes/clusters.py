"""Clusters, models and knobs of the simulated landscapes, and the configurations that each has."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from orchestrator.spec.hardware import BY_KEY, Device

LORA_RANKS = (4, 16, 64)
BUCKETS = (50_000_000, 200_000_000, 500_000_000)
"""Elements; the last is DeepSpeed's default."""


@dataclass(frozen=True)
class Cluster:
    """A model on devices. `model` is an id of the catalog; `link` between nodes a key of `hardware.BETWEEN_NODES`;
    `host_gib` is the memory of one node; `limit_gib` of one device (None: what it has)."""

    name: str
    model: str
    device_key: str
    nodes: int
    devices_per_node: int
    sequence_tokens: int
    global_sequences: int
    host_gib: int
    methods: tuple[Literal["full", "lora"], ...]
    has_trap: bool = False
    link: str = "infiniband-hdr"
    limit_gib: float | None = None

    @property
    def device(self) -> Device:
        """Its row of the hardware table."""
        return BY_KEY[self.device_key]

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node


CLUSTERS: tuple[Cluster, ...] = (
    Cluster("s01_llama3-8b_2x8xH100", "meta-llama/Meta-Llama-3-8B", "h100-sxm", 2, 8, 4096, 768, 1800,
            ("full", "lora"), link="infiniband-8x400g"),
    Cluster("s02_mistral-7b_8xA100-80", "mistralai/Mistral-7B-v0.1", "a100-80", 1, 8, 2048, 384, 900,
            ("full", "lora"), has_trap=True),
    Cluster("s03_qwen2.5-7b_4x3090_lora", "Qwen/Qwen2.5-7B", "rtx3090", 1, 4, 2048, 192, 128, ("lora",)),
    Cluster("s04_mistral-7b_2xA10", "mistralai/Mistral-7B-v0.1", "a10", 1, 2, 1024, 192, 200, ("full", "lora")),
    Cluster("s05_qwen2.5-1.5b_8xV100-32", "Qwen/Qwen2.5-1.5B", "v100-32", 1, 8, 2048, 384, 480, ("full", "lora"),
            has_trap=True),
    Cluster("s06_tinyllama_1xT4", "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "t4", 1, 1, 1024, 96, 60,
            ("full", "lora")),
    Cluster("s07_llama2-13b_1xH200", "meta-llama/Llama-2-13b-hf", "h200", 1, 1, 2048, 96, 480, ("full", "lora")),
    Cluster("s08_qwen2.5-3b_4xA10G_full", "Qwen/Qwen2.5-3B", "a10g", 1, 4, 2048, 192, 170, ("full",)),
    Cluster("s09_llama2-13b_2x4xL40S_lora", "meta-llama/Llama-2-13b-hf", "l40s", 2, 4, 2048, 192, 370, ("lora",),
            has_trap=True, link="ethernet-25g"),
    Cluster("s10_llama3-8b_8xA100-40_full", "meta-llama/Meta-Llama-3-8B", "a100-40", 1, 8, 2048, 384, 900, ("full",)),
    Cluster("s11_qwen2.5-3b_2x2x4090", "Qwen/Qwen2.5-3B", "rtx4090", 2, 2, 1024, 192, 120, ("full", "lora"),
            link="ethernet-10g"),
    Cluster("s12_mistral-7b_4xH100_limit-48", "mistralai/Mistral-7B-v0.1", "h100-sxm", 1, 4, 4096, 192, 900,
            ("full", "lora"), limit_gib=48.0),
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One candidate. Knobs without an effect have their off value; `reduce_bucket` in elements."""

    method: Literal["full", "lora"]
    lora_rank: int
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Literal["none", "cpu"]
    offload_param: Literal["none", "cpu"]
    gradient_checkpointing: Literal["none", "full"]
    reduce_bucket: int
    micro_batch: int


def configurations(cluster: Cluster) -> Iterator[Configuration]:
    """All that are legal and distinct. The global batch is kept: micro-batches divide a rank's share of it."""
    share = cluster.global_sequences // cluster.ranks
    micro_batches = [size for size in range(1, min(share, 64) + 1) if share % size == 0]
    for method in cluster.methods:
        ranks = LORA_RANKS if method == "lora" else (0,)
        for rank, engine, checkpointing, micro_batch in product(ranks, _engines(), _CHECKPOINTING, micro_batches):
            stage, optimizer, weights, bucket = engine
            yield Configuration(method, rank, stage, optimizer, weights, checkpointing, bucket, micro_batch)


_CHECKPOINTING: tuple[Literal["none", "full"], ...] = ("none", "full")
_Off = Literal["none", "cpu"]


def _engines() -> Iterator[tuple[Literal[0, 1, 2, 3], _Off, _Off, int]]:
    yield 0, "none", "none", BUCKETS[-1]
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    choices: tuple[_Off, ...] = ("none", "cpu")
    for stage in stages:
        for optimizer in choices:
            for weights in choices if stage == 3 else choices[:1]:
                for bucket in BUCKETS:
                    yield stage, optimizer, weights, bucket
