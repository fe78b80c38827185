"""Trials over a Ray cluster: a `TrialPool` of lanes that are kept warm between trials."""

import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.autoscaler.sdk import request_resources

from orchestrator.backends.ray_connect import Pulse, join, start_private
from orchestrator.backends.ray_head import HeadAwayError
from orchestrator.backends.ray_lane import Lane, new_lane
from orchestrator.backends.ray_view import (
    RayNode,
    cluster_view,
    coming_nodes,
    device_shape,
    draining_nodes,
    living_nodes,
)
from orchestrator.contract.config import Layout
from orchestrator.contract.errors import ClusterUnreachableError, UnplaceableError
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Cancelled, Infra, Outcome, Preempted
from orchestrator.contract.units import format_duration
from orchestrator.placement.cluster import ClusterView
from orchestrator.placement.group import Attempt, host_failure
from orchestrator.placement.lanes import check, lacks_nodes, node_shares, place
from orchestrator.placement.supervisor import Supervisor, place_name
from orchestrator.placement.template_host import DEFAULT_TEMPLATE
from orchestrator.sweep.ports import NODE_TIMEOUT_S, Ended, Launch

POLL_INTERVAL_S = 0.1
"""Upper bound between two looks at the running groups; a reply of a seat ends the wait at once."""
LANE_DEADLINE_S = 120.0
"""A lane whose first seat has not answered for this long is given up."""
DRAINS_INTERVAL_S = 0.5
"""How often Ray is asked which nodes are about to be taken away."""
LEAVE_BEFORE_S = 3.0
"""A trial on such a node is ended so long before the node's time, so that its ranks are gone and its end is told."""
_LOOPBACK = "127.0.0.1"


@dataclass
class _Opening:
    """A launched attempt whose lane has yet to name the port of the rank group."""

    launch: Launch
    lanes: list[Lane]
    port: ray.ObjectRef
    since_s: float


