"""The devices of this machine, without torch: GPUs by NVML, else CPU slots."""

import os
from dataclasses import dataclass

import psutil

from orchestrator.contract.units import format_bytes


@dataclass(frozen=True)
class LocalDevice:
    """One device. `visible` is its CUDA_VISIBLE_DEVICES, None for a CPU slot."""

    index: int
    visible: str | None = None
    occupants: tuple[str, ...] = ()
    """Processes that compute on it, in words."""
    used_bytes: int | None = None
    memory_bytes: int | None = None
    """In use on the whole device, and all that it has; None for a CPU slot."""


def cpu_slots(threads_per_device: int) -> list[LocalDevice]:
    """As many slots of `threads_per_device` as this process may use physical cores, at least one."""
    return [LocalDevice(index) for index in range(max(1, usable_cores() // threads_per_device))]


def usable_cores() -> int:
    """Physical cores of this machine that this process may use."""
    allowed = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def threads_per_gpu(devices: int, cpus: float) -> int:
    """Threads of a rank on this machine, `devices` of whose GPUs are given out: an equal share of its cores.

    `cpus`: how many the cluster gives out here, which may be fewer than there are; 0 where it does not count them.
    """
    cores = min(usable_cores(), int(cpus)) if cpus >= 1 else usable_cores()
    return max(1, cores // max(1, devices))


def gpus(visible: str | None = None) -> list[LocalDevice]:
    """This machine's GPUs with the processes that compute on them; empty without a driver.

    `visible` is a CUDA_VISIBLE_DEVICES value of indices or UUIDs that restricts them; None: all.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    try:
        found = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    if visible is None:
        return found
    wanted = {name.strip() for name in visible.split(",")}
    return [gpu for gpu in found if gpu.visible in wanted or str(gpu.index) in wanted]


def _gpu(index: int) -> LocalDevice:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return LocalDevice(
        index=index,
        visible=pynvml.nvmlDeviceGetUUID(handle),
        occupants=tuple(_words(index, process.pid, process.usedGpuMemory) for process in processes),
        used_bytes=memory.used,
        memory_bytes=memory.total,
    )


def _words(index: int, pid: int, used_bytes: int | None) -> str:
    try:
        name = psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        name = "of another container"
    held = "" if used_bytes is None else f" holds {format_bytes(used_bytes)}"
    return f"GPU {index}: process {pid} ({name}){held}"
