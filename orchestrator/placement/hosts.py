"""The words between a rank group and whatever runs its ranks on one device."""

from dataclasses import dataclass
from typing import Literal, Protocol

from orchestrator.contract.rank import RankRequest


@dataclass(frozen=True)
class RankBegan:
    """The rank of `token` runs as process `pid` of its node."""

    token: str
    pid: int


@dataclass(frozen=True)
class RankEnded:
    """The rank of `token` is over and no process of it is left. `status` is the exit code or minus the signal."""

    token: str
    status: int
    leftovers: int = 0
    """Processes that it left behind and that had to be ended."""
    oom_evidence: str | None = None
    """What shows that it was ended for want of host memory."""


@dataclass(frozen=True)
class RankFailed:
    """The rank of `token` could not be run, or its surroundings broke under it; no process of it is left.

    `node`: the node is gone. `preempted`: it was taken away on purpose. `host_memory`: Ray's memory monitor ended the
    surroundings. `device`: others hold memory of the device. `infra`: all else.
    """

    token: str
    cause: Literal["node", "preempted", "host_memory", "device", "infra"]
    evidence: str


HostReply = RankBegan | RankEnded | RankFailed


class RankHost(Protocol):
    """Runs one rank at a time on one device. Every `submit` is answered by exactly one RankEnded or RankFailed."""

    @property
    def node(self) -> str:
        """Name of the node, for people."""

    @property
    def address(self) -> str:
        """Address at which ranks on other nodes reach this one."""

    def submit(self, request: RankRequest) -> None:
        """Start a rank; returns at once."""

    def kill(self, token: str) -> None:
        """End the rank and every process that came from it; its RankEnded follows. Unknown tokens have no effect."""

    def dump_stacks(self, token: str) -> None:
        """Ask the rank to write its stack to its log; one that cannot stays silent."""

    def replies(self) -> list[HostReply]:
        """What happened since the last call; never blocks."""
