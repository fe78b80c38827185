"""Widths of batches, single changes, and what a forecaster makes of measured trials."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from fakes import measurement
from predict.profiles import decoder

from orchestrator.contract.config import (
    DataSource,
    Knobs,
    MeasureSettings,
    ModelSource,
    Precision,
    QualitySettings,
    TrainSettings,
    TrialConfig,
)
from orchestrator.contract.outcome import Ok
from orchestrator.contract.profile import Profile, TraceRequest
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.contract.units import GIB, MIB
from orchestrator.placement.changes import single_changes
from orchestrator.placement.forecast import Forecast, Forecaster
from orchestrator.placement.gate import rejection
from orchestrator.placement.platform import Platform
from orchestrator.placement.preview import Terms, preview, trial_s
from orchestrator.placement.rows import Rows, uniform_rows
from orchestrator.placement.tracing import Untraceable, request_key
from orchestrator.predict.constants import CPU_CLOCK, CUDA_CLOCK, ClockConstants
from orchestrator.predict.machine import cpu_links, cpu_processor
from orchestrator.predict.overhead import CPU, CUDA
from orchestrator.predict.time import StepTime
from orchestrator.report.rows import describe
from orchestrator.search.cost import Price


def test_the_width_of_a_batch_is_the_mean_of_its_longest_row() -> None:
    lengths = np.array([3, 5, 5, 20])
    rows = Rows(lengths)
    drawn = [max(pair) for pair in itertools.product(lengths.tolist(), repeat=2)]
    assert rows.width_tokens(2) == pytest.approx(np.mean(drawn))
    assert rows.width_tokens(1) == pytest.approx(lengths.mean())
    assert rows.padding_fraction(2) == pytest.approx(1 - lengths.mean() / np.mean(drawn))
    assert (rows.longest_tokens, rows.is_padded(1), rows.is_padded(2)) == (20, False, True)
    packed = uniform_rows(64)
    assert (packed.width_tokens(8), packed.padding_fraction(8), packed.is_padded(8)) == (64.0, 0.0, False)


def test_single_changes_leave_out_what_is_so_already_and_name_what_an_offload_needs() -> None:
    plain = single_changes(Knobs.model_validate({"method": "full", "micro_batch": 4}), world_size=1)
    assert plain == [
        {"gradient_checkpointing": "full"},
        {"micro_batch": 2},
        {"micro_batch": 1},
        {"zero_stage": 2, "offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_param": "cpu"},
        {"method": "lora"},
    ]
    knobs = {"method": "lora", "micro_batch": 1, "zero_stage": 2, "gradient_checkpointing": "full"}
    assert single_changes(Knobs.model_validate(knobs), world_size=2) == [
        {"zero_stage": 3},
        {"offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_param": "cpu"},
    ]


CANDIDATE = TrialConfig(
    knobs=Knobs.model_validate({"method": "full", "micro_batch": 2, "gradient_checkpointing": "none"}),
    model=ModelSource(config={"model_type": "llama"}),
    data=DataSource(directory="", digest="", sequence_length=256),
    train=TrainSettings(global_batch=2, learning_rate=1e-4),
    world_size=1,
    gradient_accumulation=1,
    device="cpu",
)


CORE = cpu_processor({Precision.FP32: 1e11})


def forecaster(limit_bytes: int, constants: ClockConstants = CPU_CLOCK) -> Forecaster:
    """Over a small decoder, whatever is asked for, on one core."""
    profile = decoder(hidden=128, layers=2, intermediate=256, vocabulary=1024, dtype="fp32", device="cpu")
    platform = Platform("cpu", 1, CPU, constants, limit_bytes=limit_bytes, processor=CORE, links=cpu_links(1))

    def trace(requests: Iterable[TraceRequest]) -> dict[str, Profile | Untraceable]:
        return {request_key(request): profile for request in requests}

    return Forecaster(platform, uniform_rows(256), trace)


def ran(peak_bytes: int) -> TrialRecord:
    """A trial of CANDIDATE that was measured."""
    outcome = Ok(measurement=measurement(peak_memory_bytes=peak_bytes))
    attempt = AttemptRecord(attempt=1, token="t", dispatched_s=0.0, ended_s=1.0, outcome=outcome)
    return TrialRecord(trial=0, candidate="c", label="l", config=CANDIDATE, attempts=(attempt,))


def test_measured_trials_correct_what_is_predicted() -> None:
    predicts = forecaster(limit_bytes=140 * MIB)
    before = predicts.forecast(CANDIDATE)
    predicts.learn(ran(before.needed_bytes + 30 * MIB))
    once = predicts.forecast(CANDIDATE)
    for _ in range(4):
        predicts.learn(ran(before.needed_bytes + 30 * MIB))
    after = predicts.forecast(CANDIDATE)
    assert before.needed_bytes < once.needed_bytes <= after.needed_bytes
    assert after.needed_bytes == pytest.approx(before.needed_bytes + 30 * MIB, rel=0.03)
    assert (after.probability_fits or 0.0) < (before.probability_fits or 0.0)


def sized(micro_batch: int, zero_stage: int) -> TrialConfig:
    """CANDIDATE with 16 rows a step."""
    knobs = CANDIDATE.knobs.model_copy(update={"micro_batch": micro_batch, "zero_stage": zero_stage})
    return CANDIDATE.model_copy(update={"knobs": knobs, "gradient_accumulation": 16 // micro_batch})


def took(config: TrialConfig, step_s: float) -> TrialRecord:
    """A trial of `config` whose steps lasted so long."""
    outcome = Ok(measurement=measurement().model_copy(update={"step_s": (step_s,) * 3}))
    attempt = AttemptRecord(attempt=1, token="t", dispatched_s=0.0, ended_s=1.0, outcome=outcome)
    return TrialRecord(trial=0, candidate="c", label="l", config=config, attempts=(attempt,))


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_measured_trials_teach_the_clock(slower: float) -> None:
    """The true machine is `slower` in all, and its launches and hooks take three times as long on top."""
    truth = replace(
        CPU_CLOCK,
        **{
            name: getattr(CPU_CLOCK, name) / slower
            for name in ("compute_efficiency", "memory_efficiency", "fresh_bytes_per_s")
        },
        overhead_factor=3 * slower,
    )
    real, predicts = forecaster(GIB, truth), forecaster(GIB)
    tried = [sized(micro_batch, stage) for micro_batch, stage in ((1, 3), (8, 0), (2, 2), (4, 3))]
    others = [sized(micro_batch, stage) for micro_batch in (1, 2, 4, 8) for stage in (0, 3)]

    def error() -> float:
        pairs = [(predicts.forecast(each).time, real.forecast(each).time) for each in others]
        logs = [np.log(found.step_s / true.step_s) for found, true in pairs if found is not None and true is not None]
        assert len(logs) == len(others)
        return float(np.sqrt(np.mean(np.square(logs))))

    before = error()
    for config in tried:
        forecast = real.forecast(config).time
        assert forecast is not None
        predicts.learn(took(config, forecast.step_s))
    assert error() < min(0.1, before / 2)


def test_a_host_without_room_for_what_is_offloaded_rejects_too() -> None:
    profile = decoder(hidden=1024, layers=4, intermediate=4096, vocabulary=1024)
    offloaded = CANDIDATE.model_copy(
        update={
            "knobs": CANDIDATE.knobs.model_copy(
                update={"zero_stage": 2, "offload_optimizer": "cpu", "precision": "bf16", "reduce_bucket_size": 1000}
            ),
            "device": "cuda",
        }
    )

    def on_host(host_limit_bytes: int) -> Forecast:
        platform = Platform("cuda", 1, CUDA, CUDA_CLOCK, capacity_bytes=80 * GIB, host_limit_bytes=host_limit_bytes)
        predicts = Forecaster(
            platform, uniform_rows(256), lambda requests: {request_key(request): profile for request in requests}
        )
        return predicts.forecast(offloaded)

    roomy, tight = on_host(100 * GIB), on_host(2 * GIB)
    assert rejection(roomy, reject_probability=0.95) is None
    rejected = rejection(tight, reject_probability=0.95)
    assert rejected is not None
    assert rejected.memory == "host"
    assert rejected.capacity_bytes == 2 * GIB
    assert rejected.needed_bytes == sum(rejected.bill.values()) == tight.verdict.bill.peak_host_bytes
    assert "of host memory" in describe(rejected)


def test_only_what_is_surer_than_asked_not_to_fit_is_rejected() -> None:
    needed_bytes = forecaster(MIB).forecast(CANDIDATE).needed_bytes
    edge = forecaster(needed_bytes).forecast(CANDIDATE)
    assert edge.probability_fits == pytest.approx(0.5)
    assert rejection(edge, reject_probability=0.5) is None
    hopeless = forecaster(needed_bytes // 2).forecast(CANDIDATE)
    rejected = rejection(hopeless, reject_probability=0.95)
    assert rejected is not None
    assert rejected.needed_bytes == needed_bytes
    assert sum(rejected.bill.values()) == needed_bytes
    assert rejection(hopeless, reject_probability=1.0) is None


def test_training_for_the_loss_is_part_of_a_trial_s_cost() -> None:
    time = StepTime(
        step_s=0.5, tokens_per_second=1000.0, model_flops=1.0, hardware_flops=1.0, mfu=0.1, hfu=0.1, terms=()
    )
    forecast = replace(forecaster(limit_bytes=4 * GIB).forecast(CANDIDATE), time=time)
    plain = trial_s(forecast, MeasureSettings())
    trained = trial_s(forecast, MeasureSettings(quality=QualitySettings(train_tokens=50_000)))
    assert plain is not None
    assert trained == pytest.approx(plain + 50.0)


def test_a_preview_is_of_trials_and_confirmations_on_their_devices_at_the_price() -> None:
    made = forecaster(limit_bytes=4 * GIB).forecast(CANDIDATE)
    time = StepTime(
        step_s=0.5, tokens_per_second=1000.0, model_flops=1.0, hardware_flops=1.0, mfu=0.1, hfu=0.1, terms=()
    )
    likely = replace(made, time=time, probability_fits=0.9)
    doubtful = replace(likely, probability_fits=0.1)
    measure = MeasureSettings()
    whole_s, short_s = trial_s(likely, measure), trial_s(doubtful, measure)
    assert whole_s is not None
    assert short_s is not None
    assert whole_s > short_s
    terms = Terms(measure, budget=5, lanes=2, world_size=4, confirmations=6, price=Price(2.0, "USD"))
    cost = preview([likely, doubtful] * 3, terms)
    assert cost is not None
    mean_s = (whole_s + short_s) / 2
    assert (cost.trials, cost.launchable, cost.confirmations) == (5, 6, 6)
    assert cost.trial_s == pytest.approx(mean_s)
    assert cost.wall_s == pytest.approx(3 * mean_s + 6 * whole_s), "trials side by side, confirmations one by one"
    assert cost.device_hours == pytest.approx(4 * (5 * mean_s + 6 * whole_s) / 3600)
    assert cost.money == pytest.approx(2.0 * cost.device_hours)
    plain = preview([doubtful], replace(terms, price=None, budget=None))
    assert plain is not None
    assert (plain.trials, plain.confirmations, plain.money) == (1, 0, None), "nothing fits, so nothing is confirmed"
    assert preview([replace(likely, time=None)], terms) is None
