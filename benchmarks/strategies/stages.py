"""The part of a landscape that tuners of ZeRO stage and micro-batch can reach: all other knobs as a user sets them."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Result, Unplayable

Launches = Generator[int, Result, float]
"""Yields candidates, and returns a metric."""
_USUAL = {
    "method": ("lora", "full"),
    "lora_rank": (8, 16),
    "offload_optimizer": ("none",),
    "offload_param": ("none",),
    "gradient_checkpointing": ("full",),
    "attention": ("sdpa",),
    "reduce_bucket": (500_000_000,),
}
"""What a user has before tuning, by preference: LoRA of rank 8 or 16 where the space has it, checkpointing, no offload,
DeepSpeed's default buckets."""
_LEAST_GIB = 1e-3
"""Of activations, where neither the table nor the prediction shows any."""
_TRAINED_BY_LORA = 0.005
"""Of the weights, by rank 16 on all linear layers of a 7B model: 40M of 6.7B."""


@dataclass(frozen=True, eq=False)
class Stages:
    """Candidates by stage, micro-batch and bucket (0 where the landscape has no such knob).

    `activation_gib` is what one more row adds to the peak, as a profile run at micro-batch 1 and stage 3 shows it."""

    rows: Mapping[tuple[int, int, int], int]
    micro_batches: tuple[int, ...]
    buckets: tuple[int, ...]
    default_bucket: int
    activation_gib: float
    limit_gib: float
    ranks: int
    parameters: float
    trained: float
    is_half: bool
    is_fp16: bool

    def row(self, stage: int, micro_batch: int, bucket: int) -> int:
        """The candidate with the largest micro-batch of the table that is not above `micro_batch`."""
        size = max((each for each in self.micro_batches if each <= micro_batch), default=self.micro_batches[0])
        key = (stage, size, bucket)
        return self.rows[key] if key in self.rows else self.rows[stage, size, self.default_bucket]

    def run(self, stage: int, micro_batch: int, bucket: int | None = None) -> Launches:
        """Launch, and return tokens/s, 0 when it failed."""
        result = yield self.row(stage, micro_batch, self.default_bucket if bucket is None else bucket)
        return result.tokens_per_s if result.is_ok else 0.0


def stages_of(landscape: Landscape) -> Stages:
    """The part that the user's other settings leave. Raises Unplayable where it lacks a stage or two micro-batches."""
    if not {"zero_stage", "micro_batch"} <= set(landscape.knobs):
        raise Unplayable(f"{landscape.name} has no knobs zero_stage and micro_batch to tune")
    fixed = {name: _usual(landscape, name) for name in landscape.knobs if name in _USUAL and name != "reduce_bucket"}
    if fixed.get("method") == "full":
        fixed["lora_rank"] = 0
    found: dict[tuple[int, int, int], int] = {}
    for number, each in enumerate(landscape.candidates):
        if all(each[name] == value for name, value in fixed.items()):
            key = int(each["zero_stage"]), int(each["micro_batch"]), int(each.get("reduce_bucket", 0))
            found.setdefault(key, number)
    default = int(_usual(landscape, "reduce_bucket")) if "reduce_bucket" in landscape.knobs else 0
    lacking = [stage for stage in range(4) if sum(key[::2] == (stage, default) for key in found) < 2]
    if lacking:
        raise Unplayable(
            f"{landscape.name} lacks two micro-batches of ZeRO stage {lacking[0]} beside a user's settings"
        )
    precision = str(landscape.facts.get("precision", "bf16"))
    is_lora = fixed.get("method") == "lora"
    return Stages(
        rows=found,
        micro_batches=tuple(sorted({size for _, size, _ in found})),
        buckets=tuple(sorted({bucket for _, _, bucket in found})),
        default_bucket=default,
        activation_gib=_activation_gib(landscape, found, default),
        limit_gib=landscape.limits["peak_gib"],
        ranks=int(landscape.limits["n_gpus"]),
        parameters=landscape.limits["params"],
        trained=landscape.limits["params"] * (_TRAINED_BY_LORA if is_lora else 1.0),
        is_half=precision != "fp32",
        is_fp16=precision == "fp16",
    )


def reachable(landscape: Landscape) -> Landscape:
    """What DeepSpeed's autotuner reaches in its fast form: stages and micro-batches, all else as a user has it.

    Raises Unplayable where nothing of it fits."""
    stages = stages_of(landscape)
    kept = sorted(row for (_, _, bucket), row in stages.rows.items() if bucket == stages.default_bucket)
    if not landscape.feasible[kept].any():
        raise Unplayable(f"{landscape.name}: nothing fits of what DeepSpeed's autotuner reaches")
    return replace(
        landscape,
        candidates=tuple(landscape.candidates[row] for row in kept),
        feasible=landscape.feasible[kept],
        oom_kinds=tuple(landscape.oom_kinds[row] for row in kept),
        tokens_per_s=landscape.tokens_per_s[kept],
        peak_gib=landscape.peak_gib[kept],
        host_gib=landscape.host_gib[kept],
        prior={name: values[kept] for name, values in landscape.prior.items()},
    )


def _usual(landscape: Landscape, name: str) -> str | int:
    have = {each[name] for each in landscape.candidates}
    return next((value for value in _USUAL[name] if value in have), max(have, key=str))


def _activation_gib(landscape: Landscape, rows: Mapping[tuple[int, int, int], int], bucket: int) -> float:
    """Between the two smallest micro-batches of stage 3, by the table, or by the prediction where they did not run."""
    sizes = sorted(size for stage, size, each in rows if stage == 3 and each == bucket)
    first, second = rows[3, sizes[0], bucket], rows[3, sizes[1], bucket]
    for peaks in (landscape.peak_gib, landscape.prior["peak_gib"]):
        slope = float(peaks[second] - peaks[first]) / (sizes[1] - sizes[0])
        if np.isfinite(slope) and slope > 0:
            return slope
    return _LEAST_GIB
