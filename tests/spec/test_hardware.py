"""Devices are found by the name that their driver reports, and never by one of a variant with other figures."""

import pytest

from orchestrator.contract.config import Precision
from orchestrator.spec.hardware import ACHIEVABLE_SHARE, BY_KEY, DEVICES, lookup


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
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA L40", "l40"),
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


def test_usable_memory_is_a_little_below_the_nominal_size() -> None:
    for device in DEVICES:
        assert 0.90 < device.usable_memory_bytes / device.memory_bytes < 1.0, device.key


def test_products_reach_a_share_of_the_peak_that_was_measured_or_a_stated_one() -> None:
    assert BY_KEY["a100-80"].achievable_share == pytest.approx(0.869, abs=0.001)
    assert BY_KEY["mi300x"].achievable_share == pytest.approx(0.511, abs=0.001)
    assert BY_KEY["l40s"].achievable_share == ACHIEVABLE_SHARE


def test_bfloat16_without_hardware_runs_at_the_rate_of_fp32() -> None:
    assert BY_KEY["v100-32"].matmul_flops_per_s("bf16") == BY_KEY["v100-32"].matmul_flops_per_s("fp32") == 15.7e12
    assert BY_KEY["v100-32"].matmul_flops_per_s("fp16") == 125e12
