"""What differs between computing on CUDA and on the CPU: limits, peaks and names."""

import os
import platform
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.outcome import Health, Phase, RankMemory
from orchestrator.trial.group import RankPlace

_FRAGMENTED_RATIO = 1.5
_FRAGMENTED_MIN_BYTES = 2**30


class Device(Protocol):
    """One rank's device, from its limit to its peaks."""

    kind: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    limit_bytes: int | None
    is_host_bound: bool
    """Whether the share of the host's memory, not the device's limit, is what an allocation would meet first."""

    def torch_device(self) -> torch.device:
        """Where tensors go."""

    def synchronize(self) -> None:
        """Wait for all work that was asked for."""

    def name(self) -> str:
        """The device's name for a reader."""

    def used_bytes(self) -> int:
        """The highest use so far of what the limit limits."""

    def held_bytes(self) -> int:
        """What is taken now of what the limit limits, by tensors where they are told apart."""

    def reserved_bytes(self) -> int | None:
        """Bytes that the allocator holds, at most so far; None where it does not tell."""

    def memory(self, rank: int, peak_by_phase_bytes: dict[Phase, int]) -> RankMemory:
        """All peaks so far."""

    def watch_retries(self) -> None:
        """From now on a retry of the allocator means that it thrashes."""

    def health(self) -> Health:
        """How the allocator is doing."""

    def lift_limit(self) -> None:
        """Give the reporting of a failure room to work."""


def open_device(config: TrialConfig, place: RankPlace) -> Device:
    """The device that `config` asks for, its memory limit in force."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit_bytes = config.limits.device_memory_bytes
    if kind == "cuda":
        return CudaDevice(place.local_rank, limit_bytes)
    host_bytes = config.limits.host_memory_bytes
    share_bytes = None if host_bytes is None else host_bytes // place.ranks_on_node
    return CpuDevice(config.threads_per_rank, limit_bytes, share_bytes)


class CpuDevice:
    """A rank on CPU threads. The limit is on address space that can be written (RLIMIT_DATA) above the fresh fork:
    the device's limit or this rank's share of the host's, whichever is less."""

    kind: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"

    def __init__(self, threads: int, limit_bytes: int | None, host_share_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        bounds = [bytes_ for bytes_ in (limit_bytes, host_share_bytes) if bytes_ is not None]
        self.is_host_bound = host_share_bytes is not None and host_share_bytes == min(bounds) != limit_bytes
        status = process_status_bytes()
        self._start_address_space_bytes = status["VmSize"]
        self._start_resident_bytes = status["VmRSS"]
        if bounds:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (status["VmData"] + min(bounds), hard))
        torch.set_num_threads(threads)

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        return

    def name(self) -> str:
        return cpu_name()

    def used_bytes(self) -> int:
        return max(1, process_status_bytes()["VmPeak"] - self._start_address_space_bytes)

    def held_bytes(self) -> int:
        return process_status_bytes()["VmData"]

    def reserved_bytes(self) -> int | None:
        return None

    def memory(self, rank: int, peak_by_phase_bytes: dict[Phase, int]) -> RankMemory:
        status = process_status_bytes()
        return RankMemory(
            rank=rank,
            peak_memory_bytes=max(1, status["VmPeak"] - self._start_address_space_bytes),
            peak_resident_bytes=max(1, status["VmHWM"] - self._start_resident_bytes),
            peak_by_phase_bytes=peak_by_phase_bytes,
        )

    def watch_retries(self) -> None:
        return

    def health(self) -> Health:
        return Health.GOOD

    def lift_limit(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


class CudaDevice:
    """A rank on one GPU. The limit is a share of the card that PyTorch's allocator may reserve."""

    kind: Literal["cpu", "cuda"] = "cuda"
    backend: Literal["gloo", "nccl"] = "nccl"
    is_host_bound = False

    def __init__(self, index: int, limit_bytes: int | None) -> None:
        self._index = index
        self._start_resident_bytes = process_status_bytes()["VmRSS"]
        torch.cuda.set_device(index)
        capacity_bytes = torch.cuda.get_device_properties(index).total_memory
        bound_bytes = min(limit_bytes or capacity_bytes, capacity_bytes)
        torch.cuda.set_per_process_memory_fraction(bound_bytes / capacity_bytes, index)
        self.limit_bytes: int | None = bound_bytes
        torch.cuda.reset_peak_memory_stats(index)
        self._earlier_retries = 0

    def torch_device(self) -> torch.device:
        return torch.device("cuda", self._index)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def name(self) -> str:
        return torch.cuda.get_device_name(self._index)

    def used_bytes(self) -> int:
        return max(1, torch.cuda.max_memory_allocated(self._index))

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    def reserved_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._index)

    def memory(self, rank: int, peak_by_phase_bytes: dict[Phase, int]) -> RankMemory:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
        return RankMemory(
            rank=rank,
            peak_memory_bytes=max(1, torch.cuda.max_memory_reserved(self._index)),
            peak_resident_bytes=max(1, process_status_bytes()["VmHWM"] - self._start_resident_bytes),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._index),
            peak_device_bytes=total_bytes - free_bytes,
            allocation_retries=self._retries(),
            peak_by_phase_bytes=peak_by_phase_bytes,
        )

    def watch_retries(self) -> None:
        self._earlier_retries = self._retries()

    def _retries(self) -> int:
        """How often an allocation found no memory and was tried again after all cached blocks had been freed
        (DeviceCachingAllocator::malloc in c10/cuda/CUDACachingAllocator.cpp); it also counts at a limit below the card.
        """
        return int(torch.cuda.memory_stats(self._index)["num_alloc_retries"])

    def health(self) -> Health:
        if self._retries() > self._earlier_retries:
            return Health.THRASHING
        reserved_bytes = torch.cuda.max_memory_reserved(self._index)
        allocated_bytes = torch.cuda.max_memory_allocated(self._index)
        is_wide = reserved_bytes - allocated_bytes > _FRAGMENTED_MIN_BYTES
        return Health.FRAGMENTED if is_wide and reserved_bytes > _FRAGMENTED_RATIO * allocated_bytes else Health.GOOD

    def lift_limit(self) -> None:
        return


def worst(healths: Sequence[Health]) -> Health:
    """The group's health from that of its ranks, of which there is at least one."""
    return max(healths, key=(Health.GOOD, Health.FRAGMENTED, Health.THRASHING).index)


def process_status_bytes() -> dict[str, int]:
    """The Vm lines of /proc/self/status, in bytes, by name."""
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Vm"):
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def cpu_name() -> str:
    """The processor's model name and the number of processors, e.g. `AMD EPYC 7B13 (2 processors)`."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model} ({os.cpu_count()} processors)"
