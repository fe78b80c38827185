"""Health of a GPU's allocator, on a device that only counts."""

import pytest
import torch

from orchestrator.contract.outcome import Health
from orchestrator.trial.device import CudaDevice, worst

GIB = 2**30


class CountingCuda:
    """The part of torch.cuda that a rank's device asks."""

    def __init__(self) -> None:
        self.retries = 0
        self.reserved_bytes = self.allocated_bytes = 4 * GIB

    def set_device(self, index: int) -> None: ...

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None: ...

    def reset_peak_memory_stats(self, index: int) -> None: ...

    def get_device_properties(self, index: int) -> "CountingCuda":
        return self

    total_memory = 24 * GIB

    def memory_stats(self, index: int) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total_memory - self.reserved_bytes, self.total_memory

    def max_memory_reserved(self, index: int) -> int:
        return self.reserved_bytes

    def max_memory_allocated(self, index: int) -> int:
        return self.allocated_bytes


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CountingCuda:
    counting = CountingCuda()
    monkeypatch.setattr(torch, "cuda", counting)
    return counting


def test_retries_of_the_steps_are_thrashing_and_those_of_the_start_are_not(cuda: CountingCuda) -> None:
    device = CudaDevice(0, 8 * GIB)
    cuda.retries = 2
    device.watch_retries()
    assert device.health() is Health.GOOD
    cuda.retries = 3
    assert device.health() is Health.THRASHING
    assert device.memory(0, {}).allocation_retries == 3


def test_much_that_is_reserved_and_not_used_is_fragmented(cuda: CountingCuda) -> None:
    device = CudaDevice(0, 8 * GIB)
    cuda.reserved_bytes, cuda.allocated_bytes = 7 * GIB, 4 * GIB
    assert device.health() is Health.FRAGMENTED


def test_one_thrashing_rank_makes_the_trial_thrash() -> None:
    assert worst([Health.GOOD, Health.THRASHING, Health.FRAGMENTED]) is Health.THRASHING
    assert worst([Health.FRAGMENTED, Health.GOOD]) is Health.FRAGMENTED
