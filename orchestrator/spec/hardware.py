"""What each known device and link can do, from its maker's data sheet, with the sheet's address beside each row."""

import re
from dataclasses import dataclass

from orchestrator.contract.config import Precision
from orchestrator.contract.profile import Dtype
from orchestrator.contract.units import GIB

_TERA, _GIGA = 10**12, 10**9

ACHIEVABLE_SHARE = 0.8
"""Of the dense peak, by large bf16 products, where no measurement of the device is at hand: an H100 reaches 0.80, an
A100 PCIe 0.81 (`ACHIEVED_SOURCE`)."""
ACHIEVED_SOURCE = "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator (744d01e, MAMF table)"


@dataclass(frozen=True)
class Host:
    """A kind of machine that devices are built into: both sockets' memory rate (channels x transfers/s x 8 bytes) and
    physical cores."""

    memory_bytes_per_s: float
    cores: int


HOSTS: dict[str, Host] = {
    "desktop-ddr4": Host(2 * 3200e6 * 8, 8),
    "desktop-ddr5": Host(2 * 5600e6 * 8, 16),
    "server-ddr4-2666": Host(2 * 6 * 2666e6 * 8, 48),  # two Xeon 8168, as in DGX-2
    "server-ddr4-3200": Host(2 * 8 * 3200e6 * 8, 128),  # two EPYC 7742, as in DGX A100
    "server-ddr5-4800": Host(2 * 8 * 4800e6 * 8, 112),  # two Xeon 8480C, as in DGX H100
}
"""Typical, not of any one user's machine."""


@dataclass(frozen=True)
class Device:
    """One row of the table.

    `memory_bytes` is the nominal size, `usable_memory_bytes` what PyTorch reports as its capacity: up to 9 % less where
    ECC takes a share, and different by some 0.5 % between drivers. `peak_flops_per_s` is dense, without sparsity; fp32
    is the figure without TF32, which PyTorch leaves off; a precision without hardware support is missing.
    `fp16_flops_per_s` is with fp32 accumulation where the maker tells them apart. `achieved_flops_per_s` is the best
    bf16 product measured (ACHIEVED_SOURCE), None where unknown. `link_bytes_per_s` is what one device exchanges with
    its peers in one node, both directions together: NVLink or Infinity Fabric where the device has it, else PCIe;
    `host_link_bytes_per_s` the same with its host. Without `has_peer_access` the driver stages exchanges through host
    memory. `is_checked` tells that the row was compared with a public copy of the sheet or a table made from it, not
    only written down.
    """

    key: str
    name_pattern: str
    memory_bytes: int
    usable_memory_bytes: int
    peak_flops_per_s: dict[Precision, float]
    fp16_flops_per_s: float
    achieved_flops_per_s: float | None
    memory_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    host_link_bytes_per_s: float
    has_peer_access: bool
    host: Host
    source: str
    is_checked: bool

    @property
    def achievable_share(self) -> float:
        """Of the dense peak, that large matrix products reach."""
        if self.achieved_flops_per_s is None:
            return ACHIEVABLE_SHARE
        return self.achieved_flops_per_s / self.peak_flops_per_s[Precision.BF16]

    def matmul_flops_per_s(self, dtype: Dtype) -> float:
        """Dense peak. bfloat16 without hardware support is computed in fp32."""
        if dtype == "fp16":
            return self.fp16_flops_per_s
        return self.peak_flops_per_s.get(Precision(dtype), self.peak_flops_per_s[Precision.FP32])


_PCIE_GB_PER_S = {3: 32, 4: 64, 5: 128}
"""Sixteen lanes, both directions together, by generation (PCI-SIG)."""


