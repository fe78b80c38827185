"""What each known device can do, from its maker's data sheet, with the address of the sheet beside each row."""

import re
from dataclasses import dataclass

from orchestrator.contract.config import Precision
from orchestrator.contract.units import GIB

_TERA, _GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Device:
    """One row of the table.

    `memory_bytes` is the nominal size; drivers report up to 6 % less. `peak_flops_per_s` is dense, without sparsity;
    fp32 is the figure without TF32, which PyTorch leaves off; a precision without hardware support is missing.
    `link_bytes_per_s` is what one device exchanges with its peers in one node, both directions together: NVLink or
    Infinity Fabric where the device has it, else PCIe.
    """

    key: str
    name_pattern: str
    memory_bytes: int
    peak_flops_per_s: dict[Precision, float]
    memory_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    source: str


def _row(
    key: str, name_pattern: str, figures: tuple[float, float, float | None, float], link: tuple[str, float], source: str
) -> Device:
    """`figures`: memory in GiB, fp32 and bf16 TFLOP/s, memory GB/s. `link`: its kind and GB/s."""
    memory_gib, fp32_tflops, bf16_tflops, memory_gb_per_s = figures
    peaks = {Precision.FP32: fp32_tflops * _TERA}
    if bf16_tflops is not None:
        peaks[Precision.BF16] = bf16_tflops * _TERA
    memory_bytes = round(memory_gib * GIB)
    return Device(key, name_pattern, memory_bytes, peaks, memory_gb_per_s * _GIGA, link[0], link[1] * _GIGA, source)


_SHEETS = "https://www.nvidia.com/content/dam/en-zz/Solutions"

DEVICES: tuple[Device, ...] = (
    _row("t4", r"(NVIDIA |Tesla )?T4", (16, 8.1, None, 320), ("PCIe 3.0 x16", 32),
         f"{_SHEETS}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    _row("v100-16", r"Tesla V100-SXM2-16GB", (16, 15.7, None, 900), ("NVLink 2", 300),
         "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"),
    _row("v100-32", r"Tesla V100-SXM[23]-32GB", (32, 15.7, None, 900), ("NVLink 2", 300),
         "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"),
    _row("a10", r"NVIDIA A10", (24, 31.2, 125, 600), ("PCIe 4.0 x16", 64),
         f"{_SHEETS}/Data-Center/a10/pdf/a10-datasheet.pdf"),
    _row("a10g", r"NVIDIA A10G", (24, 35, 70, 600), ("PCIe 4.0 x16", 64),
         "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"),
    _row("a100-40", r"(NVIDIA )?A100-SXM4-40GB", (40, 19.5, 312, 1555), ("NVLink 3", 600),
         f"{_SHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf"),
    _row("a100-80", r"(NVIDIA )?A100-SXM4-80GB", (80, 19.5, 312, 2039), ("NVLink 3", 600),
         f"{_SHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"),
    _row("l4", r"NVIDIA L4", (24, 30.3, 121, 300), ("PCIe 4.0 x16", 64),
         "https://www.nvidia.com/en-us/data-center/l4/"),
    _row("l40s", r"NVIDIA L40S", (48, 91.6, 362, 864), ("PCIe 4.0 x16", 64),
         "https://www.nvidia.com/en-us/data-center/l40s/"),
    _row("rtx3090", r"(NVIDIA )?GeForce RTX 3090", (24, 35.6, 71, 936), ("PCIe 4.0 x16", 64),
         "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"),
    _row("rtx4090", r"NVIDIA GeForce RTX 4090", (24, 82.6, 165.2, 1008), ("PCIe 4.0 x16", 64),
         "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
    _row("h100-sxm", r"NVIDIA H100 80GB HBM3", (80, 67, 989.4, 3350), ("NVLink 4", 900),
         "https://www.nvidia.com/en-us/data-center/h100/"),
    _row("h100-pcie", r"NVIDIA H100 PCIe", (80, 51, 756, 2000), ("PCIe 5.0 x16", 128),
         "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"),
    _row("h200", r"NVIDIA H200", (141, 67, 989.4, 4800), ("NVLink 4", 900),
         "https://www.nvidia.com/en-us/data-center/h200/"),
    _row("b200", r"NVIDIA B200", (180, 75, 2250, 8000), ("NVLink 5", 1800),
         "https://www.nvidia.com/en-us/data-center/hgx/"),
    _row("mi300x", r"AMD Instinct MI300X( OAM)?", (192, 163.4, 1307.4, 5300), ("Infinity Fabric", 896),
         "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
)  # fmt: skip

BY_KEY: dict[str, Device] = {device.key: device for device in DEVICES}


def lookup(device_name: str) -> Device | None:
    """The row of a device by the name that its driver reports (`torch.cuda.get_device_name`) or by its key; None when
    it is not in the table: a variant of a known card has other figures, so names are matched whole."""
    name = device_name.strip()
    for device in DEVICES:
        if name == device.key or re.fullmatch(device.name_pattern, name):
            return device
    return None
