import pytest

from orchestrator.contract.config import MeasureSettings
from orchestrator.trial.meter import StepTime, is_beaten, is_measured, rate


def test_the_rate_is_the_ratio_of_sums_with_its_interval() -> None:
    steps = [StepTime(100, 1.0), StepTime(100, 1.1), StepTime(100, 0.9), StepTime(100, 1.0)]
    found = rate(steps)
    # residuals 0, -10, 10, 0; standard error sqrt(200 / 3 / 4) / 1.0; t(0.975, 3) = 3.1824
    assert found.mean == pytest.approx(100)
    assert found.high - found.mean == pytest.approx(3.18245 * 4.08248, rel=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)


def test_steps_of_unlike_size_at_one_speed_have_no_spread() -> None:
    assert rate([StepTime(10, 0.1), StepTime(1000, 10.0)]).relative_precision == pytest.approx(0, abs=1e-9)


def test_the_lower_end_stays_above_zero() -> None:
    assert rate([StepTime(1, 10.0), StepTime(100, 0.01)]).low > 0


def test_measuring_ends_when_it_is_precise_enough_or_used_up() -> None:
    settings = MeasureSettings(min_steps=3, max_steps=5, relative_precision=0.02, max_measure_s=30)
    steady, rough = StepTime(100, 1.0), StepTime(50, 1.0)
    assert not is_measured([steady] * 2, settings)
    assert is_measured([steady] * 3, settings)
    assert not is_measured([steady, rough, steady], settings)
    assert is_measured([steady, rough, steady, rough, steady], settings)
    assert is_measured([StepTime(100, 1.0), StepTime(50, 30.0), steady], settings)


def test_a_trial_is_beaten_when_its_whole_interval_lies_below() -> None:
    settings = MeasureSettings(min_steps=3)
    steps = [StepTime(100, 1.0), StepTime(100, 1.1), StepTime(100, 0.9)]
    high = rate(steps).high
    assert is_beaten(steps, settings, high + 1)
    assert not is_beaten(steps, settings, high - 1)
    assert not is_beaten(steps, settings, None)
    assert not is_beaten(steps[:2], settings, 1e9), "two of three steps are too few to judge by"
