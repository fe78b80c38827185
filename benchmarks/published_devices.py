"""The card of a published row and how much of it a process can use."""

import re
from dataclasses import dataclass

from orchestrator.contract.units import GIB
from orchestrator.spec.hardware import BY_KEY, Device

_KEYS: tuple[tuple[str, int | None, str], ...] = (
    (r"A800", None, "a800-80"),
    (r"A100.*(PCIe|PCIE)", 40, "a100-pcie-40"),
    (r"A100.*(PCIe|PCIE)", None, "a100-pcie-80"),
    (r"A100", 40, "a100-40"),
    (r"A100", None, "a100-80"),
    (r"H[18]00.*PCIe", None, "h100-pcie"),
    (r"H[18]00", 80, "h100-sxm"),
    (r"H200", None, "h200"),
    (r"B200", None, "b200"),
    (r"L40S", None, "l40s"),
    (r"L40", None, "l40"),
    (r"L4", None, "l4"),
    (r"V100", 32, "v100-32"),
    (r"V100", 16, "v100-16"),
    (r"(RTX )?A6000", None, "rtx-a6000"),
    (r"(RTX )?5090", None, "rtx5090"),
    (r"(RTX )?4090", None, "rtx4090"),
    (r"(RTX )?3090", None, "rtx3090"),
    (r"A40", None, "a40"),
    (r"A10G", None, "a10g"),
    (r"A10", None, "a10"),
    (r"T4", None, "t4"),
    (r"MI300X", None, "mi300x"),
)
"""Start of the cell, size in GB where a name stands for several cards, key of the hardware table."""

_USABLE_SHARE = 0.985
"""Of the size that a card is sold with, where the hardware table does not know it: 23.65 of 24 GiB on a TITAN RTX
(its out-of-memory message in huggingface/blog pytorch-fsdp.md), 79.15 of 80 on an A100."""


@dataclass(frozen=True)
class Card:
    """`device`: its row in the hardware table. `capacity_bytes`: what CUDA reports as its total memory, or the budget
    that the source set itself. Both are None where the row does not tell."""

    device: Device | None
    capacity_bytes: int | None


def card(name: str, gpu_gb: int | None) -> Card:
    """The card called `name` with `gpu_gb` GB."""
    device = _device(name.strip(), gpu_gb)
    if device is not None and (gpu_gb is None or abs(device.memory_bytes / GIB - gpu_gb) <= 1):
        return Card(device, device.usable_memory_bytes)
    if gpu_gb is None:
        return Card(device, None)
    return Card(device, round(gpu_gb * GIB * (1 if "budget" in name else _USABLE_SHARE)))


def _device(name: str, gpu_gb: int | None) -> Device | None:
    for pattern, size_gb, key in _KEYS:
        if re.match(pattern + r"\b", name) and (size_gb is None or gpu_gb is None or size_gb == gpu_gb):
            return BY_KEY[key]
    return None
