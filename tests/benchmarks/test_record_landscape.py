"""A finished sweep as rows of a landscape, and the noise that re-runs show."""

from types import SimpleNamespace
from typing import Any

import pytest
from report.sweep_records import LIMIT_BYTES, measurement, trial

from benchmarks.record_landscape import knobs_of, noise_of, row_of
from orchestrator.contract.outcome import Ok, OomDevice, Phase
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import GIB, MIB


def forecaster(needed_bytes: int = 600 * MIB, tokens_per_second: float = 900.0) -> Any:
    bill = SimpleNamespace(peak_host_bytes=GIB)
    answer = SimpleNamespace(
        tokens_per_second=tokens_per_second,
        needed_bytes=needed_bytes,
        probability_fits=0.75,
        verdict=SimpleNamespace(bill=bill),
    )
    return SimpleNamespace(forecast=lambda config, replays: answer)


def ran(number: int, speed: float, peak_bytes: int = 500 * MIB, **knobs: object) -> TrialRecord:
    return trial(number, f"mb{number}", Ok(measurement=measurement(speed, peak_bytes)), micro_batch=number, **knobs)


def ran_out(number: int) -> TrialRecord:
    oom = OomDevice(
        phase=Phase.BACKWARD,
        rank=0,
        requested_bytes=16 * MIB,
        allocated_bytes=LIMIT_BYTES,
        limit_bytes=LIMIT_BYTES,
        evidence="can't allocate memory",
    )
    return trial(number, f"mb{number}", oom, micro_batch=number)


def test_a_row_holds_what_was_measured_and_what_was_predicted_beforehand() -> None:
    row = row_of(ran(2, 1000.0), ["method", "lora_rank", "offload_param", "micro_batch"], forecaster())
    assert [row[name] for name in ("method", "lora_rank", "offload_param", "micro_batch")] == ["full", 0, "none", 2]
    assert (row["feasible"], row["oom_kind"], row["outcome"]) == (1, "", "ok")
    assert (row["tokens_per_s"], row["tokens_per_s_low"], row["tokens_per_s_high"]) == (1000.0, 990.0, 1010.0)
    assert row["peak_bytes"] == 500 * MIB
    assert row["peak_gib"] == pytest.approx(500 / 1024, abs=1e-6)
    assert row["prior_tokens_per_s"] == 900.0
    assert row["prior_peak_gib"] == pytest.approx(600 / 1024, abs=1e-6)
    assert row["needed_bytes"] is None


def test_an_out_of_memory_has_no_speed_but_what_it_needed_at_least() -> None:
    row = row_of(ran_out(8), ["micro_batch"], forecaster())
    assert (row["feasible"], row["oom_kind"], row["outcome"], row["phase"]) == (0, "gpu", "oom_device", "backward")
    assert row["tokens_per_s"] is row["peak_bytes"] is row["tokens_per_s_low"] is None
    assert row["needed_bytes"] == LIMIT_BYTES + 16 * MIB


def test_knobs_are_those_that_the_spec_searches() -> None:
    spec = {"search": {"knobs": {"micro_batch": [1, 2], "zero_stage": [0], "method": ["full", "lora"]}}}
    assert knobs_of(spec, []) == ["method", "micro_batch"]
    assert knobs_of({}, [ran(1, 900.0), ran(2, 900.0)]) == ["micro_batch"]


def test_without_re_runs_the_noise_is_what_the_intervals_say() -> None:
    found = noise_of([ran(1, 1000.0), ran(2, 2000.0), ran_out(4)], [])
    # 1 % on either side of the mean is 1.96 standard deviations
    assert found["noise"] == pytest.approx(0.01 / 1.96, abs=1e-4)
    assert "lower bound" in found["noise_from"]


def test_re_runs_say_the_noise_once_the_session_s_own_shift_is_taken_away() -> None:
    records = [ran(1, 1000.0), ran(2, 1000.0), ran(4, 1000.0), ran_out(8)]
    again = [ran(1, 1000.0 * 0.95 * 1.04), ran(2, 1000.0 * 0.95), ran(4, 1000.0 * 0.95 / 1.04), ran_out(8)]
    found = noise_of(records, [again])
    # ratios of two runs: log 1.04, 0, -log 1.04 about their median
    assert found["noise"] == pytest.approx(0.0392 * (2 / 3) ** 0.5 / 2**0.5, abs=2e-4)
    assert found["rerun_shifts"] == [pytest.approx(-0.0513, abs=1e-4)]
    assert found["rerun_outcomes_same"] == "4 of 4"
    assert found["rerun_peak_deviation"] == 0.0


def test_a_session_on_a_machine_in_another_state_says_nothing_of_the_noise() -> None:
    records = [ran(1, 1000.0), ran(2, 1000.0)]
    busy = [ran(1, 500.0), ran(2, 300.0)]
    found = noise_of(records, [busy])
    assert found["noise"] == pytest.approx(0.01 / 1.96, abs=1e-4)
    assert found["rerun_shifts"][0] < -0.6
    assert found["rerun_outcomes_same"] == "2 of 2"