class RayPool:
    """See `orchestrator.sweep.ports.TrialPool`.

    `address` is the `host:port` of a cluster's head; None starts a private cluster on this machine, of `cpus` CPUs
    (None: all cores). A device is a GPU, or in a cluster without GPUs `threads_per_device` CPUs. A cluster that has
    become too small for the next trial, with nothing running, is waited for `node_timeout_s`.
    """

    def __init__(
        self,
        address: str | None = None,
        threads_per_device: int = 1,
        template_module: str = DEFAULT_TEMPLATE,
        cpus: int | None = None,
        node_timeout_s: float = NODE_TIMEOUT_S,
    ) -> None:
        self._node_timeout_s = node_timeout_s
        self._lack = ""
        self._connection = start_private(cpus) if address is None else join(address)
        self._pulse = Pulse(self._connection.address)
        self._is_lost = False
        self._too_small_s: dict[Layout, float] = {}
        self._drains_due_s = 0.0
        self._threads = threads_per_device
        self._module = template_module
        self._supervisor = Supervisor()
        self._lanes: list[Lane] = []
        self._busy: dict[str, list[Lane]] = {}
        self._opening: dict[str, _Opening] = {}
        self._ports: dict[str, int] = {}
        self._ended: list[Ended] = []
        self._kind: str | None = None
        self._requested: Layout | None = None

    def cluster(self) -> ClusterView:
        """See `TrialPool`."""
        self._feel_pulse()
        try:
            return self._view(self._nodes())
        except HeadAwayError as error:
            raise ClusterUnreachableError(
                f"the head of the Ray cluster at {self._connection.address} does not answer; try again when it does"
            ) from error

    def use(self, kind: str | None) -> None:
        """See `TrialPool`."""
        self._kind = kind

    def check(self, world_size: int, nodes: int | None) -> None:
        """See `TrialPool`."""
        check(self.cluster(), world_size, nodes)

    def has_room(self, world_size: int, avoid: frozenset[str] = frozenset(), nodes: int | None = None) -> bool:
        """See `TrialPool`."""
        self._feel_pulse()
        try:
            self._hear_of_drains()
            return self._has_room(Layout(world_size, nodes), avoid)
        except HeadAwayError:
            return False

    def _has_room(self, layout: Layout, avoid: frozenset[str]) -> bool:
        try:
            has_seats = self._seats(layout, self._avoidable(layout, avoid)) is not None
        except UnplaceableError as error:
            self._wait_for_nodes(layout, str(error).partition(";")[0])
            return False
        if not has_seats and lacks_nodes(self._view(self._nodes()), *layout):
            self._ask_for_nodes(layout)
            return False
        self._too_small_s.pop(layout, None)
        return has_seats

    def launch(self, launch: Launch) -> None:
        """See `TrialPool`."""
        layout = launch.config.layout
        try:
            seats = self._seats(layout, self._avoidable(layout, launch.avoid))
            assert seats is not None, "launch is called only while has_room is true"
            lanes = self._lanes_on(seats)
        except HeadAwayError:
            outcome = Infra(cause="the head of the Ray cluster went away while the trial was launched")
            AttemptFiles(launch.directory).write_outcome(outcome)
            self._ended.append(Ended(launch.token, outcome))
            return
        self._busy[launch.token] = lanes
        port = lanes[0].host.seat.port.remote()
        self._opening[launch.token] = _Opening(launch, lanes, port, time.monotonic())

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `TrialPool`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._feel_pulse()
            with suppress(HeadAwayError):
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
        if not self._is_lost:
            Lane.close(self._lanes)
            if self._requested is not None:
                request_resources(bundles=[])
        self._lanes.clear()
        self._connection.close()

    def _feel_pulse(self) -> None:
        try:
            self._pulse.check()
        except ClusterUnreachableError:
            self._is_lost = True
            raise

    def _require_head(self) -> None:
        if self._pulse.is_away:
            raise HeadAwayError

    def waits_for(self) -> str:
        """See `TrialPool`."""
        return self._lack if self._too_small_s and not self._busy else ""

    def _wait_for_nodes(self, layout: Layout, lack: str) -> None:
        """A cluster that is too small for a trial now may grow: once nothing runs, it gets the node timeout."""
        now_s = time.monotonic()
        since_s = now_s if self._busy else self._too_small_s.get(layout, now_s)
        self._too_small_s[layout] = since_s
        if now_s - since_s > self._node_timeout_s:
            raise ClusterUnreachableError(
                f"no node came within {format_duration(self._node_timeout_s)} (--node-timeout): {lack}; bring nodes "
                "back, then run the same command again to resume"
            )
        most = format_duration(self._node_timeout_s)
        self._lack = f"waiting for nodes, at most {most} (--node-timeout): {lack}"

    def _ask_for_nodes(self, layout: Layout) -> None:
        """Tell the autoscaler what the next trial needs, once, and wait for it."""
        if self._requested != layout:
            bundle = device_shape(self._nodes(), self._threads).bundle
            sizes = node_shares(self.cluster(), *layout)
            request_resources(bundles=[{name: each * size for name, each in bundle.items()} for size in sizes])
            self._requested = layout
        nodes = "" if layout.nodes is None else f" on {layout.nodes} node{'s' * (layout.nodes != 1)}"
        devices = f"{layout.world_size} devices{nodes}"
        self._wait_for_nodes(layout, f"the next trial needs {devices}, and the autoscaler was asked for them")

    def _nodes(self) -> list[RayNode]:
        """Living nodes of the kind that the sweep uses."""
        self._require_head()
        return [node for node in living_nodes() if self._kind is None or node.kind == self._kind]

    def _view(self, nodes: list[RayNode]) -> ClusterView:
        own = Counter(lane.node.key for lane in self._lanes)
        shape = device_shape(nodes, self._threads)
        return cluster_view(nodes, shape, own, coming_nodes(shape, self._kind, len(nodes)))

    @property
    def _idle(self) -> list[Lane]:
        busy = {id(lane) for lanes in self._busy.values() for lane in lanes}
        return [lane for lane in self._lanes if id(lane) not in busy and not lane.is_broken and not lane.is_draining]

    def _avoidable(self, layout: Layout, avoid: frozenset[str]) -> frozenset[str]:
        """`avoid`, or nothing where the other nodes could never hold the trial."""
        if not avoid:
            return avoid
        others = [node for node in self._nodes() if not node.is_one_of(avoid)]
        try:
            check(self._view(others), *layout)
        except UnplaceableError:
            return frozenset()
        return avoid

    def _hear_of_drains(self) -> None:
        """Leave nodes that are about to be taken away: idle lanes at once, trials shortly before the node's time."""
        now_s = time.monotonic()
        if now_s < self._drains_due_s:
            return
        self._require_head()
        self._drains_due_s = now_s + DRAINS_INTERVAL_S
        deadlines_s = draining_nodes()
        busy = {id(lane): token for token, lanes in self._busy.items() for lane in lanes}
        for lane in [lane for lane in self._lanes if lane.node.key in deadlines_s]:
            lane.tell_draining()
            token = busy.get(id(lane))
            if token is None:
                self._drop([lane])
            elif deadlines_s[lane.node.key] - time.time() < LEAVE_BEFORE_S:
                self._leave(token, lane)

    def _leave(self, token: str, lane: Lane) -> None:
        host = lane.host
        outcome = Preempted(node=host.node, evidence=f"Ray drains node {host.node}: it is about to be taken away")
        self._supervisor.end(token, outcome)
        if token in self._opening:
            self._give_up(self._opening[token], outcome)

    def _seats(self, layout: Layout, avoid: frozenset[str]) -> list[RayNode] | None:
        """The node of each rank, on devices that nobody and no trial of ours holds; warm ones where those suffice."""
        nodes = [node for node in self._nodes() if not node.is_one_of(avoid)]
        view = self._view(nodes)
        busy = Counter(lane.node.key for lanes in self._busy.values() for lane in lanes)
        warm = Counter(lane.node.key for lane in self._idle)
        free = {
            node.key: node_view.free_devices - busy[node.key] for node, node_view in zip(nodes, view.nodes, strict=True)
        }
        for most in (warm, free):
            views = tuple(
                node_view.model_copy(update={"free_devices": min(free[node.key], most[node.key])})
                for node, node_view in zip(nodes, view.nodes, strict=True)
            )
            shares = place(view.model_copy(update={"nodes": views}), *layout)
            if shares is not None:
                by_name = {node.name: node for node in nodes}
                return [by_name[share.node] for share in shares for _ in range(share.devices)]
        return None

    def _lanes_on(self, seats: list[RayNode]) -> list[Lane]:
        """An idle lane for each of `seats`, or a new one."""
        shape, idle, lanes = device_shape(self._nodes(), self._threads), self._idle, []
        for node in seats:
            lane = next((lane for lane in idle if lane.node.key == node.key), None)
            if lane is None:
                lane = new_lane(node, shape, self._module, self._threads)
                self._lanes.append(lane)
            else:
                idle.remove(lane)
            lanes.append(lane)
        return lanes

    def _drop(self, lanes: Collection[Lane]) -> None:
        Lane.close(lanes)
        for lane in lanes:
            self._lanes.remove(lane)

    def _start_opened(self) -> None:
        for token, opening in list(self._opening.items()):
            if ray.wait([opening.port], timeout=0)[0]:
                self._start(opening)
            elif time.monotonic() - opening.since_s > LANE_DEADLINE_S:
                first = opening.lanes[0].node.name
                cause = f"Ray did not start the lane on {first} within {LANE_DEADLINE_S:.0f} s"
                self._give_up(self._opening[token], Infra(cause=cause, node=first, blames="node"))

    def _start(self, opening: _Opening) -> None:
        launch, hosts = opening.launch, [lane.host for lane in opening.lanes]
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
        is_one_node = len({lane.node.key for lane in opening.lanes}) == 1
        address = _LOOPBACK if is_one_node else hosts[0].address
        self._supervisor.start(Attempt(launch.token, launch.directory.resolve(), launch.config, address, port), hosts)

    def _give_up(self, opening: _Opening, outcome: Outcome) -> None:
        token = opening.launch.token
        AttemptFiles(opening.launch.directory).write_outcome(outcome)
        del self._opening[token], self._busy[token]
        self._drop(opening.lanes)
        nodes = tuple(lane.node.name for lane in opening.lanes)
        self._ended.append(Ended(token, outcome, place_name(nodes), nodes))

    def _collect(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        for finished in self._supervisor.collect():
            lanes = self._busy.pop(finished.token)
            del self._ports[finished.token]
            self._drop([lane for lane in lanes if lane.is_broken or lane.is_draining])
            ended.append(Ended(finished.token, finished.outcome, place_name(finished.nodes), finished.nodes))
        return ended

    def _sleep(self, timeout_s: float) -> None:
        pending = [opening.port for opening in self._opening.values()]
        pending += [ref for lanes in self._busy.values() for lane in lanes for ref in lane.host.pending]
        if pending:
            ray.wait(pending, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)
