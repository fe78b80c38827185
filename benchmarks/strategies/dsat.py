"""A simulator of Determined's dsat searches (binary, random, ASHA), written from their documented algorithms.

A lineage is one set of ZeRO options at a random stage of 1 to 3, with a search over micro-batches; of the options the
tables know the bucket size. Any failed trial is taken for an OOM.
"""

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Result, Script, Scripted
from benchmarks.strategies.stages import Stages, stages_of
from orchestrator.contract.units import GIB

TRIALS = 64
"""`--max-trials`."""
LINEAGE_TRIALS = 5
RUNGS, FACTOR, RUNG_TRIALS = 5, 2, 3
"""ASHA: rungs, the share that is promoted is 1 / FACTOR, trials of the first rung."""


@dataclass
class _Lineage:
    """A search over micro-batches in [low, high]."""

    stage: int
    bucket: int
    low: int
    high: int
    trials: int = 0
    failures: int = 0
    best: float = 0.0
    rung: int = 0
    sizes: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether anything is left between its bounds."""
        return self.low <= self.high


class _Searcher:
    """What the three searches share: random lineages, and the bounds that the memory model gives them."""

    def __init__(self, stages: Stages, seed: int) -> None:
        self._stages = stages
        self._rng = np.random.default_rng(seed)
        self._lineages: list[_Lineage] = []
        self._trials = 0

    def _draw(self) -> _Lineage:
        stage, bucket = int(self._rng.integers(1, 4)), int(self._rng.choice(self._stages.buckets))
        lineage = _Lineage(stage, bucket, 1, self._most(stage))
        self._lineages.append(lineage)
        return lineage

    def _most(self, stage: int) -> int:
        """By its memory model, which counts trained weights alone where training needs them."""
        stages = self._stages
        weights, optimizer = (2, 12) if stages.is_half else (4, 8)
        need = weights * stages.parameters / (stages.ranks if stage == 3 else 1)
        need += 4 * stages.trained / (stages.ranks if stage >= 2 else 1)
        need += optimizer * stages.trained / stages.ranks
        free_gib = stages.limit_gib - need / GIB - stages.activation_gib
        return max(int(free_gib / stages.activation_gib), 1)

    def _launch(self, lineage: _Lineage, size: int) -> Generator[int, Result, bool]:
        self._trials += 1
        metric = yield from self._stages.run(lineage.stage, size, lineage.bucket)
        lineage.trials += 1
        lineage.best = max(lineage.best, metric)
        if metric > 0:
            lineage.sizes.append(size)
        else:
            lineage.failures += 1
        return metric > 0

    def _halve(self, lineage: _Lineage) -> Generator[int, Result, None]:
        """One trial in the middle of its bounds."""
        middle = (lineage.low + lineage.high) // 2
        if (yield from self._launch(lineage, middle)):
            lineage.low = middle + 1
        else:
            lineage.high = middle - 1

    def binary(self) -> Script:
        """Lineages one after another, each to the largest micro-batch that runs."""
        while self._trials < TRIALS:
            lineage = self._draw()
            while lineage.is_open and self._trials < TRIALS:
                yield from self._halve(lineage)

    def random(self) -> Script:
        """Micro-batches drawn about the middle; bounds double where the model was too low."""
        while self._trials < TRIALS:
            lineage = self._draw()
            self._start_from_best(lineage)
            while self._trials < TRIALS and not self._is_over(lineage):
                size = lineage.low + int(self._rng.binomial(lineage.high - lineage.low, 0.5))
                if (yield from self._launch(lineage, size)):
                    lineage.low = size + 1
                    if lineage.low > lineage.high:
                        lineage.high *= 2
                else:
                    lineage.high = size - 1

    def asha(self) -> Script:
        """Lineages that do well get more trials."""
        while self._trials < TRIALS:
            lineage = self._promoted() or self._unfinished() or self._draw()
            yield from self._halve(lineage)

    def _start_from_best(self, lineage: _Lineage) -> None:
        others = [each for each in self._lineages if each is not lineage and each.stage == lineage.stage]
        sizes = [max(each.sizes) for each in others if each.sizes]
        if sizes:
            best = max((each for each in others if each.sizes), key=lambda each: each.best)
            lineage.low = max(best.sizes) + 1
            lineage.high = max(*sizes, lineage.high, 2 * lineage.low)

    def _is_over(self, lineage: _Lineage) -> bool:
        if not lineage.is_open or lineage.trials >= LINEAGE_TRIALS:
            return True
        others = [each for each in self._lineages if each is not lineage]
        if lineage.stage == 3 and any(each.stage < 3 and each.sizes for each in others):
            return True
        reached = any(each.stage == lineage.stage and max(each.sizes, default=0) >= lineage.high for each in others)
        return lineage.failures > 0 and reached

    def _promoted(self) -> _Lineage | None:
        """Of the highest rung that has one: among the best of those that used up their trials."""
        for rung in reversed(range(RUNGS - 1)):
            there = [each for each in self._lineages if each.rung >= rung and each.trials >= _budget(rung)]
            there.sort(key=lambda each: -each.best)
            for lineage in there[: len(there) // FACTOR]:
                if lineage.rung == rung and lineage.is_open:
                    lineage.rung += 1
                    return lineage
        return None

    def _unfinished(self) -> _Lineage | None:
        """Of the highest rung, then the longest, that has trials left in its rung."""
        left = [each for each in self._lineages if each.is_open and each.trials < _budget(each.rung)]
        return max(left, key=lambda each: (each.rung, each.trials), default=None)


def _budget(rung: int) -> int:
    return RUNG_TRIALS * int(FACTOR**rung)


def dsat_binary(landscape: Landscape, seed: int) -> Scripted:
    """One launch goes to its profile run, as in all three."""
    return Scripted(_Searcher(stages_of(landscape), seed).binary(), first_launches=1)


def dsat_random(landscape: Landscape, seed: int) -> Scripted:
    """Its default search."""
    return Scripted(_Searcher(stages_of(landscape), seed).random(), first_launches=1)


def dsat_asha(landscape: Landscape, seed: int) -> Scripted:
    """Successive halving of lineages."""
    return Scripted(_Searcher(stages_of(landscape), seed).asha(), first_launches=1)