def _row(
    key: str,
    name_pattern: str,
    figures: tuple[float, float, float | None, float, float],
    link: tuple[str, float],
    usable_gib: float,
    host: tuple[int, str],
    source: str,
    *,
    achieved_tflops: float | None = None,
    has_peer_access: bool = True,
    is_checked: bool = False,
) -> Device:
    """`figures`: memory in GiB, fp32, bf16 and fp16 TFLOP/s, memory GB/s. `link`: its kind and GB/s. `host`: its PCIe
    generation and kind."""
    memory_gib, fp32_tflops, bf16_tflops, fp16_tflops, memory_gb_per_s = figures
    peaks = {Precision.FP32: fp32_tflops * _TERA}
    if bf16_tflops is not None:
        peaks[Precision.BF16] = bf16_tflops * _TERA
    return Device(
        key=key,
        name_pattern=name_pattern,
        memory_bytes=round(memory_gib * GIB),
        usable_memory_bytes=round(usable_gib * GIB),
        peak_flops_per_s=peaks,
        fp16_flops_per_s=fp16_tflops * _TERA,
        achieved_flops_per_s=achieved_tflops * _TERA if achieved_tflops else None,
        memory_bytes_per_s=memory_gb_per_s * _GIGA,
        link=link[0],
        link_bytes_per_s=link[1] * _GIGA,
        host_link_bytes_per_s=_PCIE_GB_PER_S[host[0]] * _GIGA,
        has_peer_access=has_peer_access,
        host=HOSTS[host[1]],
        source=source,
        is_checked=is_checked,
    )


_SHEETS = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3.0 x16", 32.0), ("PCIe 4.0 x16", 64.0), ("PCIe 5.0 x16", 128.0)
_XEON, _EPYC, _DDR5 = (3, "server-ddr4-2666"), (4, "server-ddr4-3200"), (5, "server-ddr5-4800")

