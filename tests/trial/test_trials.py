"""Real trials on a tiny model: what each of them must show before its speed may count."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.outcome import (
    Diverged,
    Invalid,
    Measurement,
    Ok,
    OomDevice,
    OomHost,
    Outcome,
    OverLimit,
    Phase,
)
from orchestrator.report.rows import describe
from orchestrator.search.leak import leak_of
from trial.rig import (
    FULL,
    FULL_PARAMETERS,
    LLAMA,
    LORA,
    LORA_PARAMETERS,
    TemplateClient,
    trial_config,
    write_data,
    write_trial,
)

pytestmark = pytest.mark.trains
MIB = 2**20


def measured(outcome: Outcome | None) -> Measurement:
    assert isinstance(outcome, Ok), outcome
    return outcome.measurement


@pytest.mark.parametrize("method", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_stage_trains_with_both_methods(
    template: TemplateClient, data: Path, tmp_path: Path, method: dict[str, Any], zero_stage: int
) -> None:
    config = trial_config(data, {**method, "zero_stage": zero_stage})
    files = write_trial(tmp_path, config)
    exited, outcome = template.run(files)
    found = measured(outcome)
    assert exited.status == 0
    assert found.trainable_parameters == (FULL_PARAMETERS if method is FULL else LORA_PARAMETERS)
    assert found.total_parameters == FULL_PARAMETERS + (LORA_PARAMETERS if method is LORA else 0)
    assert found.tokens_per_second_low < found.tokens_per_second < found.tokens_per_second_high
    assert found.tokens_per_second == pytest.approx(found.tokens / found.measured_s)
    assert found.sequences == found.measured_steps * config.train.global_batch
    assert found.resolved["deepspeed"]["zero_optimization"]["stage"] == zero_stage


@pytest.mark.parametrize(
    "knobs",
    [
        {**LORA, "gradient_checkpointing": "full"},
        {**LORA, "zero_stage": 3, "gradient_checkpointing": "full", "precision": "bf16"},
        {**FULL, "zero_stage": 2, "precision": "bf16", "optimizer": "sgd"},
        {**FULL, "zero_stage": 2, "offload_optimizer": "cpu", "attention": "eager"},
        {**FULL, "zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    ],
    ids=["checkpointed lora", "bf16 lora", "bf16 sgd", "offloaded optimizer", "offloaded parameters"],
)
def test_every_other_knob_trains(template: TemplateClient, data: Path, tmp_path: Path, knobs: dict[str, Any]) -> None:
    _, outcome = template.run(write_trial(tmp_path, trial_config(data, knobs)))
    assert measured(outcome).last_loss > 0


def test_the_probe_runs_the_longest_rows_through_two_optimizer_steps(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    files = write_trial(tmp_path, trial_config(data, FULL))
    template.run(files)
    events = files.read_events()
    probes = [event for event in events if event.event == "probe"]
    steps = [event for event in events if event.event == "step"]
    assert [event.step for event in probes] == [0, 1]
    assert steps[0].tokens == steps[1].tokens == 2 * (64 + 63)
    assert [event.event for event in events].count("first_step") == 1
    assert all(earlier.time_s <= later.time_s for earlier, later in pairwise(events))


def test_a_trial_ends_once_it_cannot_win_any_more_but_never_before_the_whole_probe(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    measure = {"min_steps": 2, "max_steps": 6, "warmup_steps": 1, "relative_precision": 1e-9}
    config = trial_config(data, FULL, measure=measure)
    found = {}
    for beat in (None, 1.0, 1e9):
        attempt = config.model_copy(update={"beat_tokens_per_second": beat})
        assert attempt.candidate == config.candidate
        files = write_trial(tmp_path / f"beat-{beat}", attempt)
        found[beat] = measured(template.run(files)[1])
        assert [event.event for event in files.read_events()].count("probe") == 2
    assert [found[beat].measured_steps for beat in (None, 1.0, 1e9)] == [6, 6, 2]
    assert [found[beat].raced_out for beat in (None, 1.0, 1e9)] == [False, False, True]


def test_rows_shorter_than_the_sequence_length_are_labelled(template: TemplateClient, tmp_path: Path) -> None:
    rows = write_data(tmp_path / "data", [40] * 12)
    section = {"directory": str(rows), "digest": "short", "sequence_length": 2048}
    _, outcome = template.run(write_trial(tmp_path / "trial", trial_config(rows, FULL, data=section)))
    found = measured(outcome)
    assert not found.reaches_sequence_length
    assert found.probe_row_tokens == 40


def test_one_long_row_among_many_is_found_by_the_probe(template: TemplateClient, tmp_path: Path) -> None:
    limits = {"device_memory_bytes": 160 * MIB}
    knobs = {**FULL, "attention": "eager", "micro_batch": 1}
    section = {"digest": "late", "sequence_length": 2048}
    short = write_data(tmp_path / "short", [256] * 12)
    long = write_data(tmp_path / "long", [256] * 6 + [2048] + [256] * 5)
    found = {}
    for name, rows in (("short", short), ("long", long)):
        config = trial_config(rows, knobs, limits=limits, data={"directory": str(rows), **section})
        found[name] = template.run(write_trial(tmp_path / f"trial-{name}", config))[1]
    assert isinstance(found["short"], Ok)
    failed = found["long"]
    assert isinstance(failed, OomDevice)
    assert (failed.step, failed.tokens, failed.phase) == (0, 2048, Phase.FORWARD)


@pytest.mark.parametrize(("zero_stage", "limit_mib"), [(0, 1), (0, 4), (0, 16), (0, 32), (3, 2), (3, 8), (3, 24)])
def test_a_limit_that_leaves_no_room_even_to_report_is_out_of_memory(
    template: TemplateClient, data: Path, tmp_path: Path, limit_mib: int, zero_stage: int
) -> None:
    limits = {"device_memory_bytes": limit_mib * MIB}
    config = trial_config(data, {**FULL, "zero_stage": zero_stage}, limits=limits)
    _, outcome = template.run(write_trial(tmp_path, config))
    assert isinstance(outcome, OomDevice), outcome
    assert outcome.limit_bytes == limit_mib * MIB


def test_a_tighter_limit_on_the_host_is_an_out_of_memory_of_the_host(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    limits = {"device_memory_bytes": 1024 * MIB, "host_memory_bytes": 48 * MIB}
    _, outcome = template.run(write_trial(tmp_path, trial_config(data, FULL, limits=limits)))
    assert isinstance(outcome, OomHost), outcome
    assert outcome.rank == 0


def test_a_second_step_that_no_longer_fits_beside_the_optimizer_s_states_is_found_by_the_probe(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    wide = {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    parameters_bytes = 4 * (2 * 512 * 512 + 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 2048))
    # the first step fits beside what the process itself takes; the gradients of the second meet the new states
    limit_bytes = round(4.5 * parameters_bytes) + 65 * MIB
    config = trial_config(
        data,
        {**FULL, "micro_batch": 1},
        model={"config": wide},
        limits={"device_memory_bytes": limit_bytes},
        accumulation=1,
    )
    files = write_trial(tmp_path, config)
    exited, outcome = template.run(files)
    assert isinstance(outcome, OomDevice), outcome
    assert exited.status == 1
    assert (outcome.step, outcome.phase) == (1, Phase.BACKWARD)
    assert [event.event for event in files.read_events()].count("probe") == 2
    assert outcome.limit_bytes == limit_bytes
    assert outcome.requested_bytes is not None
    assert outcome.needed_bytes is not None
    assert outcome.needed_bytes > 0.95 * limit_bytes
    assert "DefaultCPUAllocator" in outcome.evidence


def test_a_peak_that_leaves_too_little_headroom_is_over_the_limit(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    limits = {"device_memory_bytes": 512 * MIB, "headroom_bytes": 511 * MIB}
    _, outcome = template.run(write_trial(tmp_path, trial_config(data, FULL, limits=limits)))
    assert isinstance(outcome, OverLimit)
    assert outcome.measurement.limit_bytes == 512 * MIB


@pytest.mark.parametrize("fault", ["keeps_tensors", None])
def test_memory_that_every_step_leaves_behind_shows(
    template: TemplateClient, data: Path, tmp_path: Path, fault: str | None
) -> None:
    measure = {"min_steps": 8, "max_steps": 8, "warmup_steps": 1}
    limits = {"device_memory_bytes": 1024 * MIB}
    config = trial_config(data, FULL, measure=measure, limits=limits)
    _, outcome = template.run(write_trial(tmp_path, config, fault=fault))
    assert isinstance(outcome, Ok), outcome
    assert len(outcome.measurement.ranks[0].held_bytes) == 8
    leak = leak_of(outcome.measurement)
    if fault is None:
        assert leak is None
        assert describe(outcome) == "ok"
    else:
        assert leak is not None
        # 4 MiB in each of a step's two forward passes
        assert leak.bytes_per_step == pytest.approx(8 * MIB, rel=0.1)
        assert describe(outcome).startswith("ok, leaking: memory grows by ")


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_adapters_without_gradient_make_a_trial_invalid(
    template: TemplateClient, data: Path, tmp_path: Path, zero_stage: int
) -> None:
    config = trial_config(data, {**LORA, "zero_stage": zero_stage, "gradient_checkpointing": "full"})
    _, outcome = template.run(write_trial(tmp_path, config, fault="dead_values"))
    assert isinstance(outcome, Invalid), outcome
    assert "2 of 14 adapters had no gradient" in outcome.reason
    assert "v_proj" in outcome.reason


@pytest.mark.parametrize("fault", ["dead_all", "reentrant_checkpointing"])
def test_a_run_that_trains_nothing_is_invalid_however_fast(
    template: TemplateClient, data: Path, tmp_path: Path, fault: str
) -> None:
    config = trial_config(data, {**LORA, "gradient_checkpointing": "full"})
    _, outcome = template.run(write_trial(tmp_path, config, fault=fault))
    assert isinstance(outcome, Invalid), outcome
    assert "gradient" in outcome.reason


def test_a_nan_loss_is_divergence(template: TemplateClient, data: Path, tmp_path: Path) -> None:
    _, outcome = template.run(write_trial(tmp_path, trial_config(data, FULL), fault="nan_loss"))
    assert isinstance(outcome, Diverged)
    assert outcome.step == 1


def test_a_batch_that_differs_from_the_candidate_is_invalid(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    train = {"global_batch": 64, "learning_rate": 1e-3}
    _, outcome = template.run(write_trial(tmp_path, trial_config(data, FULL, train=train)))
    assert isinstance(outcome, Invalid)
    assert "micro-batch 2 x accumulation 2 = batch 4 on 1 ranks" in outcome.reason
