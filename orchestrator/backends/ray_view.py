"""The devices of a Ray cluster, node by node, and what of them others hold."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

import ray
from ray._private.state import available_resources_per_node, state

from orchestrator.backends.ray_head import asks_head
from orchestrator.placement.cluster import ClusterView, NodeView

_all_nodes = asks_head(lambda: ray.nodes())
_available = asks_head(lambda: available_resources_per_node())
_draining = asks_head(lambda: state.get_draining_nodes())
_cluster_config = asks_head(lambda: state.get_cluster_config())


@dataclass(frozen=True)
class RayNode:
    """A living node. `key` is Ray's node id; `resources` its totals by Ray's names."""

    key: str
    name: str
    address: str
    resources: Mapping[str, float]
    long_name: str = ""
    """What it is called where several nodes share a host name."""
    kind: str | None = None
    """What its GPUs are in Ray's word, such as `A100`."""

    def is_one_of(self, names: Collection[str]) -> bool:
        """Whether `names` holds it, under either name."""
        return self.name in names or self.long_name in names


@dataclass(frozen=True)
class DeviceShape:
    """What one device is in Ray's words."""

    kind: str
    resource: str
    bundle: Mapping[str, float]
    """Resources that one rank reserves."""

    def count(self, resources: Mapping[str, float]) -> int:
        """Devices in `resources`."""
        return int(resources.get(self.resource, 0.0) // self.bundle[self.resource])


def living_nodes() -> list[RayNode]:
    """All living nodes that are not about to be taken away; those that share a host name are told apart by their id."""
    draining = draining_nodes()
    alive = [node for node in _all_nodes() if node["Alive"] and node["NodeID"] not in draining]
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    return [
        RayNode(
            key=node["NodeID"],
            name=_name(node["NodeManagerHostname"], node["NodeID"], hosts),
            long_name=_long_name(node["NodeManagerHostname"], node["NodeID"]),
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            kind=_kind(node["Resources"], node.get("Labels", {})),
        )
        for node in alive
    ]


_KIND_RESOURCE, _KIND_LABEL = "accelerator_type:", "ray.io/accelerator-type"
"""How Ray tells a node's kind of accelerator (`ray._common.utils`, `ray._private.resource_and_label_spec`)."""


def _kind(resources: Mapping[str, float], labels: Mapping[str, str]) -> str | None:
    told = (name.removeprefix(_KIND_RESOURCE) for name in sorted(resources) if name.startswith(_KIND_RESOURCE))
    return labels.get(_KIND_LABEL) or next(told, None)


def coming_nodes(shape: DeviceShape, kind: str | None, living: int) -> tuple[NodeView, ...]:
    """What an autoscaler may add, by the cluster's configuration: its groups up to their greatest sizes, less the nodes
    that live. Empty without an autoscaler. `kind`: of this kind alone, as far as a group tells one."""
    config = _cluster_config()
    found = []
    for group in config.node_group_configs if config is not None else ():
        devices = shape.count(group.resources)
        told = _kind(group.resources, {})
        if devices and (kind is None or told is None or told == kind):
            found += [(group.name or "group", devices)] * min(max(group.max_count, 0), MOST_COMING)
    # which of the living nodes belong to which group is not told: the smallest of what may come count as there
    found = sorted(found, key=lambda each: -each[1])[: max(0, len(found) - living)]
    return tuple(
        NodeView(name=f"{name}+{number}", address="", devices=devices, free_devices=0, is_alive=False, kind=kind)
        for number, (name, devices) in enumerate(found)
    )


MOST_COMING = 1000
"""Of one group: some have no bound."""


def _name(host: str, key: str, hosts: Counter[str]) -> str:
    return host if hosts[host] == 1 else _long_name(host, key)


def _long_name(host: str, key: str) -> str:
    return f"{host}#{key[:6]}"


@dataclass(frozen=True)
class NodeEnd:
    """Why a node is gone. `is_on_purpose`: it was drained or told to end, as before a preemption."""

    reason: str
    is_on_purpose: bool


def node_end(key: str) -> NodeEnd | None:
    """How the node ended; None while it lives."""
    node = next((node for node in _all_nodes() if node["NodeID"] == key), None)
    if node is not None and node["Alive"]:
        return None
    reason = node["DeathReason"] if node is not None else 0
    told = node["DeathReasonMessage"] if node is not None else ""
    return NodeEnd(told or "Ray tells no reason", reason in _ON_PURPOSE)


_ON_PURPOSE = (1, 3, 4)
"""EXPECTED_TERMINATION (a raylet got SIGTERM), AUTOSCALER_DRAIN_PREEMPTED and AUTOSCALER_DRAIN_IDLE of
`NodeDeathInfo.Reason` in Ray's gcs.proto; 2 is UNEXPECTED_TERMINATION."""


def draining_nodes() -> dict[str, float]:
    """Ids of nodes that are about to be taken away, each with the time (time.time()) when; infinity where unknown."""
    deadlines_ms = _draining()
    return {key: deadline_ms / 1000 if deadline_ms else inf for key, deadline_ms in deadlines_ms.items()}


def device_shape(nodes: list[RayNode], threads_per_device: int) -> DeviceShape:
    """A cluster with GPUs is used by GPU, another one by slots of `threads_per_device` CPUs."""
    with_gpu = [node.resources for node in nodes if node.resources.get("GPU", 0.0) >= 1.0]
    if not with_gpu:
        return DeviceShape("CPU slot", "CPU", {"CPU": float(threads_per_device)})
    # a GPU must not stay unused because its node has few CPUs
    spare = min(int(resources.get("CPU", 0.0) // resources["GPU"]) for resources in with_gpu)
    return DeviceShape("GPU", "GPU", {"GPU": 1.0, "CPU": float(min(threads_per_device, spare))})


def cluster_view(
    nodes: list[RayNode], shape: DeviceShape, own: Mapping[str, int], coming: tuple[NodeView, ...] = ()
) -> ClusterView:
    """All devices. `own` counts by node id the devices that our lanes hold; they count as free."""
    available = _available()
    return ClusterView(
        nodes=tuple(_node_view(node, shape, available.get(node.key, {}), own.get(node.key, 0)) for node in nodes),
        device_kind=shape.kind,
        coming=coming,
    )


def _node_view(node: RayNode, shape: DeviceShape, available: Mapping[str, float], own: int) -> NodeView:
    devices = shape.count(node.resources)
    free = min(devices, shape.count(available) + own)
    held = devices - free
    occupants = (f"other Ray jobs hold {held} of {devices} {shape.kind}s",) if held else ()
    return NodeView(
        name=node.name,
        address=node.address,
        devices=devices,
        free_devices=free,
        occupants=occupants,
        kind=node.kind if shape.resource == "GPU" else None,
    )