# Usable sizes are those of PyTorch's own out-of-memory messages in public issues.
DEVICES: tuple[Device, ...] = (
    _row("t4", r"(NVIDIA |Tesla )?T4", (16, 8.1, None, 65, 320), _PCIE3, 14.56, _XEON,
         f"{_SHEETS}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf", is_checked=True),
    _row("v100-16", r"Tesla V100-SXM2-16GB", (16, 15.7, None, 125, 900), ("NVLink 2", 300), 15.77, _XEON,
         "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
         is_checked=True),
    _row("v100-32", r"Tesla V100-SXM[23]-32GB", (32, 15.7, None, 125, 900), ("NVLink 2", 300), 31.74, _XEON,
         "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
         is_checked=True),
    _row("a10", r"NVIDIA A10", (24, 31.2, 125, 125, 600), _PCIE4, 22.06, _EPYC,
         f"{_SHEETS}/Data-Center/a10/pdf/a10-datasheet.pdf", is_checked=True),
    _row("a10g", r"NVIDIA A10G", (24, 35, 70, 70, 600), _PCIE4, 22.06, _EPYC,
         "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"),
    _row("a40", r"NVIDIA A40", (48, 37.4, 149.7, 149.7, 696), _PCIE4, 44.42, _EPYC,
         "https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf", is_checked=True),
    _row("a100-40", r"(NVIDIA )?A100-SXM4-40GB", (40, 19.5, 312, 312, 1555), ("NVLink 3", 600), 39.39, _EPYC,
         f"{_SHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf", achieved_tflops=271.2, is_checked=True),
    _row("a100-80", r"(NVIDIA )?A100-SXM4-80GB", (80, 19.5, 312, 312, 2039), ("NVLink 3", 600), 79.15, _EPYC,
         f"{_SHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
         achieved_tflops=271.2, is_checked=True),
    _row("a100-pcie-40", r"(NVIDIA )?A100-PCIE-40GB", (40, 19.5, 312, 312, 1555), _PCIE4, 39.39, _EPYC,
         f"{_SHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf", achieved_tflops=252.9, is_checked=True),
    _row("a100-pcie-80", r"NVIDIA A100 80GB PCIe", (80, 19.5, 312, 312, 1935), _PCIE4, 79.15, _EPYC,
         f"{_SHEETS}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
         achieved_tflops=252.9, is_checked=True),
    _row("a800-80", r"(NVIDIA )?A800-SXM4-80GB", (80, 19.5, 312, 312, 2039), ("NVLink 3", 400), 79.15, _EPYC,
         "https://www.nvidia.com/en-us/design-visualization/a800/", achieved_tflops=271.2),
    _row("l4", r"NVIDIA L4", (24, 30.3, 121, 121, 300), _PCIE4, 22.03, _EPYC,
         "https://www.nvidia.com/en-us/data-center/l4/", is_checked=True),
    _row("l40", r"NVIDIA L40", (48, 90.5, 181.05, 181.05, 864), _PCIE4, 44.40, _EPYC,
         "https://www.nvidia.com/en-us/data-center/l40/", is_checked=True),
    _row("l40s", r"NVIDIA L40S", (48, 91.6, 362, 362, 864), _PCIE4, 44.42, _EPYC,
         "https://www.nvidia.com/en-us/data-center/l40s/", is_checked=True),
    _row("rtx-a6000", r"NVIDIA RTX A6000", (48, 38.7, 154.8, 154.8, 768), _PCIE4, 47.53, _EPYC,
         "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"),
    _row("rtx-6000-ada", r"NVIDIA RTX 6000 Ada Generation", (48, 91.1, 364.2, 364.2, 960), _PCIE4, 47.50, _EPYC,
         "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
    _row("rtx3090", r"(NVIDIA )?GeForce RTX 3090", (24, 35.6, 71, 71, 936), _PCIE4, 23.69, (4, "desktop-ddr4"),
         "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
         has_peer_access=False),
    _row("rtx4090", r"NVIDIA GeForce RTX 4090", (24, 82.6, 165.2, 165.2, 1008), _PCIE4, 23.52, (4, "desktop-ddr5"),
         "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
         has_peer_access=False),
    _row("rtx5090", r"NVIDIA GeForce RTX 5090", (32, 104.8, 209.5, 209.5, 1792), _PCIE5, 31.36, (5, "desktop-ddr5"),
         "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
         has_peer_access=False),
    _row("h100-sxm", r"NVIDIA H100 80GB HBM3", (80, 67, 989.4, 989.4, 3350), ("NVLink 4", 900), 79.10, _DDR5,
         "https://www.nvidia.com/en-us/data-center/h100/", achieved_tflops=794.5, is_checked=True),
    _row("h100-pcie", r"NVIDIA H100 PCIe", (80, 51, 756, 756, 2000), _PCIE5, 79.10, _DDR5,
         "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet", is_checked=True),
    _row("h200", r"NVIDIA H200", (141, 67, 989.4, 989.4, 4800), ("NVLink 4", 900), 139.80, _DDR5,
         "https://www.nvidia.com/en-us/data-center/h200/", achieved_tflops=794.5, is_checked=True),
    _row("b200", r"NVIDIA B200", (180, 75, 2250, 2250, 8000), ("NVLink 5", 1800), 178.35, _DDR5,
         "https://www.nvidia.com/en-us/data-center/hgx/", achieved_tflops=1745, is_checked=True),
    _row("mi300x", r"AMD Instinct MI300X( OAM)?", (192, 163.4, 1307.4, 1307.4, 5300), ("Infinity Fabric", 896), 191.5,
         _DDR5, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html", achieved_tflops=668.4,
         is_checked=True),
    _row("mi325x", r"AMD Instinct MI325X", (256, 163.4, 1307.4, 1307.4, 6000), ("Infinity Fabric", 896), 255.5,
         _DDR5, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html", achieved_tflops=784.9,
         is_checked=True),
)  # fmt: skip

BY_KEY: dict[str, Device] = {device.key: device for device in DEVICES}

BETWEEN_NODES: dict[str, float] = {
    "ethernet-10g": 2 * 10e9 / 8,
    "ethernet-25g": 2 * 25e9 / 8,
    "ethernet-100g": 2 * 100e9 / 8,
    "infiniband-hdr": 2 * 200e9 / 8,
    "infiniband-ndr": 2 * 400e9 / 8,
    "efa-4x100g": 2 * 4 * 100e9 / 8,  # p4d.24xlarge
    "infiniband-8x200g": 2 * 8 * 200e9 / 8,  # DGX A100
    "infiniband-8x400g": 2 * 8 * 400e9 / 8,  # DGX H100
    "efa-32x100g": 2 * 32 * 100e9 / 8,  # p5.48xlarge
}
"""Bytes per second of one node with the others, both directions together: ports x bits per second.
Source: https://github.com/stas00/ml-engineering/tree/master/network (744d01e, table of platforms)."""


def lookup(device_name: str) -> Device | None:
    """The row of a device by the name that its driver reports (`torch.cuda.get_device_name`) or by its key; None when
    it is not in the table: a variant of a known card has other figures, so names are matched whole."""
    name = device_name.strip()
    for device in DEVICES:
        if name == device.key or re.fullmatch(device.name_pattern, name):
            return device
    return None
