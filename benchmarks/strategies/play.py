"""Plays a strategy on a landscape: launches what it asks for, tells what came of it, and keeps score.

A launch is a distinct configuration; one that is asked for again is answered from memory and costs nothing. What a run
measures is the table's value with the landscape's noise. The incumbent is the fastest run so far as measured; regret is
judged by the table's own value of it, against the best of the table.
"""

import heapq
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.landscapes.table import Landscape

ASKS_A_LAUNCH = 10
"""A strategy that keeps asking for what it knows is stopped after so many asks for each launch of the budget."""
_MEMORY_NOISE = 0.003
"""Standard deviation of a measured peak's logarithm. Assumed: on a GPU it is a count of what was allocated."""
_DURATIONS = (0.8, 1.2)
_OOM_SHARE = 0.45
"""Of a usual run: how long runs take, and how much of that until one is out of memory. Assumed; with several launches
at once they decide the order of the answers, and nothing else."""


@dataclass(frozen=True)
class Result:
    """What a launch told. Without `is_ok` there are no numbers, only which memory ran out (`gpu`, `host`, or "")."""

    is_ok: bool
    oom: str = ""
    tokens_per_s: float = 0.0
    peak_gib: float = 0.0
    host_gib: float = 0.0


class Unplayable(Exception):
    """A strategy cannot play a landscape; the text names it and what it lacks."""


class Strategy(Protocol):
    """`ask` gives the index of a candidate; None: nothing before a running launch has ended, or nothing at all.

    `first_launches` are spent before the first ask, on what measures no candidate (a profile run)."""

    first_launches: int

    def ask(self) -> int | None:
        """The next candidate."""

    def tell(self, candidate: int, result: Result) -> None:
        """What became of it."""


Factory = Callable[[Landscape, int], Strategy]
"""Of a strategy for a landscape, by a seed."""
Script = Generator[int, Result, None]
"""A serial strategy written as a story: it yields a candidate and receives what became of it."""


class Scripted:
    """A script as a Strategy: one launch at a time, however many workers wait."""

    def __init__(self, script: Script, first_launches: int = 0) -> None:
        self.first_launches = first_launches
        self._script = script
        self._asked = next(script, None)
        self._is_running = False

    def ask(self) -> int | None:
        """See Strategy."""
        if self._is_running:
            return None
        self._is_running = self._asked is not None
        return self._asked

    def tell(self, candidate: int, result: Result) -> None:
        """See Strategy."""
        self._is_running = False
        try:
            self._asked = self._script.send(result)
        except StopIteration:
            self._asked = None


@dataclass
class Run:
    """One search. `regrets` after each launch, 1 before anything ran; `asks_s` how long each ask took."""

    regrets: list[float] = field(default_factory=list)
    ooms: list[bool] = field(default_factory=list)
    asks_s: list[float] = field(default_factory=list)

    def launches_to(self, regret: float) -> int | None:
        """The first launch after which the incumbent is within `regret` of the best; None: never."""
        return next((n for n, reached in enumerate(self.regrets, start=1) if reached <= regret + 1e-9), None)

    def regret_after(self, launches: int) -> float:
        """After so many launches, or at the end when there were fewer."""
        return self.regrets[min(launches, len(self.regrets)) - 1] if self.regrets else 1.0

    @property
    def oom_share(self) -> float:
        """Of its launches."""
        return float(np.mean(self.ooms)) if self.ooms else 0.0


class _Machine:
    """Runs launches: what a run tells is drawn once for each candidate."""

    def __init__(self, landscape: Landscape, seed: int) -> None:
        self._landscape = landscape
        self._rng = np.random.default_rng([seed, 2026])

    def launch(self, candidate: int) -> tuple[float, Result]:
        """How long it takes, in units of a usual run, and what it tells. An OOM shows early."""
        land, rng = self._landscape, self._rng
        duration, speed, memory = rng.uniform(*_DURATIONS), rng.normal(0, land.noise), rng.normal(0, _MEMORY_NOISE)
        if not land.feasible[candidate]:
            return _OOM_SHARE * duration, Result(False, land.oom_kinds[candidate])
        factor = np.exp(memory)
        return duration, Result(
            True,
            "",
            float(land.tokens_per_s[candidate] * np.exp(speed)),
            float(land.peak_gib[candidate] * factor),
            float(land.host_gib[candidate] * factor),
        )


def play(landscape: Landscape, factory: Factory, seed: int, budget: int, workers: int = 1) -> Run:
    """Search with `workers` launches at once, until `budget` launches or until the strategy has nothing left."""
    strategy, machine, run = factory(landscape, seed), _Machine(landscape, seed), Run()
    run.regrets += [1.0] * strategy.first_launches
    run.ooms += [False] * strategy.first_launches
    known: dict[int, Result] = {}
    running: list[tuple[float, int, int, Result]] = []
    started, now, best = strategy.first_launches, 0.0, 0.0
    in_flight: set[int] = set()
    while True:
        while len(running) < workers and started < budget and len(run.asks_s) < ASKS_A_LAUNCH * budget:
            begun = time.perf_counter()
            candidate = strategy.ask()
            run.asks_s.append(time.perf_counter() - begun)
            if candidate is None or candidate in in_flight:
                break
            if candidate in known:
                strategy.tell(candidate, known[candidate])
                continue
            duration, result = machine.launch(candidate)
            started += 1
            in_flight.add(candidate)
            heapq.heappush(running, (now + duration, started, candidate, result))
        if not running:
            return run
        now, _, candidate, result = heapq.heappop(running)
        in_flight.remove(candidate)
        known[candidate] = result
        strategy.tell(candidate, result)
        regret = run.regrets[-1] if run.regrets else 1.0
        if result.is_ok and result.tokens_per_s > best:
            best = result.tokens_per_s
            regret = 1 - float(landscape.tokens_per_s[candidate]) / landscape.best
        run.regrets.append(regret)
        run.ooms.append(bool(result.oom))
