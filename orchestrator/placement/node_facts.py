"""What one machine has, asked of the machine itself: devices by NVML, links by topology, memory by its cgroup, disk.

Runs in a process on that machine, also as a small Ray task; needs neither torch nor a free device.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil

from orchestrator.contract.config import Frozen

LinkKind = Literal["nvlink", "pcie"]

_NVLINK_BYTES_PER_S = {1: 40e9, 2: 50e9, 3: 50e9, 4: 50e9, 5: 100e9}
"""One link, both directions together, by generation. Source: NVIDIA's data sheets of P100, V100 (6 links, 300 GB/s),
A100 (12, 600), H100 (18, 900) and B200 (18, 1800)."""
_PCIE_LANE_BYTES_PER_S = 2e9
"""Third generation, one lane, both directions together; each generation doubles it (PCI-SIG)."""
_PCIE_BASE_GENERATION = 3
_TOPOLOGY = {
    0: "on one board",
    10: "over one PCIe switch",
    20: "over several PCIe switches",
    30: "over one host bridge",
    40: "within one NUMA node",
    50: "across the sockets",
}
"""`nvmlGpuTopologyLevel_t` in nvml.h, nearest first."""
_MEGABIT = 10**6
_UNLIMITED_BYTES = 2**62
"""cgroup v1 says a number near 2^63 where there is no limit."""


class DeviceFacts(Frozen):
    """One GPU. `memory_bytes` is its whole memory, `allocatable_bytes` what is left beside the driver's own share and
    what was in use at the moment."""

    name: str
    memory_bytes: int
    allocatable_bytes: int


class LinkFacts(Frozen):
    """The links of one device to its peers. `bandwidth` in bytes per second, both directions together. `path`: how the
    two devices meet that are furthest apart; empty for a single one."""

    kind: LinkKind
    bandwidth: int
    path: str = ""


class NodeFacts(Frozen):
    """One machine. `cores` are physical ones that this process may use."""

    host: str
    devices: tuple[DeviceFacts, ...] = ()
    link: LinkFacts | None = None
    cores: int
    host_memory_bytes: int
    allocatable_host_bytes: int
    """What the memory cgroup allows; all where there is no limit."""
    memory_copy_bytes_per_s: int
    """Measured: read and written together."""
    disk: str = ""
    """Where the largest local disk is mounted."""
    disk_bytes: int = 0
    free_disk_bytes: int = 0
    network: str = ""
    """Name of the fastest network device, such as `mlx5_0`."""
    network_bytes_per_s: int = 0
    """Both directions together, all InfiniBand ports; else of the fastest Ethernet port. 0: unknown."""
    is_infiniband: bool = False


def node_facts() -> NodeFacts:
    """The machine that this process runs on."""
    disk, disk_bytes, free_bytes = _largest_disk()
    network, network_bytes_per_s, is_infiniband = _network(Path("/sys/class"))
    memory_bytes = psutil.virtual_memory().total
    limit_bytes = cgroup_limit_bytes()
    devices, link = _gpus()
    allowed = len(os.sched_getaffinity(0))
    return NodeFacts(
        host=socket.gethostname(),
        devices=devices,
        link=link,
        cores=min(psutil.cpu_count(logical=False) or allowed, allowed),
        host_memory_bytes=memory_bytes,
        allocatable_host_bytes=min(memory_bytes, limit_bytes) if limit_bytes is not None else memory_bytes,
        memory_copy_bytes_per_s=_memory_copy_bytes_per_s(),
        disk=disk,
        disk_bytes=disk_bytes,
        free_disk_bytes=free_bytes,
        network=network,
        network_bytes_per_s=network_bytes_per_s,
        is_infiniband=is_infiniband,
    )


def cgroup_limit_bytes(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The tightest memory limit of this process's cgroup and those above it, version 1 or 2; None without one."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except FileNotFoundError:
        return None
    found: list[int] = []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            found += _limits(root / "memory", path, "memory.limit_in_bytes")
        elif not controllers:
            found += _limits(root, path, "memory.max")
    return min((limit for limit in found if limit < _UNLIMITED_BYTES), default=None)


def _limits(root: Path, path: str, file: str) -> Iterator[int]:
    """In a container the path may be the host's, and only the root is there: every level that exists is asked."""
    place = root / path.lstrip("/")
    for folder in (place, *place.parents):
        if folder.is_relative_to(root):
            try:
                text = (folder / file).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                yield int(text)


