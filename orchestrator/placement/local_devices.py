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
    allowed = len(os.sched_getaffinity(0))
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    return [LocalDevice(index) for index in range(max(1, cores // threads_per_device))]


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
