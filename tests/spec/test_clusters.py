"""Cluster profiles are read as strictly as specs, and the shipped ones are valid."""

from pathlib import Path

import pytest

from orchestrator.contract.errors import SpecError
from orchestrator.spec.cluster import load_cluster

CLUSTERS = sorted((Path(__file__).parents[2] / "clusters").glob("*.yaml"))

VALID = """\
version: 1
name: pair
nodes:
  - count: 2
    device: a100-80
    devices: 8
    host_memory: 1TiB
    link: {kind: nvlink, bandwidth: 600GB/s}
between_nodes: {kind: infiniband, bandwidth: 200GB/s}
"""


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_shipped_profile_loads(path: Path) -> None:
    profile = load_cluster(path)
    assert profile.name == path.stem
    assert profile.devices > 0
    for nodes in profile.nodes:
        assert nodes.device == "cpu" or nodes.device_memory_bytes == nodes.hardware.memory_bytes


def test_sizes_and_rates_are_bytes(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(VALID)
    profile = load_cluster(path)
    assert profile.devices == 16
    assert profile.nodes[0].host_memory == 2**40
    assert profile.nodes[0].link.bandwidth == 600 * 10**9
    assert profile.nodes[0].device_memory_bytes == 80 * 2**30


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a100-80", "a100-8", "5:13: nodes[0].device: 'a100-8' is not in the device table; did you mean a100-80?"),
        ("600GB/s", "600GB", "8:37: nodes[0].link.bandwidth: '600GB' is not a rate; write it like 600GB/s"),
        ("600GB/s", "fast/s", "8:37: nodes[0].link.bandwidth: 'fast' is not a size"),
        ("devices: 8", "device_count: 8", "6:5: nodes[0].device_count: unknown key; did you mean device?"),
        ("devices: 8", "device_count: 8", "4:5: nodes[0].devices: is missing; add devices: VALUE"),
        ("between_nodes: {kind: infiniband, bandwidth: 200GB/s}", "", "1:1: has several nodes; add between_nodes"),
        ("version: 1", "version: 2", "1:10: version: must be 1; write version: 1"),
        (
            "host_memory: 1TiB",
            "host_memory: 1TiB\n    allocatable_host_memory: 2TiB",
            "4:5: nodes[0]: allocatable_host_memory is 2.00 TiB, more than host_memory (1.00 TiB); lower it",
        ),
        (
            "devices: 8",
            "devices: 8\n    allocatable_device_memory: 90GiB",
            "4:5: nodes[0]: allocatable_device_memory is 90.00 GiB, more than device_memory (80.00 GiB); lower it",
        ),
        ("kind: nvlink", "kind: nvlnk", "8:18: nodes[0].link.kind: 'nvlnk' is not one of nvlink, pcie"),
    ],
)
def test_a_wrong_value_gives_its_place_and_mend(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(VALID.replace(old, new, 1))
    with pytest.raises(SpecError) as caught:
        load_cluster(path)
    lines = str(caught.value).replace(str(path), "").split("\n")
    assert any(line.startswith(f":{message}") for line in lines), lines
