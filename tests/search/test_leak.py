"""A leak is told from the noise of heaps, from what is kept once, and from growth that no training would meet."""

import numpy as np
import pytest
from fakes import measurement

from orchestrator.contract.outcome import Measurement
from orchestrator.contract.units import GIB, MIB
from orchestrator.search.leak import leak_of


def held(bytes_: list[float], limit_bytes: int | None = 8 * GIB) -> Measurement:
    """A trial with a peak of 4 GiB that held so much after each step."""
    whole = measurement(peak_memory_bytes=4 * GIB)
    rank = whole.ranks[0].model_copy(update={"held_bytes": tuple(map(int, bytes_))})
    return whole.model_copy(update={"ranks": (rank,), "limit_bytes": limit_bytes})


def test_steady_growth_is_a_leak_and_tells_when_the_limit_is_met() -> None:
    leak = leak_of(held([3 * GIB + 8 * MIB * step for step in range(20)]))
    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(8 * MIB)
    assert leak.steps_to_limit == 512
    without = leak_of(held([3 * GIB + 8 * MIB * step for step in range(20)], limit_bytes=None))
    assert without is not None
    assert without.steps_to_limit is None


@pytest.mark.parametrize(
    "bytes_",
    [
        [3 * GIB] * 20,
        [3 * GIB + 64 * MIB * (step >= 10) for step in range(20)],
        [3 * GIB - 8 * MIB * step for step in range(20)],
        [3 * GIB + 0.01 * MIB * step for step in range(20)],
        [3 * GIB + 8 * MIB * step for step in range(4)],
        [3 * GIB + 1 * MIB * step for step in range(20)],
    ],
    ids=["flat", "once", "falling", "too little", "too few steps", "no training meets it"],
)
def test_what_is_no_leak(bytes_: list[float]) -> None:
    assert leak_of(held(bytes_)) is None


def test_heaps_that_gain_and_lose_are_no_leak() -> None:
    draw = np.random.default_rng(0)
    found = [leak_of(held(list(3 * GIB + draw.normal(0, 30 * MIB, 20)))) for _ in range(500)]
    walks = [leak_of(held(list(3 * GIB + np.cumsum(draw.normal(0, 8 * MIB, 20))))) for _ in range(500)]
    assert sum(each is not None for each in found) == 0
    assert sum(each is not None for each in walks) <= 10
