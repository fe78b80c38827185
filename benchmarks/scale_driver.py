"""The real `brimful`, whose trials end at once: `python -m benchmarks.scale_driver FACTS.json [--lanes 128]
[--stop-after N] -- run SPEC ...`.

Everything but the pool is as it always is: strategy, gate, state machine, ledger, views and, unless it is left out,
MLflow. What a trial comes to is made up and means nothing; only the clocks are real. What the command took is
written to FACTS.json as `DriverFacts`.
"""

import argparse
import hashlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

import psutil

from orchestrator import wiring
from orchestrator.cli import main as brimful
from orchestrator.contract.config import TrialConfig
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Cancelled, Measurement, Ok, OomDevice, Outcome, Phase, RankMemory
from orchestrator.contract.rank import Event
from orchestrator.contract.units import MIB
from orchestrator.placement.cluster import ClusterView, NodeView
from orchestrator.space.candidates import Candidate
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.ports import Ended, Launch, Strategy

NODES = 16
OOM_SHARE = 0.1
"""Of the made-up trials, that end out of memory."""
SPREAD = 0.1
"""How far made-up speeds of alike configurations lie apart at most, as a share."""
RESIDENT_EVERY = 200
"""Trials between two looks at the driver's resident memory."""


@dataclass
class DriverFacts:
    """Times in seconds. `started_s`: from the process' start to the first launch, None without one."""

    started_s: float | None = None
    run_s: float = 0.0
    """From the first launch to the last end."""
    trials: int = 0
    asks_s: list[float] = field(default_factory=list)
    tells_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    """Of each end, since the first launch."""
    resident_bytes: list[int] = field(default_factory=list)
    """Every RESIDENT_EVERY ends."""
    peak_resident_bytes: int = 0
    whole_s: float = 0.0
    """The command's wall time."""
    processor_s: float = 0.0


class TimedStrategy:
    """A strategy whose answers are timed."""

    def __init__(self, of: Strategy, facts: DriverFacts) -> None:
        self._of = of
        self._facts = facts

    def ask(self) -> Candidate | None:
        """See `Strategy`."""
        began_s = time.perf_counter()
        candidate = self._of.ask()
        self._facts.asks_s.append(time.perf_counter() - began_s)
        return candidate

    def expected_gain(self) -> float | None:
        """See `Strategy`."""
        return self._of.expected_gain()

    def tell(self, candidate: Candidate, outcome: Outcome, values: tuple[float, ...] | None) -> None:
        """See `Strategy`."""
        began_s = time.perf_counter()
        self._of.tell(candidate, outcome, values)
        self._facts.tells_s.append(time.perf_counter() - began_s)

    def close(self) -> None:
        """See `Strategy`."""
        self._of.close()


