"""From what machines say to a profile that can be read back."""

from pathlib import Path

import pytest

from orchestrator.contract.errors import UsageError
from orchestrator.contract.units import GIB
from orchestrator.placement.inspected import InspectedNode, Inspection, inspection, profile_text
from orchestrator.placement.node_facts import DeviceFacts, LinkFacts, NodeFacts
from orchestrator.spec.cluster import ClusterProfile, load_cluster

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
NVLINK = LinkFacts(kind="nvlink", bandwidth=600 * 10**9, path="across the sockets")


def node(
    host: str, gpus: int = 0, name: str = A100, host_gib: float = 512, devices: int | None = None
) -> InspectedNode:
    facts = NodeFacts(
        host=host,
        devices=(DeviceFacts(name=name, memory_bytes=80 * GIB, allocatable_bytes=79 * GIB),) * gpus,
        link=NVLINK if gpus else None,
        cores=64,
        host_memory_bytes=round(host_gib * GIB),
        allocatable_host_bytes=round(host_gib * GIB) // 2,
        memory_copy_bytes_per_s=20 * 10**9,
        disk="/mnt/nvme",
        disk_bytes=2000 * GIB,
        free_disk_bytes=1500 * GIB,
        network="mlx5_0",
        network_bytes_per_s=100 * 10**9,
        is_infiniband=True,
    )
    return InspectedNode(name=host, devices=devices if devices is not None else gpus or 64, facts=facts)


def read_back(found: Inspection, tmp_path: Path) -> ClusterProfile:
    path = tmp_path / f"{found.profile.name}.yaml"
    path.write_text(profile_text(found))
    return load_cluster(path)


def test_nodes_of_a_kind_are_one_entry_with_the_least_of_each_size(tmp_path: Path) -> None:
    found = inspection("pair", "10.0.0.1:6379", [node("a", 8, host_gib=512.1), node("b", 8, host_gib=511.9)])
    profile = read_back(found, tmp_path)
    (nodes,) = profile.nodes
    assert (nodes.count, nodes.devices, nodes.device, profile.devices) == (2, 8, "a100-80", 16)
    assert (nodes.device_memory, nodes.allocatable_device_bytes) == (80 * GIB, 79 * GIB)
    assert nodes.host_memory == pytest.approx(511.9 * GIB, abs=2**20)
    assert nodes.allocatable_host_bytes == pytest.approx(511.9 * GIB / 2, abs=2**20)
    assert nodes.local_disk == 1500 * GIB
    assert (nodes.link.kind, nodes.link.bandwidth) == ("nvlink", 600 * 10**9)
    assert profile.between_nodes is not None
    assert (profile.between_nodes.kind, profile.between_nodes.bandwidth) == ("infiniband", 100 * 10**9)
    assert profile.address == "10.0.0.1:6379"
    assert any("meet across the sockets" in remark for remark in found.remarks)


def test_kinds_are_told_apart_and_nodes_without_gpus_left_out(tmp_path: Path) -> None:
    found = inspection("mixed", None, [node("head"), node("a", 8), node("b", 8, name=H100), node("c", 4)])
    profile = read_back(found, tmp_path)
    assert [(each.device, each.count, each.devices) for each in profile.nodes] == [
        ("a100-80", 1, 8),
        ("h100-sxm", 1, 8),
        ("a100-80", 1, 4),
    ]
    assert "head: no GPU, left out" in found.remarks


def test_devices_that_ray_gives_out_count_not_those_that_are_there() -> None:
    found = inspection("half", None, [node("a", 8, devices=4)])
    assert found.profile.nodes[0].devices == 4


def test_cpu_nodes_get_slots_and_a_measured_link(tmp_path: Path) -> None:
    profile = read_back(inspection("cpus", None, [node("a", devices=2), node("a", devices=2)]), tmp_path)
    (nodes,) = profile.nodes
    assert (nodes.device, nodes.count, nodes.devices, nodes.link.kind) == ("cpu", 2, 2, "memory")
    assert nodes.link.bandwidth == 20 * 10**9
    assert profile.between_nodes is not None
    assert profile.between_nodes.kind == "memory", "both are on one machine"


def test_an_unknown_network_is_called_assumed() -> None:
    silent = node("b", 8)
    silent = silent.model_copy(update={"facts": silent.facts.model_copy(update={"network_bytes_per_s": 0})})
    found = inspection("pair", None, [node("a", 8), silent])
    assert found.profile.between_nodes is not None
    assert found.profile.between_nodes.kind == "ethernet"
    assert any("ASSUMED" in remark for remark in found.remarks)


def test_what_no_profile_can_say_is_refused() -> None:
    with pytest.raises(UsageError, match=r"node a has 'NVIDIA FOO', which is not in the device table"):
        inspection("new", None, [node("a", 1, name="NVIDIA FOO")])
    both = node("a", 1)
    devices = (*both.facts.devices, DeviceFacts(name=H100, memory_bytes=80 * GIB, allocatable_bytes=79 * GIB))
    with pytest.raises(UsageError, match="devices of several kinds"):
        inspection("two", None, [both.model_copy(update={"facts": both.facts.model_copy(update={"devices": devices})})])
    with pytest.raises(UsageError, match="gives out any device"):
        inspection("none", None, [node("a", devices=0)])
