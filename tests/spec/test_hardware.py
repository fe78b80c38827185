"""Devices are found by the name that their driver reports, and never by one of a variant with other figures."""

import pytest

from orchestrator.contract.config import Precision
from orchestrator.spec.hardware import DEVICES, lookup


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("h200", "h200"),
    ],
)
def test_a_reported_name_finds_its_row(name: str, key: str) -> None:
    found = lookup(name)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA H100 NVL", "NVIDIA A100X", "Intel Xeon", ""])
def test_a_variant_is_not_taken_for_its_sibling(name: str) -> None:
    assert lookup(name) is None


def test_every_row_is_found_once_and_plausible() -> None:
    assert len({device.key for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert device.source.startswith("https://")
        assert device.peak_flops_per_s[Precision.FP32] < device.peak_flops_per_s.get(Precision.BF16, 1e16)
        assert 1e11 < device.memory_bytes_per_s < 1e13
        assert device.link_bytes_per_s < device.memory_bytes_per_s


def test_bfloat16_is_missing_where_the_hardware_lacks_it() -> None:
    assert {device.key for device in DEVICES if Precision.BF16 not in device.peak_flops_per_s} == {
        "t4",
        "v100-16",
        "v100-32",
    }
