"""Trials over a Ray cluster: a `TrialPool` of lanes that are kept warm between trials."""

import time
from collections import Counter
from dataclasses import dataclass

import ray

from orchestrator.backends.ray_connect import Pulse, join, start_private
from orchestrator.backends.ray_lane import Lane
from orchestrator.backends.ray_view import RayNode, cluster_view, device_shape, draining_nodes, living_nodes
from orchestrator.contract.errors import ClusterUnreachableError, UnplaceableError
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Cancelled, Infra, Outcome, Preempted
from orchestrator.placement.cluster import ClusterView
from orchestrator.placement.group import Attempt, host_failure
from orchestrator.placement.lanes import check, place
from orchestrator.placement.supervisor import Supervisor
from orchestrator.placement.template_host import DEFAULT_TEMPLATE
from orchestrator.sweep.ports import Ended, Launch

POLL_INTERVAL_S = 0.1
"""Upper bound between two looks at the running groups; a reply of a seat ends the wait at once."""
LANE_DEADLINE_S = 120.0
"""A lane whose first seat has not answered for this long is given up."""
DRAINS_INTERVAL_S = 0.5
"""How often Ray is asked which nodes are about to be taken away."""
LEAVE_BEFORE_S = 3.0
"""A trial on such a node is ended so long before the node's time, so that its ranks are gone and its end is told."""
NODES_DEADLINE_S = 60.0
"""How long a cluster that has become too small for any trial is waited for."""
_LOOPBACK = "127.0.0.1"


@dataclass
class _Opening:
    """A launched attempt whose lane has yet to name the port of the rank group."""

    launch: Launch
    lane: Lane
    port: ray.ObjectRef
    since_s: float


