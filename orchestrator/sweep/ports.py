"""The treaties between the sweep and what serves it. One conformance suite per port binds every implementer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.outcome import Outcome, Rejected
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.placement.cluster import ClusterView
from orchestrator.space.candidates import Candidate

NODE_TIMEOUT_S = 600.0
"""How long a sweep waits by default for nodes that its next trial needs while nothing runs: a cloud brings one in
minutes."""


@dataclass(frozen=True)
class Launch:
    """One attempt to start. `directory` exists and holds `config.json`; `token` is unique over all attempts."""

    token: str
    directory: Path
    config: TrialConfig
    avoid: frozenset[str] = frozenset()
    """See `TrialPool.has_room`."""


@dataclass(frozen=True)
class Ended:
    """An attempt is over: its outcome, where it ran, and no process of it is left."""

    token: str
    outcome: Outcome
    node: str | None = None
    nodes: tuple[str, ...] = ()
    """The node of each rank, in rank order."""


class TrialPool(Protocol):
    """Runs attempts on devices. One thread, the driver's, calls it.

    Order of calls: `cluster` and `check` any time; `launch` only while `has_room` is true for that world size; each
    launched token comes back exactly once from `wait`, also after `cancel`; `close` last, once.
    """

    def cluster(self) -> ClusterView:
        """The devices as they are now, those used by others told apart. Raises ClusterUnreachableError."""

    def check(self, world_size: int, nodes: int | None) -> None:
        """Raise UnplaceableError, saying what the cluster has, when such a trial could never be placed."""

    def use(self, kind: str | None) -> None:
        """From now on there are only nodes of this kind (`NodeView.kind`); None: all."""

    def has_room(self, world_size: int, avoid: frozenset[str] = frozenset(), nodes: int | None = None) -> bool:
        """Whether `launch` would start a trial of `world_size` ranks over `nodes` nodes (None: as few as hold them) at
        once. Never blocks for long.

        Nodes called as in `avoid` are left out, unless the others together could never hold the trial.

        Raises ClusterUnreachableError when the cluster is gone, or too small for such a trial for good.
        """

    def waits_for(self) -> str:
        """Which nodes the trial that was last asked room for waits for, in words; empty while there are enough."""

    def launch(self, launch: Launch) -> None:
        """Start an attempt and return; its end comes from `wait`, which also drives it on in the meantime.

        A failure to start is an outcome, not an error.
        """

    def wait(self, timeout_s: float) -> list[Ended]:
        """Attempts that ended since the last call; returns early with the first ones, or empty after `timeout_s`.

        Never later than the ends themselves by more than a second. Raises ClusterUnreachableError when the cluster
        is gone for good.
        """

    def cancel(self, token: str) -> None:
        """End an attempt, all of its processes included; its `Ended` follows with `Cancelled`. Unknown: no effect."""

    def close(self) -> None:
        """End everything that was started and give all devices back. Safe to call after any failure."""


class Strategy(Protocol):
    """Chooses what to try next. One thread calls it."""

    def ask(self) -> Candidate | None:
        """A candidate that was never told and is not running; None when the space is exhausted."""

    def expected_gain(self) -> float | None:
        """Of the candidate asked last: expected improvement over the best so far as a share of it, times the
        probability that it fits; None when unknown."""

    def tell(self, candidate: Candidate, outcome: Outcome, values: tuple[float, ...] | None) -> None:
        """The candidate's final outcome. `values` holds the objectives in the spec's order, None without numbers."""

    def close(self) -> None:
        """Release the store."""


class Gate(Protocol):
    """Decides whether a candidate is worth a launch. One thread calls it."""

    def judge(self, candidate: Candidate) -> Rejected | None:
        """Why `candidate` is not launched; None lets it pass."""

    def learn(self, record: TrialRecord) -> None:
        """A trial is over for good."""


class RunLog(Protocol):
    """Hears of every transition after it is durable. Must return at once and must not raise for a failure of its
    own service; a log that was away catches up from the records."""

    def sweep_changed(self, sweep: SweepRecord) -> None:
        """The sweep started, resumed or ended."""

    def trial_changed(self, trial: TrialRecord) -> None:
        """A trial was launched or ended."""

    def close(self) -> None:
        """Finish what can be finished within seconds."""
