"""A lane: one device of a node that is kept for the sweep, with the seat that runs ranks on it.

A trial takes as many lanes as it has ranks. A lane knows nothing of the others, so that trials of any size and spread
follow one another on warm templates; it is reserved by a placement group of its own, which ends with the driver.
"""

from collections.abc import Collection
from contextlib import suppress

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.backends.ray_head import HeadAwayError, asks_head
from orchestrator.backends.ray_seat import RayHost, Seat
from orchestrator.backends.ray_view import DeviceShape, RayNode

CLOSE_DEADLINE_S = 6.0
_NODE_LABEL = "ray.io/node-id"
"""Ray gives it to every node (ray.util.scheduling_strategies, `NodeLabelSchedulingStrategy`)."""

_remove = asks_head(remove_placement_group)


class Lane:
    """One device of `node`. Creation returns at once; Ray works in the background."""

    def __init__(self, node: RayNode, shape: DeviceShape, module: str, threads_per_device: int) -> None:
        self.node = node
        self._group = placement_group([dict(shape.bundle)], bundle_label_selector=[{_NODE_LABEL: node.key}])
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=0,
            placement_group_capture_child_tasks=False,
        )
        actor = ray.remote(
            max_restarts=0,
            max_task_retries=0,
            num_cpus=shape.bundle["CPU"],
            num_gpus=shape.bundle.get("GPU", 0.0),
            scheduling_strategy=strategy,
        )(Seat)
        is_gpu = shape.resource == "GPU"
        share = (shape.count(node.resources), node.resources.get("CPU", 0.0)) if is_gpu else None
        seat = actor.remote(node.name, module, threads_per_device, share)
        self.host = RayHost(seat, node)

    @property
    def is_broken(self) -> bool:
        """Whether its seat is gone."""
        return self.host.is_broken

    @property
    def is_draining(self) -> bool:
        """Whether its node is about to be taken away."""
        return self.host.is_draining

    def tell_draining(self) -> None:
        """Its node is about to be taken away."""
        self.host.is_draining = True

    @staticmethod
    def close(lanes: Collection["Lane"]) -> None:
        """End the templates of `lanes` and give their devices back."""
        closing = [lane.host.seat.close.remote() for lane in lanes if not lane.is_broken]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_DEADLINE_S)
        for lane in lanes:
            # seats end with their group; a template that is still there ends when its seat's pipe closes
            with suppress(HeadAwayError):  # then the group ends with this driver
                _remove(lane._group)


new_lane = asks_head(Lane)
"""Make a lane. Raises HeadAwayError."""