class RayPool:
    """See `orchestrator.sweep.ports.TrialPool`.

    `address` is the `host:port` of a cluster's head; None starts a private cluster on this machine, of `cpus` CPUs
    (None: all cores). A device is a GPU, or in a cluster without GPUs `threads_per_device` CPUs.
    """

    def __init__(
        self,
        address: str | None = None,
        threads_per_device: int = 1,
        template_module: str = DEFAULT_TEMPLATE,
        cpus: int | None = None,
    ) -> None:
        self._connection = start_private(cpus) if address is None else join(address)
        self._pulse = Pulse(self._connection.address)
        self._is_lost = False
        self._too_small_s: float | None = None
        self._drains_due_s = 0.0
        self._threads = threads_per_device
        self._module = template_module
        self._supervisor = Supervisor()
        self._lanes: list[Lane] = []
        self._busy: dict[str, Lane] = {}
        self._opening: dict[str, _Opening] = {}
        self._ports: dict[str, int] = {}
        self._spread: dict[int, int | None] = {}
        self._ended: list[Ended] = []

    def cluster(self) -> ClusterView:
        """See `TrialPool`."""
        self._feel_pulse()
        return self._view(living_nodes())

    def check(self, world_size: int, nodes: int | None) -> None:
        """See `TrialPool`."""
        check(self.cluster(), world_size, nodes)
        self._spread[world_size] = nodes

    def has_room(self, world_size: int, avoid: frozenset[str] = frozenset()) -> bool:
        """See `TrialPool`."""
        self._feel_pulse()
        self._hear_of_drains()
        avoid = self._avoidable(world_size, avoid)
        if self._idle(world_size, avoid) is not None:
            return True
        try:
            has_seats = self._seats(world_size, avoid) is not None
        except UnplaceableError as error:
            self._wait_for_nodes(error)
            return False
        self._too_small_s = None
        return has_seats

    def launch(self, launch: Launch) -> None:
        """See `TrialPool`."""
        world_size = launch.config.world_size
        avoid = self._avoidable(world_size, launch.avoid)
        lane = self._idle(world_size, avoid) or self._open(world_size, avoid)
        assert lane is not None, "launch is called only while has_room is true"
        self._busy[launch.token] = lane
        port = lane.hosts[0].seat.port.remote()
        self._opening[launch.token] = _Opening(launch, lane, port, time.monotonic())

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `TrialPool`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._feel_pulse()
            self._hear_of_drains()
            self._start_opened()
            ended = self._collect()
            left_s = deadline_s - time.monotonic()
            if ended or left_s <= 0:
                return ended
            self._sleep(min(left_s, POLL_INTERVAL_S))

    def cancel(self, token: str) -> None:
        """See `TrialPool`."""
        self._supervisor.end(token, Cancelled())
        if token in self._opening:
            self._give_up(self._opening[token], Cancelled())

    def close(self) -> None:
        """See `TrialPool`."""
        # without a head every call about a lane would block; seats end when their node gives up on the head
        for lane in [] if self._is_lost else self._lanes:
            lane.close()
        self._lanes.clear()
        self._connection.close()

    def _feel_pulse(self) -> None:
        try:
            self._pulse.check()
        except ClusterUnreachableError:
            self._is_lost = True
            raise

    def _wait_for_nodes(self, error: UnplaceableError) -> None:
        """A cluster that has become too small may grow back; once nothing runs, it gets `NODES_DEADLINE_S`."""
        now_s = time.monotonic()
        if self._busy or self._too_small_s is None:
            self._too_small_s = now_s
        if now_s - self._too_small_s > NODES_DEADLINE_S:
            raise ClusterUnreachableError(f"the cluster has lost nodes and none came back: {error}") from error

    def _view(self, nodes: list[RayNode]) -> ClusterView:
        own = sum((lane.held for lane in self._lanes), Counter[str]())
        return cluster_view(nodes, device_shape(nodes, self._threads), own)

    def _idle(self, world_size: int, avoid: frozenset[str]) -> Lane | None:
        busy = {id(lane) for lane in self._busy.values()}
        for lane in self._lanes:
            is_fit = len(lane.hosts) == world_size and not lane.is_broken and not lane.is_on(avoid)
            if id(lane) not in busy and is_fit:
                return lane
        return None

    def _avoidable(self, world_size: int, avoid: frozenset[str]) -> frozenset[str]:
        """`avoid`, or nothing where the other nodes could never hold the trial."""
        if not avoid:
            return avoid
        others = [node for node in living_nodes() if not node.is_one_of(avoid)]
        try:
            check(self._view(others), world_size, self._spread.get(world_size))
        except UnplaceableError:
            return frozenset()
        return avoid

    def _hear_of_drains(self) -> None:
        """Leave nodes that are about to be taken away: idle lanes at once, trials shortly before the node's time."""
        now_s = time.monotonic()
        if now_s < self._drains_due_s:
            return
        self._drains_due_s = now_s + DRAINS_INTERVAL_S
        deadlines_s = draining_nodes()
        busy = {id(lane): token for token, lane in self._busy.items()}
        for lane in list(self._lanes):
            ends_s = [deadlines_s[key] for key in lane.nodes if key in deadlines_s]
            if not ends_s:
                continue
            lane.tell_draining(frozenset(deadlines_s))
            token = busy.get(id(lane))
            if token is None:
                self._drop(lane)
            elif min(ends_s) - time.time() < LEAVE_BEFORE_S:
                self._leave(token, lane)

    def _leave(self, token: str, lane: Lane) -> None:
        host = next(host for host in lane.hosts if host.is_draining)
        outcome = Preempted(node=host.node, evidence=f"Ray drains node {host.node}: it is about to be taken away")
        self._supervisor.end(token, outcome)
        if token in self._opening:
            self._give_up(self._opening[token], outcome)

    def _seats(self, world_size: int, avoid: frozenset[str]) -> list[RayNode] | None:
        """Nodes for the ranks of a new lane, on devices that nobody and no busy lane of ours holds."""
        nodes = [node for node in living_nodes() if not node.is_one_of(avoid)]
        view = self._view(nodes)
        busy = sum((lane.held for lane in self._busy.values()), Counter[str]())
        free = [
            node_view.model_copy(update={"free_devices": node_view.free_devices - busy[node.key]})
            for node_view, node in zip(view.nodes, nodes, strict=True)
        ]
        shares = place(view.model_copy(update={"nodes": tuple(free)}), world_size, self._spread.get(world_size))
        if shares is None:
            return None
        by_name = {node.name: node for node in nodes}
        return [by_name[share.node] for share in shares for _ in range(share.devices)]

    def _open(self, world_size: int, avoid: frozenset[str]) -> Lane | None:
        seats = self._seats(world_size, avoid)
        if seats is None:
            return None
        self._make_way(Counter(node.key for node in seats))
        lane = Lane(seats, device_shape(living_nodes(), self._threads), self._module, self._threads)
        self._lanes.append(lane)
        return lane

    def _make_way(self, wanted: Counter[str]) -> None:
        """Close idle lanes that hold devices of the `wanted` nodes beyond what is free there."""
        nodes = living_nodes()
        unheld = {node.key: view.free_devices for node, view in zip(nodes, self._view(nodes).nodes, strict=True)}
        for lane in self._lanes:
            for key, devices in lane.held.items():
                unheld[key] = unheld.get(key, 0) - devices
        busy = {id(lane) for lane in self._busy.values()}
        for lane in [lane for lane in self._lanes if id(lane) not in busy]:
            if any(unheld.get(key, 0) < wanted[key] for key in wanted if key in lane.held):
                self._drop(lane)
                for key, devices in lane.held.items():
                    unheld[key] += devices

    def _drop(self, lane: Lane) -> None:
        lane.close()
        self._lanes.remove(lane)

    def _start_opened(self) -> None:
        for token, opening in list(self._opening.items()):
            if ray.wait([opening.port], timeout=0)[0]:
                self._start(opening)
            elif time.monotonic() - opening.since_s > LANE_DEADLINE_S:
                nodes = ", ".join(sorted({host.node for host in opening.lane.hosts}))
                cause = f"Ray did not start the lane on {nodes} within {LANE_DEADLINE_S:.0f} s"
                first = opening.lane.hosts[0].node
                self._give_up(self._opening[token], Infra(cause=cause, node=first, blames="node"))

    def _start(self, opening: _Opening) -> None:
        launch, hosts = opening.launch, opening.lane.hosts
        try:
            port: int = ray.get(opening.port)
        except ray.exceptions.ActorUnavailableError:
            opening.port = hosts[0].seat.port.remote()
            return
        except ray.exceptions.RayError as error:
            failed = hosts[0].failure(launch.token, error)
            self._give_up(opening, host_failure(failed, hosts[0].node))
            return
        if port in self._ports.values():
            opening.port = hosts[0].seat.port.remote()
            return
        del self._opening[launch.token]
        self._ports[launch.token] = port
        is_one_node = len(set(opening.lane.nodes)) == 1
        address = _LOOPBACK if is_one_node else hosts[0].address
        self._supervisor.start(Attempt(launch.token, launch.directory.resolve(), launch.config, address, port), hosts)

    def _give_up(self, opening: _Opening, outcome: Outcome) -> None:
        token = opening.launch.token
        AttemptFiles(opening.launch.directory).write_outcome(outcome)
        del self._opening[token], self._busy[token]
        self._drop(opening.lane)
        self._ended.append(Ended(token, outcome, opening.lane.hosts[0].node))

    def _collect(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        for finished in self._supervisor.collect():
            lane = self._busy.pop(finished.token)
            del self._ports[finished.token]
            if lane.is_broken or lane.is_draining:
                self._drop(lane)
            ended.append(Ended(finished.token, finished.outcome, finished.node))
        return ended

    def _sleep(self, timeout_s: float) -> None:
        pending = [opening.port for opening in self._opening.values()]
        pending += [ref for lane in self._busy.values() for host in lane.hosts for ref in host.pending]
        if pending:
            ray.wait(pending, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)