class InstantPool:
    """A pool of `lanes` devices whose trials have ended by the next `wait`, with the files that a real pool leaves.

    After `stop_after` ends it asks the sweep to stop, as `brimful stop` does.
    """

    def __init__(self, lanes: int, facts: DriverFacts, stop_after: int | None) -> None:
        self._lanes = lanes
        self._facts = facts
        self._stop_after = stop_after
        self._running: dict[str, Launch] = {}
        self._cancelled: set[str] = set()
        self._began_s = 0.0

    def cluster(self) -> ClusterView:
        """See `TrialPool`."""
        share = -(-self._lanes // NODES)
        nodes = (
            NodeView(name=f"node{each}", address="127.0.0.1", devices=share, free_devices=share)
            for each in range(NODES)
        )
        return ClusterView(nodes=tuple(nodes), device_kind="made-up device")

    def check(self, world_size: int, nodes: int | None) -> None:
        """See `TrialPool`."""

    def use(self, kind: str | None) -> None:
        """See `TrialPool`."""

    def waits_for(self) -> str:
        """See `TrialPool`."""
        return ""

    def has_room(self, world_size: int, avoid: frozenset[str] = frozenset(), nodes: int | None = None) -> bool:
        """See `TrialPool`."""
        return len(self._running) + world_size <= self._lanes

    def launch(self, launch: Launch) -> None:
        """See `TrialPool`."""
        if self._facts.started_s is None:
            self._began_s = time.time()
            self._facts.started_s = self._began_s - psutil.Process().create_time()
        event = Event(event="first_step", time_s=time.time(), rank=0, phase=Phase.FORWARD, step=1)
        AttemptFiles(launch.directory).events.write_text(event.model_dump_json() + "\n")
        self._running[launch.token] = launch

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `TrialPool`."""
        ended = [self._end(launch) for launch in self._running.values()]
        self._running.clear()
        return ended

    def cancel(self, token: str) -> None:
        """See `TrialPool`."""
        self._cancelled.add(token)

    def close(self) -> None:
        """See `TrialPool`."""

    def _end(self, launch: Launch) -> Ended:
        facts = self._facts
        outcome = Cancelled() if launch.token in self._cancelled else made_up(launch.config)
        files = AttemptFiles(launch.directory)
        files.write_outcome(outcome)
        facts.run_s = time.time() - self._began_s
        facts.ended_s.append(facts.run_s)
        facts.trials += 1
        if facts.trials % RESIDENT_EVERY == 0:
            facts.resident_bytes.append(psutil.Process().memory_info().rss)
        if facts.trials == self._stop_after:
            # DIR/HOME/sweeps/NAME/trials/0007/attempt-1
            sweep = launch.directory.parents[2]
            Ledger(sweep.parents[1], sweep.name).request_stop()
        return Ended(launch.token, outcome, node="node0")


def made_up(config: TrialConfig) -> Outcome:
    """An outcome that follows from the configuration: faster and larger with the batch, slower with each stage."""
    knobs = config.knobs
    chance = int.from_bytes(hashlib.sha256(config.candidate.encode()).digest()[:4]) / 2**32
    limit_bytes = config.limits.device_memory_bytes or 1024 * MIB
    peak_bytes = int(limit_bytes * (0.3 + 0.02 * knobs.micro_batch + 0.05 * chance))
    if chance < OOM_SHARE:
        return OomDevice(
            phase=Phase.BACKWARD,
            rank=0,
            requested_bytes=limit_bytes // 10,
            allocated_bytes=limit_bytes - limit_bytes // 20,
            limit_bytes=limit_bytes,
            evidence="made up",
        )
    speed = 1000.0 * knobs.micro_batch**0.3 / (1 + 0.1 * (knobs.zero_stage or 0)) * (1 + SPREAD * (chance - 0.5))
    steps, tokens = 5, 2048
    return Ok(
        measurement=Measurement(
            tokens_per_second=speed,
            tokens_per_second_low=0.99 * speed,
            tokens_per_second_high=1.01 * speed,
            tokens=steps * tokens,
            padding_tokens=0,
            padding_fraction=0.0,
            sequences=16 * steps,
            sum_squared_lengths=16 * steps * 128**2,
            measured_steps=steps,
            measured_s=steps * tokens / speed,
            step_s=(tokens / speed,) * steps,
            peak_memory_bytes=peak_bytes,
            peak_resident_bytes=peak_bytes // 2,
            limit_bytes=limit_bytes,
            ranks=(RankMemory(rank=0, peak_memory_bytes=peak_bytes, peak_resident_bytes=peak_bytes // 2),),
            probe_row_tokens=128,
            reaches_sequence_length=True,
            trainable_parameters=1000,
            total_parameters=100_000,
            first_loss=6.0,
            last_loss=5.0,
            device="cpu",
            device_name="made up",
            threads_per_rank=1,
            resolved={
                "deepspeed": {"train_micro_batch_size_per_gpu": knobs.micro_batch},
                "optimizer": {"type": "adamw"},
            },
        )
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--lanes", type=int, default=128)
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("words", nargs="+", metavar="COMMAND", help="words of brimful's own command line")
    given = parser.parse_args()
    facts = DriverFacts()
    build: Callable[..., Strategy] = wiring.build_strategy

    def timed(*arguments: Any) -> TimedStrategy:
        return TimedStrategy(build(*arguments), facts)

    wiring.build_pool = lambda name, address, *rest: InstantPool(given.lanes, facts, given.stop_after)  # type: ignore[assignment]
    wiring.build_strategy = timed  # type: ignore[assignment]
    sys.argv = ["brimful", *given.words]
    began_s = time.perf_counter()
    try:
        brimful()
    finally:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        facts.whole_s = time.perf_counter() - began_s
        facts.processor_s = usage.ru_utime + usage.ru_stime
        facts.peak_resident_bytes = usage.ru_maxrss * 1024
        given.facts.write_text(dumps(asdict(facts)))


if __name__ == "__main__":
    main()
