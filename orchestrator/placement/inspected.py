"""From what the machines of a cluster say of themselves to its profile, and the profile as a YAML file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.contract.config import Frozen
from orchestrator.contract.errors import UsageError
from orchestrator.contract.units import GIB, format_bytes
from orchestrator.placement.node_facts import NodeFacts
from orchestrator.spec.cluster import CPU, ClusterProfile
from orchestrator.spec.hardware import BETWEEN_NODES, lookup

ASSUMED_NETWORK = "ethernet-10g"
"""Where no node tells how fast its network is, as in a virtual machine."""


class InspectedNode(Frozen):
    """A machine, its name in the cluster, and how many devices the cluster gives out there."""

    name: str
    devices: int
    facts: NodeFacts


@dataclass(frozen=True)
class _Kind:
    """What makes nodes one kind. Sizes are in whole GiB: kernels keep a little for themselves, not always alike."""

    device: str
    devices: int
    device_gib: int
    host_gib: int
    link: tuple[str, int]


@dataclass(frozen=True)
class Inspection:
    """A profile and what its reader should know, a remark a line."""

    profile: ClusterProfile
    remarks: tuple[str, ...]


def inspection(name: str, address: str | None, nodes: Sequence[InspectedNode]) -> Inspection:
    """The profile of `nodes`, those of one kind together.

    Nodes without GPUs beside others with some are left out, since trials run on GPUs there. Raises UsageError where no
    node has a device, and for a GPU that is not in the device table.
    """
    with_gpus = [node for node in nodes if node.facts.devices]
    used = [node for node in with_gpus or nodes if node.devices > 0]
    if not used:
        raise UsageError("no node of the cluster gives out any device, neither GPUs nor CPUs")
    kinds: dict[_Kind, list[InspectedNode]] = {}
    for node in used:
        kinds.setdefault(_kind(node), []).append(node)
    remarks = [f"{', '.join(node.name for node in nodes)}: no GPU, left out" for nodes in [_rest(nodes, used)] if nodes]
    entries: list[dict[str, Any]] = []
    for kind, members in kinds.items():
        entries.append(_entry(kind, members))
        remarks += _remarks(kind, members)
    value: dict[str, Any] = {"version": 1, "name": name, "description": _description(kinds), "nodes": entries}
    value |= {"address": address} if address is not None else {}
    if len(used) > 1:
        between, remark = _between(used)
        value["between_nodes"] = between
        remarks.append(remark)
    return Inspection(ClusterProfile.model_validate(value), tuple(remarks))


def _rest(nodes: Sequence[InspectedNode], used: Sequence[InspectedNode]) -> list[InspectedNode]:
    return [node for node in nodes if node not in used]


def _kind(node: InspectedNode) -> _Kind:
    facts = node.facts
    host_gib = round(facts.host_memory_bytes / GIB)
    if not facts.devices:
        return _Kind(CPU, node.devices, 0, host_gib, ("memory", 0))
    names = sorted({device.name for device in facts.devices})
    if len(names) > 1:
        raise UsageError(
            f"node {node.name} has devices of several kinds ({', '.join(names)}), which no profile can say"
        )
    known = lookup(names[0])
    if known is None:
        raise UsageError(
            f"node {node.name} has {names[0]!r}, which is not in the device table (`brimful estimate --list-devices`): "
            "its rates are unknown; write a profile by hand with the nearest device"
        )
    device_gib = round(min(device.memory_bytes for device in facts.devices) / GIB)
    assert facts.link is not None, "a node with devices has links"
    return _Kind(known.key, node.devices, device_gib, host_gib, (facts.link.kind, facts.link.bandwidth))


def _entry(kind: _Kind, members: Sequence[InspectedNode]) -> dict[str, Any]:
    """The least of each size: a trial may land on any of the nodes."""
    facts = [node.facts for node in members]
    devices = [device for each in facts for device in each.devices]
    entry: dict[str, Any] = {"count": len(members), "device": kind.device, "devices": kind.devices}
    if devices:
        entry["device_memory"] = min(device.memory_bytes for device in devices)
        entry["allocatable_device_memory"] = min(device.allocatable_bytes for device in devices)
    entry["host_memory"] = min(each.host_memory_bytes for each in facts)
    entry["allocatable_host_memory"] = min(each.allocatable_host_bytes for each in facts)
    entry["local_disk"] = min(each.free_disk_bytes for each in facts)
    copied = min(each.memory_copy_bytes_per_s for each in facts)
    entry["link"] = {"kind": kind.link[0], "bandwidth": kind.link[1] or copied}
    return entry


def _remarks(kind: _Kind, members: Sequence[InspectedNode]) -> Iterable[str]:
    facts = members[0].facts
    yield f"{', '.join(node.name for node in members)}: {kind.devices} x {kind.device}, {facts.cores} cores each"
    if facts.link is not None and facts.link.path:
        yield f"{kind.device}: the devices that are furthest apart meet {facts.link.path}"
    if facts.link is None:
        yield f"{kind.device}: the link is a copy in memory as measured, read and written together"
    yield f"{kind.device}: local_disk is what is free on {facts.disk} of {format_bytes(facts.disk_bytes)}"


def _between(nodes: Sequence[InspectedNode]) -> tuple[dict[str, Any], str]:
    """The slowest network of all, and where the figure comes from."""
    if len({node.facts.host for node in nodes}) == 1:
        rate = min(node.facts.memory_copy_bytes_per_s for node in nodes)
        return {"kind": "memory", "bandwidth": rate}, "between_nodes: all nodes are on one machine; a copy in memory"
    known = [node.facts for node in nodes if node.facts.network_bytes_per_s]
    if len(known) < len(nodes):
        rate = round(BETWEEN_NODES[ASSUMED_NETWORK])
        return {"kind": "ethernet", "bandwidth": rate}, (
            f"between_nodes: not every node tells how fast its network is; {ASSUMED_NETWORK} is ASSUMED, put it right"
        )
    slowest = min(known, key=lambda facts: facts.network_bytes_per_s)
    kind = "infiniband" if all(facts.is_infiniband for facts in known) else "ethernet"
    bandwidth = {"kind": kind, "bandwidth": slowest.network_bytes_per_s}
    return bandwidth, f"between_nodes: nominal rate of {slowest.network} on {slowest.host}"


def _description(kinds: dict[_Kind, list[InspectedNode]]) -> str:
    parts = [f"{len(members)} x {kind.devices} {kind.device}" for kind, members in kinds.items()]
    return f"As found by `brimful cluster inspect`: {', '.join(parts)}"


def profile_text(found: Inspection) -> str:
    """The YAML file of the profile, its remarks as comments above it."""
    profile = found.profile
    lines = [f"# {remark}" for remark in found.remarks]
    lines += [f"version: {profile.version}", f"name: {profile.name}", f"description: {_quoted(profile.description)}"]
    lines += [f"address: {_quoted(profile.address)}"] if profile.address is not None else []
    lines.append("nodes:")
    for nodes in profile.nodes:
        sizes = {
            "device_memory": nodes.device_memory,
            "allocatable_device_memory": nodes.allocatable_device_memory,
            "host_memory": nodes.host_memory,
            "allocatable_host_memory": nodes.allocatable_host_memory,
            "local_disk": nodes.local_disk,
        }
        lines += [f"  - count: {nodes.count}", f"    device: {nodes.device}", f"    devices: {nodes.devices}"]
        lines += [f"    {name}: {_size(size)}" for name, size in sizes.items() if size is not None]
        lines.append(f"    link: {_link(nodes.link.kind, nodes.link.bandwidth)}")
    if profile.between_nodes is not None:
        lines.append(f"between_nodes: {_link(profile.between_nodes.kind, profile.between_nodes.bandwidth)}")
    lines.append("# price_per_device_hour: 2.50  # US dollars; write what you pay")
    return "\n".join(lines) + "\n"


def _size(size_bytes: int) -> str:
    """Rounded down to whole MiB: the spec reads it back, and nothing is promised that is not there."""
    return f"{size_bytes // 2**20}MiB"


def _link(kind: str, bytes_per_s: int) -> str:
    return f"{{kind: {kind}, bandwidth: {max(1, round(bytes_per_s / 1e9))}GB/s}}"


def _quoted(text: str | None) -> str:
    escaped = (text or "").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
