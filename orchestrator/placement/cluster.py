"""A snapshot of the devices that a pool can use."""

from orchestrator.contract.config import Frozen


class NodeView(Frozen):
    """One node. A device is a GPU, or on nodes without GPUs one CPU slot."""

    name: str
    address: str
    devices: int
    free_devices: int
    """Not held by others: devices of our own lanes count as free."""
    is_alive: bool = True
    occupants: tuple[str, ...] = ()
    """Who else uses devices here, in words, where it can be known."""
    kind: str | None = None
    """What its devices are, in the cluster's own word, such as `A100`; None where it does not say."""


class ClusterView(Frozen):
    """All nodes that a pool knows."""

    nodes: tuple[NodeView, ...]
    device_kind: str
    """What a device is called in messages: `GPU` or `CPU slot`."""
    coming: tuple[NodeView, ...] = ()
    """Nodes that an autoscaler may add to those that live."""

    @property
    def devices(self) -> int:
        """Devices of all living nodes."""
        return sum(node.devices for node in self.nodes if node.is_alive)
