"""Which devices a trial gets: packed on as few nodes as hold it, or spread as the spec asks; or why not."""

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
    """Free devices for `world_size` ranks, over exactly `nodes` nodes or as few as hold them (None).

    Returns None when it has to wait for devices. Raises UnplaceableError when the cluster could never hold it.
    """
    check(cluster, world_size, nodes)
    free = [Share(node.name, node.free_devices) for node in cluster.nodes if node.is_alive and node.free_devices > 0]
    return _fit(free, world_size, nodes)


def check(cluster: ClusterView, world_size: int, nodes: int | None) -> None:
    """Raise UnplaceableError, saying what the cluster has, when `place` could never succeed."""
    alive = [node for node in cluster.nodes if node.is_alive]
    if nodes is not None and nodes > world_size:
        raise UnplaceableError(
            f"resources.nodes is {nodes} but a trial has only {_count(world_size, cluster.device_kind)}; "
            f"ask for at most {world_size}"
        )
    if _fit([Share(node.name, node.devices) for node in alive if node.devices > 0], world_size, nodes) is None:
        raise UnplaceableError(_refusal(cluster, alive, world_size, nodes))


def _fit(shares: Iterable[Share], world_size: int, nodes: int | None) -> Placement | None:
    by_size = sorted(shares, key=lambda share: (-share.devices, share.node))
    if nodes is None:
        return _packed(by_size, world_size)
    return _spread(by_size[:nodes], world_size) if len(by_size) >= nodes else None


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


def _spread(by_size: list[Share], world_size: int) -> Placement | None:
    """As evenly as the nodes' sizes allow; every node gets at least one rank."""
    given = [1] * len(by_size)
    for _ in range(world_size - len(by_size)):
        open_nodes = [i for i, share in enumerate(by_size) if given[i] < share.devices]
        if not open_nodes:
            return None
        given[min(open_nodes, key=lambda i: (given[i], i))] += 1
    return tuple(Share(share.node, devices) for share, devices in zip(by_size, given, strict=True))


def _refusal(cluster: ClusterView, alive: list[NodeView], world_size: int, nodes: int | None) -> str:
    kind = cluster.device_kind
    largest = max((node.devices for node in alive), default=0)
    where = "" if nodes is None else " on one node" if nodes == 1 else f" spread over {nodes} nodes"
    have = (
        f"the largest node has {largest}"
        if nodes == 1
        else f"the cluster has {_count(cluster.devices, kind)} on {len(alive)} node{'s' * (len(alive) != 1)}"
    )
    detail = ", ".join(f"{node.name}: {node.devices}" for node in alive[:8])
    more = f" ({detail}{', ...' * (len(alive) > 8)})" if nodes != 1 and len(alive) > 1 else ""
    return (
        f"a trial needs {_count(world_size, kind)}{where}, {have}{more}; "
        "lower resources.devices_per_trial, change resources.nodes, or use another cluster"
    )


def _count(devices: int, kind: str) -> str:
    return f"{devices} {kind}{'s' * (devices != 1)}"
