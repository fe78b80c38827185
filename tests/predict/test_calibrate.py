"""Calibration finds constants that were planted, stays at its priors without evidence, and says how sure it is."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from orchestrator.contract.profile import Point
from orchestrator.contract.units import GIB, MIB
from orchestrator.predict.calibrate import (
    MemoryObservation,
    MemoryPrior,
    TimeObservation,
    calibrate,
    calibrate_memory,
)
from orchestrator.predict.constants import CUDA_CLOCK, ClockConstants
from orchestrator.predict.job import Job
from orchestrator.predict.machine import device_links, processor
from orchestrator.predict.time import priced
from orchestrator.predict.work import StepWork, step_work
from orchestrator.spec.hardware import BY_KEY
from tests.predict.profiles import decoder

A100 = processor(BY_KEY["a100-80"])
LINKS = device_links(BY_KEY["a100-80"])
PLANTED = replace(CUDA_CLOCK, compute_efficiency=0.75, memory_efficiency=0.95, link_efficiency=0.5)
PRIOR = MemoryPrior(spread=0.06)


def _seen(work: StepWork, truth: ClockConstants, noise: float = 0.0) -> TimeObservation:
    return TimeObservation(work, A100, LINKS, priced(work, A100, LINKS, truth).step_s * exp(noise))


@pytest.fixture(scope="module")
def works() -> list[StepWork]:
    """Bound by products, by memory, and by links."""
    wide, lora = decoder(layers=8), decoder(layers=8, lora=True, attention="eager")
    sharded = Job(Point(2, 512), world_size=8, ranks_on_node=8, zero_stage=2)
    return [step_work(wide, Job(Point(8, 4096))), step_work(lora, Job(Point(8, 4096, 8))), step_work(wide, sharded)]


def test_three_observations_recover_three_planted_constants(works: list[StepWork]) -> None:
    found = calibrate([_seen(work, PLANTED) for work in works], noise=0.03).constants
    for name in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
        assert getattr(found, name) == pytest.approx(getattr(PLANTED, name), rel=0.05), name


def test_nothing_measured_changes_nothing() -> None:
    found = calibrate([], start_spread=0.17)
    assert found.constants == CUDA_CLOCK
    assert found.spread == 0.17


def test_one_observation_makes_all_slower_alike_and_most_what_it_shows(works: list[StepWork]) -> None:
    found = calibrate([_seen(works[0], replace(CUDA_CLOCK, compute_efficiency=0.7))]).constants
    compute = CUDA_CLOCK.compute_efficiency / found.compute_efficiency
    others = [
        CUDA_CLOCK.host_optimizer_efficiency / found.host_optimizer_efficiency,
        CUDA_CLOCK.link_efficiency / found.link_efficiency,
        found.overhead_factor / CUDA_CLOCK.overhead_factor,
    ]
    assert 0.68 < found.compute_efficiency < 0.8
    assert all(1.1 < other < compute for other in others)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_machine_that_is_slower_in_everything_is_found_at_once(works: list[StepWork], count: int) -> None:
    seen = [_seen(work, CUDA_CLOCK, noise=0.7) for work in (works * 2)[:count]]
    found = calibrate(seen).constants
    for work in works:
        unseen = _seen(work, CUDA_CLOCK, noise=0.7)
        assert priced(work, A100, LINKS, found).step_s == pytest.approx(unseen.step_s, rel=0.08)


def test_more_observations_narrow_the_spread_and_a_poor_law_widens_it(works: list[StepWork]) -> None:
    rng = np.random.default_rng(1)

    def spread(count: int, noise: float) -> float:
        seen = [_seen(works[index % 3], PLANTED, noise * rng.standard_normal()) for index in range(count)]
        return calibrate(seen, start_spread=0.2).spread

    one, ten, thirty = spread(1, 0.02), spread(10, 0.02), spread(30, 0.02)
    assert 0.2 >= one > ten > thirty
    assert thirty < 0.1
    assert spread(30, 0.5) > 0.25


def test_a_single_bad_measurement_does_not_carry_the_fit_away(works: list[StepWork]) -> None:
    seen = [_seen(work, PLANTED) for work in works * 3]
    outlier = replace(seen[0], step_s=seen[0].step_s * 5)
    assert calibrate([*seen, outlier]).constants.compute_efficiency == pytest.approx(0.75, rel=0.05)


def _peak(structure: str, predicted_gib: float, ratio: float, base_gib: float = 0.0) -> MemoryObservation:
    return MemoryObservation(structure, predicted_gib * GIB, (base_gib + ratio * predicted_gib) * GIB)


def test_without_peaks_the_bill_stands_and_its_published_spread() -> None:
    found = calibrate_memory([], PRIOR)
    assert found.corrected_bytes("lora", 10 * GIB) == 10 * GIB
    assert found.log_spread("lora") == 0.06


def test_base_and_ratio_of_a_structure_are_told_apart_by_sizes() -> None:
    seen = [_peak("lora", size, 1.05, 0.6) for size in (0.5, 2, 8, 32)]
    found = calibrate_memory(seen, PRIOR)
    assert found.base_bytes == pytest.approx(0.6 * GIB, rel=0.1)
    assert found.ratios["lora"] == pytest.approx(1.05, rel=0.01)
    assert found.corrected_bytes("lora", 16 * GIB) == pytest.approx((0.6 + 1.05 * 16) * GIB, rel=0.01)


def test_structures_share_what_they_have_in_common() -> None:
    seen = [_peak("lora", size, 1.10) for size in (10, 20, 40)] + [_peak("full", size, 1.06) for size in (10, 20, 40)]
    found = calibrate_memory(seen, PRIOR)
    assert found.ratios["lora"] > found.common_ratio > found.ratios["full"] > 1.03
    assert found.log_spread("unseen") > found.log_spread("lora")
    assert 1.04 < found.corrected_bytes("unseen", 10 * GIB) / (10 * GIB) < 1.1


def test_a_failed_run_is_a_lower_bound() -> None:
    fits = MemoryObservation("lora", 10 * GIB, 8 * GIB, is_lower_bound=True)
    assert calibrate_memory([fits], PRIOR).corrected_bytes("lora", 10 * GIB) == pytest.approx(10 * GIB, rel=1e-6)
    breaks = MemoryObservation("lora", 10 * GIB, 12 * GIB, is_lower_bound=True)
    assert calibrate_memory([breaks], PRIOR).corrected_bytes("lora", 10 * GIB) > 11.5 * GIB


def test_the_memory_spread_shrinks_with_data() -> None:
    rng = np.random.default_rng(2)
    spreads = []
    for count in (1, 6, 24):
        seen = [_peak("lora", size, 1.04 * exp(0.01 * rng.standard_normal())) for size in rng.uniform(5, 50, count)]
        spreads.append(calibrate_memory(seen, PRIOR).log_spread("lora"))
    assert 0.06 >= spreads[0] > spreads[1] > spreads[2]
    assert spreads[2] < 0.03


def test_small_runs_of_a_cpu_have_a_base_of_their_own() -> None:
    prior = MemoryPrior(spread=0.15, base_bytes=100 * MIB, base_spread_bytes=100 * MIB, noise=0.06)
    seen = [MemoryObservation("tiny", size * MIB, (180 + size) * MIB) for size in (50, 100, 400, 900)]
    found = calibrate_memory(seen, prior)
    assert found.corrected_bytes("tiny", 200 * MIB) == pytest.approx(380 * MIB, rel=0.05)
