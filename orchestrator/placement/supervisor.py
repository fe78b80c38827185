"""All running groups of a pool."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.outcome import Cancelled, Outcome, Preempted
from orchestrator.placement.group import Attempt, Group
from orchestrator.placement.hosts import RankHost


@dataclass(frozen=True)
class Finished:
    """An attempt that is over; its hosts are free."""

    token: str
    outcome: Outcome
    nodes: tuple[str, ...]
    """The node of each rank, in rank order."""


class Supervisor:
    """Starts groups and tells of each one's end exactly once."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    @property
    def running(self) -> list[str]:
        """Tokens of the attempts that are not over."""
        return list(self._groups)

    def start(self, attempt: Attempt, hosts: Sequence[RankHost]) -> None:
        """Start an attempt on `hosts`, one for each rank."""
        group = Group(attempt, hosts)
        self._groups[attempt.token] = group
        group.start()

    def end(self, token: str, outcome: Cancelled | Preempted) -> None:
        """End an attempt, with this outcome; unknown tokens have no effect."""
        if token in self._groups:
            self._groups[token].end(outcome)

    def collect(self) -> list[Finished]:
        """The attempts that are over since the last call; never blocks."""
        over = []
        for token, group in list(self._groups.items()):
            outcome = group.poll()
            if outcome is not None:
                del self._groups[token]
                over.append(Finished(token, outcome, tuple(host.node for host in group.hosts)))
        return over


def place_name(nodes: Sequence[str]) -> str:
    """The node of rank 0, and how many others took part."""
    others = len(set(nodes)) - 1
    return f"{nodes[0]} + {others}" if others else nodes[0]
