"""Small made-up landscapes: a machine whose speed and memory are known, and a prediction that is nearly right.

Two hundred configurations each: method, ZeRO stage, offload, checkpointing, micro-batch. About half of them fit.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.landscapes.table import Landscape

KNOBS = ("method", "zero_stage", "offload_optimizer", "gradient_checkpointing", "micro_batch")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
OWN_ERROR = 0.04
"""Of the prediction, in log units, besides what a test adds: the size of those of `docs/measurements`."""


def landscapes(count: int) -> Sequence[Landscape]:
    """So many, all different, the same ones each time."""
    return [_landscape(seed) for seed in range(count)]


def _landscape(seed: int) -> Landscape:
    dice = np.random.default_rng([seed, 4])
    candidates = [
        dict(zip(KNOBS, (method, stage, offload, checkpointing, size), strict=True))
        for method, stage, offload, checkpointing, size in itertools.product(
            ("full", "lora"), (0, 1, 2, 3), ("none", "cpu"), ("none", "full"), MICRO_BATCHES
        )
        if not (stage == 0 and offload == "cpu")
    ]
    states_gib, row_gib, link = dice.uniform(4, 16), dice.uniform(0.8, 2.5), dice.uniform(0.02, 0.12)
    half, offload_cost, recompute = dice.uniform(0.5, 3.0), dice.uniform(0.15, 0.6), dice.uniform(0.2, 0.35)
    speed, need = [], []
    for each in candidates:
        is_lora, is_checkpointed = each["method"] == "lora", each["gradient_checkpointing"] == "full"
        stage, size, is_offloaded = (
            int(each["zero_stage"]),
            int(each["micro_batch"]),
            each["offload_optimizer"] == "cpu",
        )
        speed.append(
            np.log(size / (size + half))
            + 0.25 * is_lora
            - link * stage * (0.4 if is_lora else 1.0)
            - offload_cost * is_offloaded * (0.3 if is_lora else 1.0)
            - recompute * is_checkpointed
        )
        kept = states_gib * (0.15 if is_lora else 1.0) * (0.4 if is_offloaded else 1.0) * (1, 0.6, 0.45, 0.3)[stage]
        need.append(np.log(2.0 + kept + row_gib * size * (0.3 if is_checkpointed else 1.0)))
    dips = dict(zip(MICRO_BATCHES, dice.uniform(-0.08, 0.0, len(MICRO_BATCHES)), strict=True))
    log_speed = np.array(speed) + 8 + np.array([dips[int(each["micro_batch"])] for each in candidates])
    log_need = np.array(need)
    limit_gib = float(np.exp(np.median(log_need)))
    feasible = log_need <= np.log(limit_gib)
    host_gib = np.ones(len(candidates))
    return Landscape(
        facts={
            "name": f"made {seed}",
            "knobs": KNOBS,
            "mem_limit_gib": limit_gib,
            "host_limit_gib": 9.0,
            "noise": 0.01,
        },
        candidates=tuple(candidates),
        feasible=feasible,
        oom_kinds=tuple("" if fits else "gpu" for fits in feasible),
        tokens_per_s=np.exp(log_speed),
        peak_gib=np.exp(log_need),
        host_gib=host_gib,
        prior={
            "tokens_per_s": np.exp(np.array(speed) + 8 + dice.normal(0, OWN_ERROR, len(candidates))),
            "peak_gib": np.exp(log_need + dice.normal(0, OWN_ERROR, len(candidates))),
            "host_gib": host_gib,
        },
    )
