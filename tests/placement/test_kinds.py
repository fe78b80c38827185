"""Trials of one sweep run on one kind of device, whose memory and peak are those that are predicted with."""

import pytest
from space.space_facts import facts

from orchestrator.contract.config import Precision
from orchestrator.contract.errors import UnplaceableError
from orchestrator.placement.cluster import ClusterView, NodeView
from orchestrator.placement.kinds import choose_kind, facts_on
from orchestrator.spec.hardware import BY_KEY


def cluster(*nodes: tuple[str | None, int]) -> ClusterView:
    """Nodes by the kind of their GPUs and how many they have."""
    views = [
        NodeView(name=f"n{number}", address="", devices=devices, free_devices=devices, kind=kind)
        for number, (kind, devices) in enumerate(nodes)
    ]
    return ClusterView(nodes=tuple(views), device_kind="GPU")


MIXED = cluster(("A100-80G", 8), ("T4", 4), ("T4", 2))


def test_one_kind_needs_no_choice() -> None:
    chosen = choose_kind(cluster(("T4", 1), ("T4", 4)), "auto")
    assert (chosen.kind, chosen.device, chosen.note) == (None, BY_KEY["t4"], "")
    nothing = choose_kind(cluster((None, 4)), "auto")
    assert (nothing.kind, nothing.device, nothing.note) == (None, None, "")


def test_of_several_the_one_with_the_most_devices_is_chosen_and_said() -> None:
    chosen = choose_kind(MIXED, "auto")
    assert (chosen.kind, chosen.device) == ("A100-80G", BY_KEY["a100-80"])
    assert chosen.note.startswith("The cluster has 8 x A100-80G, 6 x T4; the trials run on A100-80G alone")


def test_a_resumed_sweep_keeps_its_kind() -> None:
    assert choose_kind(MIXED, "cuda", before="T4").kind == "T4"
    with pytest.raises(UnplaceableError, match=r"ran on L4, the cluster has 8 x A100-80G, 6 x T4"):
        choose_kind(MIXED, "auto", before="L4")


def test_the_spec_names_a_kind_by_the_table_s_key() -> None:
    chosen = choose_kind(MIXED, "t4")
    assert (chosen.kind, chosen.device, chosen.note) == ("T4", BY_KEY["t4"], "")
    with pytest.raises(UnplaceableError, match=r"resources.device is h200, the cluster has 8 x A100-80G, 6 x T4"):
        choose_kind(MIXED, "h200")
    with pytest.raises(UnplaceableError, match=r"resources.device is t4, the cluster has 2 x CPU slot"):
        choose_kind(ClusterView(nodes=cluster((None, 2)).nodes, device_kind="CPU slot"), "t4")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("A100", "a100-40"), ("A100", "a100-pcie-80"), ("A100-40G", "a100-40"), ("H100", "h100-sxm"),
        ("V100", "v100-32"), ("GeForce-RTX-4090", "rtx4090"), ("RTX-A6000", "rtx-a6000"), ("L40S", "l40s"),
        ("A10G", "a10g"), ("NVIDIA-L4", "l4"), ("AMD-Instinct-MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_the_cluster_s_words_are_understood(kind: str, wanted: str) -> None:
    assert choose_kind(cluster((kind, 1), ("T4", 1)), wanted).kind == kind


def test_a_word_that_may_mean_several_rows_names_none() -> None:
    assert choose_kind(cluster(("A100", 4)), "auto").device is None
    assert choose_kind(cluster(("A10", 4)), "auto").device is BY_KEY["a10"]


def test_facts_are_those_of_the_chosen_device() -> None:
    found = facts_on(facts(), BY_KEY["t4"])
    assert (found.device, found.device_name, found.device_memory_bytes) == (
        "cuda",
        "t4",
        BY_KEY["t4"].usable_memory_bytes,
    )
    assert found.peak_flops_per_s == {Precision.FP32: 8.1e12}
    assert "t4" in found.peak_source
    assert facts_on(facts(), None) == facts()
    same = found.model_copy(update={"device_name": "Tesla T4", "device_memory_bytes": 1})
    assert facts_on(same, BY_KEY["t4"]) == same
