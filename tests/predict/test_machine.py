"""Rates of a machine come from the device table and the cluster profile, in one direction."""

import pytest

from orchestrator.contract.config import Precision
from orchestrator.contract.units import GIB
from orchestrator.predict.machine import cluster_links, cpu_links, cpu_processor, device_links, processor
from orchestrator.spec.cluster import Link, Nodes
from orchestrator.spec.hardware import BY_KEY


def _nodes(device: str, link: Link) -> Nodes:
    return Nodes(device=device, devices=8, host_memory=512 * GIB, link=link)


def test_a_profile_states_both_directions_and_the_clock_counts_one() -> None:
    links = cluster_links(
        _nodes("h100-sxm", Link(kind="nvlink", bandwidth=900 * 10**9)), Link(kind="infiniband", bandwidth=800 * 10**9)
    )
    assert links.device_bytes_per_s == 450e9
    assert links.node_bytes_per_s == 400e9
    assert links.host_link_bytes_per_s == 64e9
    assert links == device_links(BY_KEY["h100-sxm"], 800e9)


def test_cards_without_peer_access_stage_through_the_host_unless_a_bridge_joins_them() -> None:
    over_pcie = cluster_links(_nodes("rtx3090", Link(kind="pcie", bandwidth=64 * 10**9)))
    bridged = cluster_links(_nodes("rtx3090", Link(kind="nvlink", bandwidth=112 * 10**9)))
    with_peers = cluster_links(_nodes("a10", Link(kind="pcie", bandwidth=64 * 10**9)))
    assert over_pcie.device_bytes_per_s == 16e9
    assert bridged.device_bytes_per_s == 56e9
    assert with_peers.device_bytes_per_s == 32e9


def test_slots_of_a_cpu_meet_through_memory_that_they_share() -> None:
    links = cluster_links(_nodes("cpu", Link(kind="memory", bandwidth=20 * 10**9)))
    assert links == cpu_links(8)
    assert links.node_bytes_per_s is None


def test_a_cpu_without_a_figure_for_bfloat16_computes_at_the_rate_of_fp32() -> None:
    found = cpu_processor({Precision.FP32: 50e9}, cores=2)
    assert found.peak_flops_per_s["bf16"] == 50e9
    assert found.achievable_share == 1.0
    assert not found.is_asynchronous
    assert processor(BY_KEY["a100-80"]).achievable_share == pytest.approx(0.869, abs=0.001)
