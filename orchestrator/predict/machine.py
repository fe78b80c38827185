"""What the clock must know of a device, its links and its host: rates, in bytes and operations per second."""

from dataclasses import dataclass, replace

from orchestrator.contract.config import Precision
from orchestrator.contract.profile import Dtype
from orchestrator.spec.cluster import Link, Nodes
from orchestrator.spec.hardware import Device

_GIGA = 10**9
_STAGED_SHARE = 0.5
"""Of the PCIe rate, where devices have no access to their peers: each byte goes down to the host and up again
(NCCL's shared-memory transport)."""
DISK_BYTES_PER_S = 3 * _GIGA
"""Of one node's local NVMe drive: PCIe 3.0 x4 gives 3.9 GB/s before overhead. Assumed where nothing is known."""
CPU_MEMORY_BYTES_PER_S = 10 * _GIGA
"""Of one core that copies: 8-12 GB/s on server Xeons and EPYCs (STREAM with one thread). Assumed."""
LOOPBACK_BYTES_PER_S = 2 * _GIGA
"""One direction, gloo over the loopback device. Assumed; a sweep fits it."""


@dataclass(frozen=True)
class Processor:
    """One rank's device. `peak_flops_per_s` is what MFU divides by; `achievable_share` of it is what large products
    reach; `is_asynchronous`: kernels are queued, so that the host's work hides behind them."""

    peak_flops_per_s: dict[Dtype, float]
    achievable_share: float
    memory_bytes_per_s: float
    is_asynchronous: bool = True


@dataclass(frozen=True)
class Links:
    """Rates in one direction. `device` is one device with its peers in the node, `node` one node with the others,
    `host_link` one device with host memory, `host_memory` and `disk` of the whole node; `_step_s` is the latency of one
    hop of a ring."""

    device_bytes_per_s: float
    host_link_bytes_per_s: float
    host_memory_bytes_per_s: float
    host_cores: int
    node_bytes_per_s: float | None = None
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    device_step_s: float = 3.6e-6
    """All-reduce of 1 MiB over eight NVLinked B200: 51 us in 14 hops
    (https://github.com/stas00/ml-engineering/tree/master/network, 744d01e, "Inter-node speed ...")."""
    node_step_s: float = 23e-6
    """The same over four such nodes: 378 us in 62 hops, eight of them between nodes."""


def processor(device: Device) -> Processor:
    """A device of the table."""
    peaks: dict[Dtype, float] = {
        "fp32": device.matmul_flops_per_s("fp32"),
        "bf16": device.matmul_flops_per_s("bf16"),
        "fp16": device.matmul_flops_per_s("fp16"),
    }
    return Processor(peaks, device.achievable_share, device.memory_bytes_per_s)


def cpu_processor(peak_flops_per_s: dict[Precision, float], cores: int = 1) -> Processor:
    """One rank on `cores` cores. `peak_flops_per_s` was measured by a matrix product, so all of it is achievable."""
    fp32 = peak_flops_per_s[Precision.FP32]
    half = peak_flops_per_s.get(Precision.BF16, fp32)
    return Processor({"fp32": fp32, "bf16": half, "fp16": half}, 1.0, cores * CPU_MEMORY_BYTES_PER_S, False)


def device_links(device: Device, between_nodes_bytes_per_s: float | None = None) -> Links:
    """Links of the table's device in its typical host. `between_nodes_bytes_per_s`: one node, both directions."""
    staged = 1.0 if device.has_peer_access else _STAGED_SHARE
    return Links(
        device_bytes_per_s=device.link_bytes_per_s / 2 * staged,
        node_bytes_per_s=between_nodes_bytes_per_s / 2 if between_nodes_bytes_per_s else None,
        host_link_bytes_per_s=device.host_link_bytes_per_s / 2,
        host_memory_bytes_per_s=device.host.memory_bytes_per_s,
        host_cores=device.host.cores,
    )


def cluster_links(nodes: Nodes, between_nodes: Link | None = None) -> Links:
    """Links of a cluster profile's nodes: its own bandwidths, the table's host."""
    between = between_nodes.bandwidth if between_nodes else None
    device = nodes.hardware
    if device is None:
        return cpu_links(nodes.devices, nodes.link.bandwidth / 2, between / 2 if between else None)
    staged = _STAGED_SHARE if nodes.link.kind == "pcie" and not device.has_peer_access else 1.0
    return replace(device_links(device, between), device_bytes_per_s=nodes.link.bandwidth / 2 * staged)


def cpu_links(cores: int, bytes_per_s: float = LOOPBACK_BYTES_PER_S, node_bytes_per_s: float | None = None) -> Links:
    """Ranks on the cores of one machine that meet through its loopback device."""
    memory_bytes_per_s = cores * CPU_MEMORY_BYTES_PER_S
    return Links(
        device_bytes_per_s=min(bytes_per_s, LOOPBACK_BYTES_PER_S),
        node_bytes_per_s=node_bytes_per_s,
        host_link_bytes_per_s=memory_bytes_per_s,
        host_memory_bytes_per_s=memory_bytes_per_s,
        host_cores=cores,
        device_step_s=100e-6,
        node_step_s=300e-6,
    )
