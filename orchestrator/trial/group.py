"""The ranks of one trial: who this process is among them, and how they agree."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_GLOO_ROOM_BYTES = 25 * 2**20
"""What a gloo group takes: the stacks of three threads (8 MiB each, glibc's default) and a little more."""


@dataclass(frozen=True)
class RankPlace:
    """torchrun's view of this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ranks_on_node: int = 1
    """As torchrun tells; without it all ranks are taken to share the node."""

    @classmethod
    def from_environment(cls) -> "RankPlace":
        """Read RANK, LOCAL_RANK and WORLD_SIZE; a process without them is the only rank."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            ranks_on_node=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")),
        )

    def to_environment(self) -> dict[str, str]:
        """The variables that torch, DeepSpeed and transformers look for."""
        return {"RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank), "WORLD_SIZE": str(self.world_size)}


def require_gloo_room() -> None:
    """Fail as any allocation does when a gloo group finds no room. Gloo itself waits for ever for a thread that was
    refused its memory after others had started."""
    torch.empty(_GLOO_ROOM_BYTES, dtype=torch.uint8)


class Group:
    """The process group of a trial. Every method is a collective: all ranks call it in the same order."""

    def __init__(self, place: RankPlace, backend: str, timeout_s: float) -> None:
        self.place = place
        self._device = torch.device("cuda", place.local_rank) if backend == "nccl" else torch.device("cpu")
        timeout = timedelta(seconds=timeout_s)
        if backend == "gloo":
            require_gloo_room()
        if place.world_size == 1:
            # no port is opened, so none can be taken by somebody else
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            if os.environ.get("MASTER_ADDR") in _LOOPBACK:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend, timeout=timeout)

    def decide(self, stop: bool) -> bool:
        """Rank 0's `stop`, on every rank."""
        if self.place.world_size == 1:
            return stop
        flag = torch.tensor([int(stop)], device=self._device)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    def gather(self, value: Value) -> list[Value]:
        """The picklable `value` of every rank, by rank."""
        if self.place.world_size == 1:
            return [value]
        values: list[Value | None] = [None] * self.place.world_size
        dist.all_gather_object(values, value)
        return [each for each in values if each is not None]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
