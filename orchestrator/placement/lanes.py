"""Which devices a trial gets: packed on as few nodes as hold it, or spread as the spec asks; or why not.

A packed trial waits rather than being spread over more nodes than it needs: its speed would be that of the network
between them, and would not compare with that of the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.contract.errors import UnplaceableError
from orchestrator.placement.cluster import ClusterView, NodeView


@dataclass(frozen=True)
class Share:
    """`devices` of the node called `node`."""

    node: str
    devices: int


Placement = tuple[Share, ...]
"""Where the ranks go: ranks are numbered through the shares in order, so ranks of one node are neighbours."""


def place(cluster: ClusterView, world_size: int, nodes: int | None) -> Placement | None:
    """Free devices for `world_size` ranks, over exactly `nodes` nodes or as few as the cluster has to hold them (None).

    Returns None when it has to wait for devices. Raises UnplaceableError when the cluster could never hold it.
    """
    check(cluster, world_size, nodes)
    whole = _fit(_devices(node for node in cluster.nodes if node.is_alive), world_size, nodes)
    free = [Share(node.name, node.free_devices) for node in cluster.nodes if node.is_alive and node.free_devices > 0]
    found = _fit(free, world_size, nodes)
    return found if whole is not None and found is not None and len(found) <= len(whole) else None


def lacks_nodes(cluster: ClusterView, world_size: int, nodes: int | None) -> bool:
    """Whether the nodes that live now could not hold it, even if all were free."""
    return _fit(_devices(node for node in cluster.nodes if node.is_alive), world_size, nodes) is None


def node_shares(cluster: ClusterView, world_size: int, nodes: int | None) -> list[int]:
    """How many devices each node would give, of those that live and those that may come; empty where it never fits."""
    living = [node for node in cluster.nodes if node.is_alive]
    found = _fit(_devices([*living, *cluster.coming]), world_size, nodes)
    return [share.devices for share in found or ()]


def check(cluster: ClusterView, world_size: int, nodes: int | None) -> None:
    """Raise UnplaceableError, saying what the cluster has, when `place` could never succeed."""
    alive = [node for node in cluster.nodes if node.is_alive]
    if nodes is not None and nodes > world_size:
        raise UnplaceableError(
            f"resources.nodes is {nodes} but a trial has only {_count(world_size, cluster.device_kind)}; "
            f"ask for at most {world_size}"
        )
    if _fit(_devices([*alive, *cluster.coming]), world_size, nodes) is None:
        raise UnplaceableError(_refusal(cluster, alive, world_size, nodes))


def _devices(nodes: Iterable[NodeView]) -> list[Share]:
    return [Share(node.name, node.devices) for node in nodes if node.devices > 0]


def _fit(shares: Iterable[Share], world_size: int, nodes: int | None) -> Placement | None:
    by_size = sorted(shares, key=lambda share: (-share.devices, share.node))
    return _packed(by_size, world_size) if nodes is None else _spread(by_size, world_size, nodes)


def _packed(by_size: list[Share], world_size: int) -> Placement | None:
    holding = [share for share in by_size if share.devices >= world_size]
    if holding:
        tightest = min(holding, key=lambda share: (share.devices, share.node))
        return (Share(tightest.node, world_size),)
    taken, missing = [], world_size
    for share in by_size:
        if missing > 0:
            taken.append(Share(share.node, min(share.devices, missing)))
            missing -= taken[-1].devices
    return tuple(taken) if missing == 0 else None


def _spread(by_size: list[Share], world_size: int, nodes: int) -> Placement | None:
    """The same number of ranks on each node. Those with the most room are taken, so that what is left lies on as many
    nodes as it can: the next trial needs several too."""
    each = world_size // nodes
    if world_size % nodes or len(by_size) < nodes or by_size[nodes - 1].devices < each:
        return None
    return tuple(Share(share.node, each) for share in by_size[:nodes])


def _refusal(cluster: ClusterView, alive: list[NodeView], world_size: int, nodes: int | None) -> str:
    kind, alive = cluster.device_kind, [node for node in alive if node.devices > 0]
    largest = max((node.devices for node in alive), default=0)
    where = "" if nodes is None else " on one node" if nodes == 1 else f" spread over {nodes} nodes alike"
    have = (
        f"the largest node has {largest}"
        if nodes == 1
        else f"the cluster has {_count(cluster.devices, kind)} on {len(alive)} node{'s' * (len(alive) != 1)}"
    )
    if cluster.coming:
        more_devices = sum(node.devices for node in cluster.coming)
        have += f" and its autoscaler may add {_count(more_devices, kind)} on {len(cluster.coming)} nodes"
    detail = ", ".join(f"{node.name}: {node.devices}" for node in alive[:8])
    more = f" ({detail}{', ...' * (len(alive) > 8)})" if nodes != 1 and len(alive) > 1 else ""
    return (
        f"a trial needs {_count(world_size, kind)}{where}, {have}{more}; "
        "lower resources.devices_per_trial, change resources.nodes, or use another cluster"
    )


def _count(devices: int, kind: str) -> str:
    return f"{devices} {kind}{'s' * (devices != 1)}"
