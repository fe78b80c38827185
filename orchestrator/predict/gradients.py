"""Bytes of gradients over the backward pass: buckets that fill and flush, and what stays of each gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import DTYPE_BYTES, Dtype, Parameter, Point
from orchestrator.predict.fsdp import gathered_element_bytes, units
from orchestrator.predict.job import Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.terms import largest
from orchestrator.predict.weights import Weight, trained, weights_of
from orchestrator.predict.zero import NORM_BYTES, Part, aligned_numel, bucket_bytes, fullest_part, parts

_FLATTENED_NUMEL = 500_000_000
"""Gradients that stage 0 reduces at a time (deepspeed 0.19.8 runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE)."""
_ANY_POINT = Point(1, 1)
_NORM_CHUNK_NUMEL = 250_000_000
"""Of a norm in stage 3 with an offloaded optimizer (runtime/zero/stage3.py:1969)."""


@dataclass(frozen=True)
class GradientTimeline:
    """Gradients and buckets beside an engine's resident terms, in one micro-step.

    `live_bytes[k]` is after the k-th gradient is whole and handled, `peak_bytes[k]` the highest while it is handled:
    the gradient itself and what a flush needs. A gradient is part of `peak_bytes` from the moment it is whole.
    """

    opening_bytes: int
    """Before the first gradient: kept from earlier micro-steps."""
    live_bytes: NDArray[np.int64]
    peak_bytes: NDArray[np.int64]
    closing_peak_bytes: int
    """Highest after the last gradient, when what is left is reduced."""
    kept_bytes: int
    """After that, until the next micro-step or the optimizer step."""


def gradient_timeline(
    parameters: Sequence[Parameter],
    job: Job,
    precision: Dtype,
    order: Sequence[int],
    accumulates: bool = False,
    is_last: bool = True,
) -> GradientTimeline:
    """The timeline over `order`, the parameters in the order in which their gradients become whole.

    `accumulates`: earlier micro-steps have left gradients. `is_last`: the optimizer step follows.
    """
    # neither the point nor how often gradients accumulate moves it, nor what stage 3 keeps of its weights
    settings = replace(job, point=_ANY_POINT, gradient_accumulation=1, stage3_prefetch_bucket_size=0)
    return _timeline(weights_of(parameters, job, precision), order, settings, precision, accumulates, is_last)


@remembered(identities=2, size=256)
def _timeline(
    weights: Sequence[Weight], order: Sequence[int], job: Job, precision: Dtype, accumulates: bool, is_last: bool
) -> GradientTimeline:
    handler = _handler(weights, job, precision, accumulates, is_last)
    live, peak = [], []
    opening_bytes = handler.live_bytes
    for index in order:
        peak.append(handler.take(weights[index]))
        live.append(handler.live_bytes)
    closing_bytes = max(handler.close(), handler.live_bytes)
    return GradientTimeline(
        opening_bytes,
        np.array(live, dtype=np.int64),
        np.array(peak, dtype=np.int64),
        closing_bytes,
        handler.live_bytes,
    )


class _Handler:
    """Keeps every gradient; the base of those that do more."""

    def __init__(self, weights: Sequence[Weight], job: Job, precision: Dtype, accumulates: bool, is_last: bool) -> None:
        self.weights = weights
        self.job = job
        self.precision = precision
        self.low_bytes = DTYPE_BYTES[precision]
        self.accumulates = accumulates
        self.is_last = is_last
        self.live_bytes = 0
        self.open()

    def open(self) -> None:
        """What is there before the first gradient."""
        if self.accumulates:
            self.live_bytes = sum(weight.bytes for weight in trained(self.weights))

    def take(self, weight: Weight) -> int:
        """Handle a gradient that has become whole; returns the highest bytes meanwhile."""
        peak_bytes = self.live_bytes + weight.bytes
        if not self.accumulates:
            self.live_bytes += weight.bytes
        return peak_bytes

    def close(self) -> int:
        """End the backward pass; returns the highest bytes meanwhile."""
        return self.live_bytes


class _Unsharded(_Handler):
    """Stage 0: gradients are reduced in flat copies at the end (runtime/engine.py:3795-3839)."""

    def close(self) -> int:
        if not self.is_last:
            return self.live_bytes
        sizes, open_weights, open_numel = [0], 0, 0
        for weight in trained(self.weights):
            open_weights, open_numel = open_weights + 1, open_numel + weight.numel
            if open_numel > _FLATTENED_NUMEL:
                sizes.append(open_numel if open_weights > 1 else 0)
                open_weights, open_numel = 0, 0
        sizes.append(open_numel if open_weights > 1 else 0)
        return self.live_bytes + max(sizes) * self.low_bytes


class _Partitioned(_Handler):
    """Stages 1 and 2 (runtime/zero/stage_1_and_2.py:1414-1478, 1516-1690, 2142-2282) on the rank with the fullest
    part. Stage 1 fills its bucket only after the backward pass unless `overlap_comm` is on."""

    def open(self) -> None:
        job = self.job
        self._part = self._worst_part()
        self._part_bytes = self._part.whole_numel() * self.low_bytes
        self._piece_of = dict(zip((weight.index for weight in self._part.weights), self._part.pieces, strict=True))
        self._offset = self._offsets()
        self._bucket_bytes = bucket_bytes(job, self.precision)
        self._has_bucket = False
        self._loose_bytes = 0
        self._kept_bytes = 0
        self._staged_bytes = 0
        self._bucket: list[Weight] = []
        self._bucket_numel = 0
        self._reduces_now = job.zero_stage == 2 or (bool(job.overlap_comm) and self.is_last)
        if self.accumulates and job.zero_stage == 1:
            self._has_bucket = True
            self._loose_bytes = sum(weight.bytes for weight in trained(self.weights))
        elif self.accumulates and job.offload_optimizer == "none":
            self._kept_bytes = self._part_bytes
        self._count()

    def _worst_part(self) -> Part:
        held = parts(self.weights, self.job.world_size)
        if self.job.offload_optimizer == "none":
            return held[fullest_part(self.weights, self.job.world_size)]
        # nothing of a part stays on the device then but gradients that no bucket holds
        limit = self.job.reduce_bucket_size
        alone = [sum(weight.numel for weight in part.weights if weight.numel > limit) for part in held]
        return held[max(range(len(held)), key=lambda rank: (alone[rank], rank))]

    def take(self, weight: Weight) -> int:
        self._has_bucket = True
        if not self._reduces_now:
            self._count()
            peak_bytes = self.live_bytes + weight.bytes
            if not self.accumulates:
                self._loose_bytes += weight.bytes
            self._count()
            return peak_bytes
        if self.job.zero_stage == 1 and self.accumulates:
            self._loose_bytes -= weight.bytes
        peak_bytes = self._add(weight)
        self._count()
        return peak_bytes

    def close(self) -> int:
        if not self._reduces_now and not self.is_last:
            return self.live_bytes
        peak_bytes = self.live_bytes
        if not self._reduces_now:
            for weight in trained(self.weights):
                self._loose_bytes -= weight.bytes
                peak_bytes = max(peak_bytes, self._add(weight))
        peak_bytes = max(peak_bytes, self._flush())
        self._has_bucket = False
        self._loose_bytes = 0
        if self._staged_bytes:
            self._kept_bytes, self._staged_bytes = self._staged_bytes, 0
        self._count()
        return peak_bytes

    def _add(self, weight: Weight) -> int:
        """Into the bucket, which is flushed first when it has no room; a larger gradient stays by itself."""
        self._loose_bytes += weight.bytes
        self._count()
        peak_bytes = self.live_bytes
        if self._bucket_numel + weight.numel > self.job.reduce_bucket_size:
            peak_bytes = max(peak_bytes, self._flush())
        self._bucket.append(weight)
        self._bucket_numel += weight.numel
        if weight.numel <= self.job.reduce_bucket_size:
            self._loose_bytes -= weight.bytes
        self._count()
        return peak_bytes

    def _flush(self) -> int:
        bucket, self._bucket, self._bucket_numel = self._bucket, [], 0
        if not bucket:
            return self.live_bytes
        flat_bytes = sum(weight.numel for weight in bucket) * self.low_bytes if self._destinations(bucket) > 1 else 0
        self._count()
        peak_bytes = self.live_bytes + flat_bytes
        mine = [weight for weight in bucket if weight.index in self._piece_of]
        if mine and self.job.offload_optimizer != "none":
            norm_bytes = NORM_BYTES * largest(self._piece_of[weight.index] for weight in mine)
            peak_bytes = max(peak_bytes, self.live_bytes + norm_bytes)
        elif mine:
            self._staged_bytes = self._part_bytes
            self._count()
            peak_bytes = max(peak_bytes, self.live_bytes)
        # an offloaded gradient that is not in the bucket stays until the last micro-step clears it (:1909)
        stays = mine and self.job.offload_optimizer != "none" and not self.is_last
        if bucket[0].numel > self.job.reduce_bucket_size and not stays:
            self._loose_bytes -= bucket[0].bytes
        self._count()
        return peak_bytes

    def _destinations(self, bucket: Sequence[Weight]) -> int:
        """Runs of the bucket that go to one rank each; more than one are reduced in a flat copy (:1590-1683)."""
        size = aligned_numel(self.weights, self.job.world_size) // self.job.world_size
        runs, last = 0, -1
        for weight in bucket:
            start = self._offset[weight.index]
            for rank in range(start // size, -(-(start + weight.numel) // size)):
                runs, last = runs + (rank != last), rank
        return runs

    def _offsets(self) -> dict[int, int]:
        offsets, start = {}, 0
        for weight in trained(self.weights):
            offsets[weight.index] = start
            start += weight.numel
        return offsets

    def _count(self) -> None:
        bucket_bytes = self._bucket_bytes if self._has_bucket else 0
        self.live_bytes = bucket_bytes + self._loose_bytes + self._kept_bytes + self._staged_bytes


class _Sharded(_Handler):
    """Stage 3 (runtime/zero/stage3.py:1553-1661, comm/coalesced_collectives.py:84-127): the bucket and the buffer of
    reduced gradients are resident."""

    def open(self) -> None:
        self._bucket: list[Weight] = []
        self._bucket_numel = 0

    def take(self, weight: Weight) -> int:
        self.live_bytes += weight.bytes
        peak_bytes = self.live_bytes
        if self._bucket and self._bucket_numel + weight.numel > self.job.reduce_bucket_size:
            peak_bytes = max(peak_bytes, self._flush())
        if self._bucket_numel + weight.numel <= self.job.reduce_bucket_size:
            self.live_bytes -= weight.bytes
        self._bucket.append(weight)
        self._bucket_numel += weight.numel
        return peak_bytes

    def close(self) -> int:
        return self._flush()

    def _flush(self) -> int:
        bucket, self._bucket = self._bucket, []
        ranks = self.job.world_size
        peak_bytes = self.live_bytes + self._flat_numel(bucket, ranks) * self.low_bytes
        if self.job.offload_optimizer != "none" and bucket:
            shard_numel = largest(weight.shard_numel(ranks) for weight in bucket)
            norm_bytes = NORM_BYTES * min(shard_numel, _NORM_CHUNK_NUMEL)
            peak_bytes += shard_numel * self.low_bytes + norm_bytes
        if self._bucket_numel > self.job.reduce_bucket_size:
            self.live_bytes -= bucket[0].bytes
        self._bucket_numel = 0
        return peak_bytes

    @staticmethod
    def _flat_numel(bucket: Sequence[Weight], ranks: int) -> int:
        if len(bucket) == 1 and bucket[0].numel % ranks == 0:
            return 0
        return sum(weight.shard_numel(ranks) * ranks for weight in bucket)


class _FullyShared(_Handler):
    """FSDP: a unit's gradients are gathered into a flat one, which is reduced; without reduction it stays whole."""

    def open(self) -> None:
        self._units = units(self.weights, self.job, self.precision)
        self._missing = {layer: sum(weight.layer == layer for weight in trained(self.weights)) for layer in self._units}
        self._alone: dict[int, int] = dict.fromkeys(self._units, 0)
        if self.accumulates:
            self.live_bytes = sum(unit.gradient_bytes for unit in self._units.values())

    def take(self, weight: Weight) -> int:
        unit = self._units[weight.layer]
        size_bytes = weight.numel * gathered_element_bytes(weight, self.job, self.precision)
        self._alone[weight.layer] += size_bytes
        self.live_bytes += size_bytes
        self._missing[weight.layer] -= 1
        if self._missing[weight.layer]:
            return self.live_bytes
        peak_bytes = self.live_bytes + unit.gradient_bytes + (unit.shard_gradient_bytes if self.is_last else 0)
        self.live_bytes -= self._alone.pop(weight.layer)
        if self.is_last:
            self.live_bytes += unit.shard_gradient_bytes - (unit.gradient_bytes if self.accumulates else 0)
        elif not self.accumulates:
            self.live_bytes += unit.gradient_bytes
        return peak_bytes


_Factory = Callable[[Sequence[Weight], Job, Dtype, bool, bool], _Handler]


def _handler(weights: Sequence[Weight], job: Job, precision: Dtype, accumulates: bool, is_last: bool) -> _Handler:
    factory: _Factory = _Handler
    if job.engine == "fsdp":
        factory = _FullyShared
    elif job.engine == "deepspeed":
        factory = {0: _Unsharded, 1: _Partitioned, 2: _Partitioned, 3: _Sharded}[job.zero_stage]
    return factory(weights, job, precision, accumulates, is_last)
