"""The profile of a real Ray cluster, without and with devices that are in use."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.backends.ray_inspect import inspected_nodes
from orchestrator.cli.app import app
from orchestrator.contract.errors import ClusterUnreachableError
from orchestrator.placement.ports import free_port
from orchestrator.spec.cluster import load_cluster
from pools.rig import RayRig

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def rig(ray_token: None, tests_importable: None) -> Iterator[RayRig]:
    rig = RayRig()
    try:
        rig.head(cpus=1)
        rig.node(cpus=2)
        yield rig
    finally:
        rig.close()


def test_every_node_answers_for_itself_and_the_profile_reads_back(rig: RayRig, tmp_path: Path) -> None:
    nodes = inspected_nodes(rig.address)
    assert sorted(node.devices for node in nodes) == [1, 2]
    file = tmp_path / "rig.yaml"
    result = CliRunner().invoke(app, ["cluster", "inspect", "--address", rig.address, "-o", str(file)])
    assert result.exit_code == 0, result.output
    profile = load_cluster(file)
    assert (profile.name, profile.devices, profile.address) == ("rig", 3, rig.address)
    assert sorted((each.device, each.devices) for each in profile.nodes) == [("cpu", 1), ("cpu", 2)]
    assert all(0 < each.allocatable_host_bytes <= each.host_memory for each in profile.nodes)


def test_an_address_without_a_cluster_is_refused(ray_token: None) -> None:
    with pytest.raises(ClusterUnreachableError, match="cannot be reached"):
        inspected_nodes(f"127.0.0.1:{free_port()}")
