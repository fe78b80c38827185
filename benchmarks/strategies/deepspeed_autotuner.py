"""A simulator of DeepSpeed's autotuner (deepspeed/autotuning/autotuner.py), written from its documented algorithm.

Its own memory model gates the stages; micro-batches are searched from below, then between a half and the largest; the
fast form stops there, the full one tunes buckets of the stages above 0 too. It is told to tune all stages. Every space
is limited to what the landscape holds: micro-batches are rounded down to those of the table, and of the options that it
would tune the table knows the bucket size.
"""

from collections.abc import Generator
from itertools import product
from math import ceil

from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Result, Script, Scripted
from benchmarks.strategies.stages import Launches, Stages, stages_of
from orchestrator.contract.units import GIB

MOST = 1024
"""DEFAULT_MAX_MICRO_BATCH_SIZE_PER_GPU."""
SIZES = 3
"""`num_tuning_micro_batch_sizes`."""
GAIN = 0.05
"""Relative gain below which the search for the largest micro-batch ends (METRIC_PERCENT_DIFF_CONST)."""
TRIALS, PATIENCE = 50, 5
"""Of the full form, for one stage: `tuner_num_trials`, `tuner_early_stopping`."""
_Tuned = tuple[int, int, float]
"""Largest micro-batch, best micro-batch, its metric."""
_Nothing: _Tuned = (0, 0, 0.0)


class _Autotuner:
    """One tuning: metrics of all experiments so far, by stage, micro-batch and bucket."""

    def __init__(self, stages: Stages, is_fast: bool) -> None:
        self._stages, self._is_fast = stages, is_fast
        self._seen: dict[tuple[int, int], float] = {}

    def search(self) -> Script:
        """All stages in turn. The largest micro-batch of one is where the next begins, if its best was larger."""
        best, largest, value = 0, 0, 0.0
        for stage in (0, 1, 2, 3):
            if self._stages.limit_gib <= self._needs_gib(stage) + self._stages.activation_gib:
                continue
            found, best_here, metric = yield from self._tune(stage, largest, best, value)
            if stage < 3 and best_here > best:
                best, largest, value = best_here, found, metric

    def _needs_gib(self, stage: int) -> float:
        """Weights, gradients and optimizer of one device: all weights count as trained."""
        kinds = (2, 2, 16) if self._stages.is_fp16 else (4, 4, 8)
        weights, gradients, optimizer = (kind * self._stages.parameters / GIB for kind in kinds)
        ranks = self._stages.ranks
        return (
            weights / (ranks if stage == 3 else 1)
            + gradients / (ranks if stage >= 2 else 1)
            + optimizer / (ranks if stage >= 1 else 1)
        )

    def _run(self, stage: int, micro_batch: int) -> Launches:
        metric = yield from self._stages.run(stage, micro_batch)
        self._seen[stage, micro_batch] = metric
        return metric

    def _tune(self, stage: int, largest: int, best: int, value: float) -> Generator[int, Result, _Tuned]:
        most = int((self._stages.limit_gib - self._needs_gib(stage)) / self._stages.activation_gib)
        if most < largest:
            return _Nothing
        low, high = yield from self._bounds(stage, largest, most)
        if high < max(largest, 1):
            return _Nothing
        low = max(low, high // 2)
        sizes = [size for size in range(low, high, max(1, (high - low) // SIZES)) if high // size != 1] + [high]
        for size in sizes:
            yield from self._run(stage, size)
        yield from self._refine(stage, sizes, low)
        top = max(sizes, key=lambda size: self._seen.get((stage, size), 0.0))
        metric = self._seen[stage, top]
        if not self._is_fast and stage > 0 and top > best and metric >= value:
            yield from self._tune_buckets(stage, sizes)
        return high, top, metric

    def _refine(self, stage: int, sizes: list[int], low: int) -> Generator[int, Result, None]:
        """Below the largest, which may be slow because memory is full."""
        high = sizes[-1]
        start = sizes[-2] + 1 if len(sizes) > 1 else low
        best = self._seen[stage, high]
        for size in reversed(range(start, high, max(1, (high - start) // SIZES))):
            metric = yield from self._run(stage, size)
            if metric <= best * (1 + GAIN):
                return
            best, sizes[-1] = metric, size

    def _bounds(self, stage: int, low: int, most: int) -> Generator[int, Result, tuple[int, int]]:
        """The smallest and the largest micro-batch that run; (-1, -1) when none does."""
        low = max(low, 1)
        if low > most:
            return -1, -1
        if (yield from self._run(stage, low)) <= 0:
            return -1, -1
        cap = min(most, MOST)
        for size in (ceil(1.05 * cap), cap, int(0.95 * cap)):
            if low <= size <= MOST and (self._seen.get((stage, size)) or (yield from self._run(stage, size))) > 0:
                return low, size
        floor, ceiling, before = low, cap, self._seen[stage, low]
        while floor <= ceiling:
            middle = (floor + ceiling) // 2
            metric = yield from self._run(stage, middle)
            if metric <= 0:
                ceiling = middle - 1
                continue
            floor = middle + 1
            if middle > low and metric < before * (1 + GAIN):
                break
            before = metric
        return low, max(floor - 1, low)

    def _tune_buckets(self, stage: int, sizes: list[int]) -> Generator[int, Result, None]:
        """In the order of the grid, until nothing better came for a while."""
        best, best_at = 0.0, 0
        for number, (size, bucket) in enumerate(product(sizes, self._stages.buckets)):
            if number >= TRIALS or number >= best_at + PATIENCE:
                return
            metric = yield from self._stages.run(stage, size, bucket)
            if metric > best:
                best, best_at = metric, number


def deepspeed_fast(landscape: Landscape, seed: int) -> Scripted:
    """The default form, all stages. One launch goes to its profile run."""
    return Scripted(_Autotuner(stages_of(landscape), is_fast=True).search(), first_launches=1)


def deepspeed_full(landscape: Landscape, seed: int) -> Scripted:
    """With `fast: false`."""
    return Scripted(_Autotuner(stages_of(landscape), is_fast=False).search(), first_launches=1)
