"""How many threads a rank on a GPU gets."""

import pytest

from orchestrator.placement import local_devices
from orchestrator.placement.local_devices import threads_per_gpu


@pytest.mark.parametrize(
    ("devices", "cpus", "threads"),
    [(8, 96.0, 12), (8, 16.0, 2), (4, 0.0, 24), (8, 200.0, 12), (128, 96.0, 1)],
    ids=["all cores", "Ray gives out fewer", "Ray counts no CPUs", "Ray gives out more than there are", "one at least"],
)
def test_a_gpu_gets_its_share_of_the_nodes_own_cores(
    devices: int, cpus: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_devices, "usable_cores", lambda: 96)
    assert threads_per_gpu(devices, cpus) == threads