def _gpus() -> tuple[tuple[DeviceFacts, ...], LinkFacts | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return (), None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        devices = tuple(_device(handle) for handle in handles)
        return devices, _link(handles) if handles else None
    finally:
        pynvml.nvmlShutdown()


def _device(handle: object) -> DeviceFacts:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    # `free` leaves out both what the driver reserves and what anyone uses now
    return DeviceFacts(name=pynvml.nvmlDeviceGetName(handle), memory_bytes=memory.total, allocatable_bytes=memory.free)


def _link(handles: list[object]) -> LinkFacts:
    import pynvml

    pairs = [(one, other) for index, one in enumerate(handles) for other in handles[index + 1 :]]
    levels = [pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other) for one, other in pairs]
    path = _TOPOLOGY.get(max(levels), "") if levels else ""
    nvlink_bytes_per_s = min(_nvlink_bytes_per_s(handle) for handle in handles)
    if nvlink_bytes_per_s and all(_have_nvlink(one, other) for one, other in pairs):
        return LinkFacts(kind="nvlink", bandwidth=round(nvlink_bytes_per_s), path=path)
    return LinkFacts(kind="pcie", bandwidth=round(min(_pcie_bytes_per_s(handle) for handle in handles)), path=path)


def _nvlink_bytes_per_s(handle: object) -> float:
    """Of all links that are up; 0 for a device without."""
    import pynvml

    total = 0.0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            total += _NVLINK_BYTES_PER_S.get(_nvlink_generation(handle, link), 0.0)
        except pynvml.NVMLError:
            break  # it has no such link, nor any with a higher number
    return total


def _nvlink_generation(handle: object, link: int) -> int:
    """NVML counts half generations as well: 1, 2, 2.2, 3, 3.1, 4, 5 are 1 to 7 (nvml.h, NVML_NVLINK_VERSION_*)."""
    import pynvml

    return {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}.get(pynvml.nvmlDeviceGetNvLinkVersion(handle, link), 0)


def _have_nvlink(one: object, other: object) -> bool:
    import pynvml

    try:
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _pcie_bytes_per_s(handle: object) -> float:
    """At the generation and width that device and slot can do; the present ones fall while the device idles."""
    import pynvml

    generation: int = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    lanes: int = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return lanes * _PCIE_LANE_BYTES_PER_S * 2.0 ** (generation - _PCIE_BASE_GENERATION)


def _largest_disk() -> tuple[str, int, int]:
    """Mount point, size and free bytes of the largest local disk, NVMe before others."""
    found = []
    for part in psutil.disk_partitions(all=False):
        try:
            usage = psutil.disk_usage(part.mountpoint)
        except OSError:
            continue
        found.append(("nvme" in part.device, usage.total, part.mountpoint, usage.free))
    if not found:
        usage = psutil.disk_usage("/")
        return "/", usage.total, usage.free
    _, total, mount, free = max(found)
    return mount, total, free


def _network(sysfs: Path) -> tuple[str, int, bool]:
    """InfiniBand ports that are up, else the fastest Ethernet port; bytes per second in both directions together."""
    ports = [(rate, path.parts[-4]) for path in sysfs.glob("infiniband/*/ports/*/rate") if (rate := _port_rate(path))]
    if ports:
        return max(ports)[1], 2 * sum(rate for rate, _ in ports) // 8, True
    speeds = [(_read_int(path), path.parent.name) for path in sysfs.glob("net/*/speed") if _is_port(path.parent)]
    speed, name = max(speeds, default=(0, ""))
    return (name, 2 * speed * _MEGABIT // 8, False) if speed > 0 else ("", 0, False)


def _port_rate(rate: Path) -> int:
    """Bits per second of a port that is up and no Ethernet port; `rate` reads like `400 Gb/sec (4X NDR)`."""
    try:
        is_up = "ACTIVE" in (rate.parent / "state").read_text()
        is_infiniband = "InfiniBand" in (rate.parent / "link_layer").read_text()
        words = rate.read_text().split()
    except OSError:
        return 0
    return round(float(words[0]) * 10**9) if is_up and is_infiniband and words[1:2] == ["Gb/sec"] else 0


def _is_port(interface: Path) -> bool:
    """Whether it is a piece of hardware: a bridge or tunnel has no device below it."""
    return (interface / "device").exists()


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0  # a port that is down says nothing or -1


def _memory_copy_bytes_per_s() -> int:
    """The best of five copies of 64 MiB, larger than caches: bytes read and written in a second."""
    import numpy as np

    source = np.ones(2**23)
    target = np.empty_like(source)
    times_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - began_s)
    return round(2 * source.nbytes / min(times_s))
