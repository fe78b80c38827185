"""FullyShardedDataParallel, full shard: one flat unit for each layer, the rest in a root unit.

Sources: torch 2.13 torch/distributed/fsdp (`_flat_param.py`, `_runtime_utils.py`); accelerate's plugin (no
reduction before the last micro-step, float32 shards of what is trained with mixed precision). Checked against
published runs: the step of 16-bit AdamW at ten bytes a weight over the ranks, and with accumulation two bytes a weight
that no number of ranks divides (fms-acceleration, scripts/benchmarks/refs and refs_orca).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import DTYPE_BYTES, Dtype, Mark, Module
from orchestrator.predict.job import Job
from orchestrator.predict.optimizer import Updated, state_bytes, step_bytes
from orchestrator.predict.terms import EngineTerms, add, largest
from orchestrator.predict.weights import Weight, frozen, trained
from orchestrator.predict.zero import load_copies

ROOT = -1
"""The unit of weights outside of the layers: gathered for the whole pass, since the root is not freed in between."""


@dataclass(frozen=True)
class Unit:
    """One flat parameter. Bytes are those of the whole unit, padding included."""

    layer: int
    gathered_bytes: int
    gradient_bytes: int
    """Of the trained weights, in the type of the computation."""
    shard_gradient_bytes: int
    """One rank's part of it, in the type of the shards."""


def shard_element_bytes(weight: Weight, job: Job) -> int:
    """Shards of trained weights are in `master_dtype` where there is one."""
    return DTYPE_BYTES[job.master_dtype] if job.master_dtype is not None and weight.is_trained else weight.element_bytes


def gathered_element_bytes(weight: Weight, job: Job, precision: Dtype) -> int:
    """With mixed precision weights are gathered in the computation's type."""
    return DTYPE_BYTES[precision] if job.master_dtype is not None and weight.is_trained else weight.element_bytes


def units(weights: Sequence[Weight], job: Job, precision: Dtype) -> dict[int, Unit]:
    """By layer."""
    found: dict[int, list[Weight]] = {}
    for weight in weights:
        found.setdefault(weight.layer, []).append(weight)
    return {layer: _unit(layer, held, job, precision) for layer, held in found.items()}


def _unit(layer: int, weights: Sequence[Weight], job: Job, precision: Dtype) -> Unit:
    gathered = sum(weight.numel * gathered_element_bytes(weight, job, precision) for weight in weights)
    gradient = sum(weight.numel * gathered_element_bytes(weight, job, precision) for weight in trained(weights))
    shard = sum(weight.shard_numel(job.world_size) * shard_element_bytes(weight, job) for weight in trained(weights))
    return Unit(layer, gathered, gradient, shard)


def unit_shard_bytes(weights: Sequence[Weight], job: Job) -> list[int]:
    """One rank's part of each unit, in the type of the shards."""
    found: dict[int, int] = {}
    for weight in weights:
        size_bytes = weight.shard_numel(job.world_size) * shard_element_bytes(weight, job)
        found[weight.layer] = found.get(weight.layer, 0) + size_bytes
    return list(found.values())


def fsdp_terms(weights: Sequence[Weight], job: Job, precision: Dtype) -> EngineTerms:
    """Terms of one rank, without the gathered units (`fsdp_window`) and the gradients of the backward pass."""
    ranks = job.world_size
    shards = {
        "frozen_weights": sum(weight.shard_bytes(ranks) + weight.scales_bytes for weight in frozen(weights)),
        "trained_weights": sum(
            weight.shard_numel(ranks) * shard_element_bytes(weight, job) for weight in trained(weights)
        ),
    }
    updated = [
        Updated(weight.shard_numel(ranks), shard_element_bytes(weight, job), weight.largest_axis)
        for weight in trained(weights)
    ]
    parts = units(weights, job, precision).values()
    gradients = {"gradients": sum(unit.shard_gradient_bytes for unit in parts)}
    whole_unit = {"gathered_weights": 2 * largest(unit.gathered_bytes for unit in parts)}
    update = {"optimizer_temporaries": step_bytes(job.optimizer, job.optimizer_loop, updated)}
    return EngineTerms(
        resident=add(shards, {"optimizer_states": state_bytes(job.optimizer, updated)}),
        # a unit moves to the device and is copied into its flat parameter before it is divided
        load=add(shards, whole_unit),
        init=add(shards),
        step=add(gradients, update),
        between={"gradients": sum(unit.gradient_bytes for unit in parts)},
        host_load=load_copies(weights, job),
    )


def fsdp_window(
    weights: Sequence[Weight],
    modules: Sequence[Module],
    marks: NDArray[np.int32],
    job: Job,
    precision: Dtype,
    *,
    gathers_ahead: bool = True,
) -> NDArray[np.int64]:
    """Gathered bytes after each of `marks` (rows as in a profile).

    Forward: the root and the running unit. Backward: the root, the unit, and, when it `gathers_ahead`, the next one,
    which is gathered before the unit's own gradients (`BackwardPrefetch.BACKWARD_PRE`); two all-gathers at most are
    open (`limit_all_gathers`).
    """
    if job.world_size == 1:
        return np.zeros(len(marks), dtype=np.int64)
    parts = units(weights, job, precision)
    root_bytes = parts[ROOT].gathered_bytes if ROOT in parts else 0
    layer_of = [weights[module.parameters[0]].layer if module.parameters else ROOT for module in modules]
    backward = {int(Mark.BEFORE_BACKWARD), int(Mark.AFTER_BACKWARD)}
    live = np.zeros(len(marks), dtype=np.int64)
    last = max(parts)
    current, is_backward, is_open, upcoming = ROOT, False, False, last
    for row, (_, mark, payload) in enumerate(marks):
        if mark in (Mark.BEFORE_FORWARD, Mark.BEFORE_BACKWARD):
            is_open = True
            is_backward = is_backward or mark in backward
            current = layer_of[payload]
            if is_backward and current != ROOT:
                upcoming = current - 1
        # a layer's unit is divided again when its pass is over: before the head only the root is whole
        running = parts[current].gathered_bytes if current != ROOT else 0
        has_next = gathers_ahead and is_backward and upcoming >= 0 and upcoming in parts
        ahead = parts[upcoming].gathered_bytes if has_next else 0
        live[row] = (root_bytes + running + ahead) if is_open else 0
    return live
