"""One device of a Ray node: the actor that owns its template, and the driver's handle on it."""

import asyncio
import os
import time

import ray
from ray.actor import ActorHandle

from orchestrator.backends.ray_head import HeadAwayError
from orchestrator.backends.ray_view import RayNode, node_end
from orchestrator.contract.rank import RankRequest
from orchestrator.placement.dirt import CleanWait, DirtWatch
from orchestrator.placement.environment import template_environment
from orchestrator.placement.hosts import HostReply, RankEnded, RankFailed
from orchestrator.placement.local_devices import threads_per_gpu
from orchestrator.placement.ports import free_port
from orchestrator.placement.template_host import TemplateHost

LONG_POLL_S = 5.0
UNAVAILABLE_DEADLINE_S = 60.0
"""Calls that fail by a broken connection are repeated for this long while the actor still lives."""
_LOOK_INTERVAL_S = 0.01


class Seat:
    """Runs one rank at a time. Every method may be called twice with the same effect as once: calls get repeated."""

    def __init__(self, node: str, module: str, threads_per_slot: int, gpus: tuple[int, float] | None) -> None:
        """`gpus`: how many GPUs and CPUs the cluster gives out on this node; None for a slot of `threads_per_slot`
        CPUs."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if gpus is not None else None
        # a GPU's share of the cores is this node's own, whatever the driver's machine has
        self._threads = threads_per_gpu(*gpus) if gpus is not None else None
        environment = template_environment(os.environ, visible, self._threads or threads_per_slot)
        self._host = TemplateHost(node, environment, module)
        self._host.start()
        self._watch = DirtWatch(visible)
        self._waiting: tuple[RankRequest, CleanWait] | None = None
        self._token: str | None = None
        self._said: list[HostReply] = []

    async def port(self) -> int:
        """A free port of this node."""
        return free_port()

    async def submit(self, request_json: str) -> None:
        """Start a rank."""
        request = RankRequest.model_validate_json(request_json)
        if request.token == self._token:
            return
        self._token, self._said = request.token, []
        if self._threads is not None:
            threads = {"OMP_NUM_THREADS": str(self._threads)}
            request = request.model_copy(update={"environment": request.environment | threads})
        self._waiting = (request, CleanWait(self._watch))
        self._begin()

    def _begin(self) -> None:
        """Begin the rank that waits for a clean device, once it is."""
        if self._waiting is None or not self._waiting[1].is_over:
            return
        (request, wait), self._waiting = self._waiting, None
        if wait.dirt:
            cause = f"dirty_gpu: the device on node {self._host.node} is used by others: {'; '.join(wait.dirt)}"
            self._said.append(RankFailed(request.token, "device", cause))
        else:
            self._host.submit(request)

    async def kill(self, token: str) -> None:
        """End a rank."""
        if self._waiting is not None and self._waiting[0].token == token:
            self._waiting = None
            self._said.append(RankFailed(token, "infra", "ended before its device was clean"))
        self._host.kill(token)

    async def dump_stacks(self, token: str) -> None:
        """Ask a rank for its stack."""
        self._host.dump_stacks(token)

    async def said(self, token: str, since: int, wait_s: float) -> list[HostReply]:
        """Replies about `token` from the `since`-th on; waits up to `wait_s` for the first of them."""
        deadline_s = time.monotonic() + wait_s
        while True:
            self._begin()
            self._said += self._host.replies()
            new = [reply for reply in self._said if reply.token == token][since:]
            if new or time.monotonic() > deadline_s:
                return new
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def close(self) -> None:
        """End the template and all that came from it."""
        self._host.close()


class RayHost:
    """A `RankHost` on another node, through its `Seat`. The driver's thread calls it; no method waits for Ray."""

    def __init__(self, seat: ActorHandle, node: RayNode) -> None:
        self.seat = seat
        self.node = node.name
        self.address = node.address
        self.is_broken = False
        self.is_draining = False
        """Its node is about to be taken away."""
        self._key = node.key
        self._request: RankRequest | None = None
        self._sent: ray.ObjectRef | None = None
        self._poll: ray.ObjectRef | None = None
        self._heard = 0
        self._unavailable_s: float | None = None

    @property
    def pending(self) -> list[ray.ObjectRef]:
        """What becomes ready when there may be replies."""
        return [self._poll] if self._poll is not None else []

    def submit(self, request: RankRequest) -> None:
        """See `RankHost`."""
        self._request, self._heard, self._unavailable_s = request, 0, None
        self._call()

    def kill(self, token: str) -> None:
        """See `RankHost`."""
        self.seat.kill.remote(token)

    def dump_stacks(self, token: str) -> None:
        """See `RankHost`."""
        self.seat.dump_stacks.remote(token)

    def replies(self) -> list[HostReply]:
        """See `RankHost`."""
        if self._request is None or self._poll is None or not ray.wait([self._poll], timeout=0)[0]:
            return []
        try:
            new: list[HostReply] = ray.get(self._poll)
            if self._sent is not None:
                ray.get(self._sent)
        except ray.exceptions.ActorUnavailableError as error:
            return self._unavailable(error)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            return [self._broken(error)]
        self._sent = self._unavailable_s = None
        self._heard += len(new)
        if any(isinstance(reply, RankEnded | RankFailed) for reply in new):
            self._request = self._poll = None
        else:
            self._listen()
        return new

    def _call(self) -> None:
        assert self._request is not None
        self._sent = self.seat.submit.remote(self._request.model_dump_json())
        self._listen()

    def _listen(self) -> None:
        assert self._request is not None
        self._poll = self.seat.said.remote(self._request.token, self._heard, LONG_POLL_S)

    def _unavailable(self, error: ray.exceptions.RayError) -> list[HostReply]:
        now_s = time.monotonic()
        self._unavailable_s = self._unavailable_s or now_s
        if now_s - self._unavailable_s > UNAVAILABLE_DEADLINE_S:
            return [self._broken(error)]
        self._call()
        return []

    def _broken(self, error: ray.exceptions.RayError) -> RankFailed:
        assert self._request is not None
        token = self._request.token
        self.is_broken = True
        self._request = self._poll = self._sent = None
        return self.failure(token, error)

    def failure(self, token: str, error: ray.exceptions.RayError) -> RankFailed:
        """What the death of the seat means for its rank."""
        text = str(error)
        if isinstance(error, ray.exceptions.OutOfMemoryError) or "memory pressure" in text or "OutOfMemory" in text:
            evidence = f"Ray's memory monitor ended the worker on node {self.node}: {text}"
            return RankFailed(token, "host_memory", evidence)
        try:
            end = node_end(self._key)
        except HeadAwayError:
            return RankFailed(
                token, "infra", f"the Ray worker on node {self.node} ended while the head was away: {text}"
            )
        if end is None:
            return RankFailed(token, "infra", f"the Ray worker on node {self.node} ended: {text}")
        if end.is_on_purpose or self.is_draining:
            return RankFailed(token, "preempted", f"node {self.node} was taken away ({end.reason}): {text}")
        return RankFailed(token, "node", f"node {self.node} is gone ({end.reason}): {text}")
