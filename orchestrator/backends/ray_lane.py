"""A lane: one placement group over the chosen nodes, and one seat for each of its devices."""

from collections import Counter

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.backends.ray_seat import RayHost, Seat
from orchestrator.backends.ray_view import DeviceShape, RayNode

CLOSE_DEADLINE_S = 6.0
_NODE_LABEL = "ray.io/node-id"
"""Ray gives it to every node (ray.util.scheduling_strategies, `NodeLabelSchedulingStrategy`)."""


class Lane:
    """`seats` lists the node of each rank, in rank order. Creation returns at once; Ray works in the background."""

    def __init__(self, seats: list[RayNode], shape: DeviceShape, module: str, threads_per_device: int) -> None:
        self._seats = tuple(seats)
        self.nodes = tuple(node.key for node in seats)
        self._group = placement_group(
            [dict(shape.bundle) for _ in seats],
            strategy="PACK",
            bundle_label_selector=[{_NODE_LABEL: node.key} for node in seats],
        )
        self.hosts = tuple(
            RayHost(self._seat(index, node, shape, module, threads_per_device), node)
            for index, node in enumerate(seats)
        )

    @property
    def is_broken(self) -> bool:
        """Whether one of its seats is gone."""
        return any(host.is_broken for host in self.hosts)

    @property
    def is_draining(self) -> bool:
        """Whether one of its nodes is about to be taken away."""
        return any(host.is_draining for host in self.hosts)

    def tell_draining(self, nodes: frozenset[str]) -> None:
        """`nodes`, by id, are about to be taken away."""
        for host, key in zip(self.hosts, self.nodes, strict=True):
            host.is_draining = host.is_draining or key in nodes

    def is_on(self, names: frozenset[str]) -> bool:
        """Whether one of its nodes is called as in `names`."""
        return any(node.is_one_of(names) for node in self._seats)

    @property
    def held(self) -> Counter[str]:
        """Devices that it holds, by node id."""
        return Counter(self.nodes)

    def close(self) -> None:
        """End its templates and give the devices back."""
        closing = [host.seat.close.remote() for host in self.hosts if not host.is_broken]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_DEADLINE_S)
        # seats end with their group; a template that is still there ends when its seat's pipe closes
        remove_placement_group(self._group)

    def _seat(
        self, index: int, node: RayNode, shape: DeviceShape, module: str, threads_per_device: int
    ) -> ray.actor.ActorHandle:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=index,
            placement_group_capture_child_tasks=False,
        )
        actor = ray.remote(
            max_restarts=0,
            max_task_retries=0,
            num_cpus=shape.bundle["CPU"],
            num_gpus=shape.bundle.get("GPU", 0.0),
            scheduling_strategy=strategy,
        )(Seat)
        return actor.remote(node.name, module, threads_per_device, shape.resource == "GPU")
