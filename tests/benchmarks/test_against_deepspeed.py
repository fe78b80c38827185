"""What the comparison with DeepSpeed's autotuner reads and computes, without running either side."""

import importlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.against_deepspeed_page import BrimfulResult, Comparison, Pair, page, ratio
from benchmarks.autotuner_run import (
    CALLS_VARIABLE,
    HARMLESS,
    AutotunerResult,
    Experiment,
    autotuner_config,
    own_duration_s,
    place_stubs,
    read_result,
)

OUT_OF_MEMORY = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"


def experiment(
    results: Path, name: str, zero: dict[str, object], micro_batch: int, throughput: float | None, took_s: int = 20
) -> None:
    folder = results / name
    folder.mkdir(parents=True)
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": micro_batch}
    (folder / "exp.json").write_text(json.dumps({"name": name, "ds_config": config}))
    (folder / "stderr.log").write_text("" if throughput else f"Traceback:\n[rank0]: {OUT_OF_MEMORY}\n")
    if throughput is not None:
        (folder / "metrics.json").write_text(json.dumps({"latency": 1.0, "throughput": throughput}))
    for path in folder.iterdir():
        os.utime(path, (1000 + took_s, 1000 + took_s))
    os.utime(folder / "exp.json", (1000, 1000))


def test_an_experiment_that_ran_has_its_metric_and_one_that_did_not_its_error(tmp_path: Path) -> None:
    results = tmp_path / "autotuning_results"
    experiment(results, "z0_gas8_tmbspg1", {"stage": 0}, 1, 12.5)
    experiment(results, "z1_rbs5.0e+07_tmspg8", {"stage": 1, "reduce_bucket_size": 5e7}, 8, None, took_s=15)
    optimal = {"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 1}
    (results / "ds_config_optimal.json").write_text(json.dumps(optimal))
    (tmp_path / "stub_calls.txt").write_text("pdsh -f 1024 -w localhost pkill -f z0_gas8_tmbspg1\n")

    result = read_result(tmp_path, wall_s=100.0)

    by_name = {each.name: each for each in result.experiments}
    assert by_name["z0_gas8_tmbspg1"] == Experiment("z0_gas8_tmbspg1", 0, 1, 12.5, None, 20.0, False)
    varied = by_name["z1_rbs5.0e+07_tmspg8"]
    assert varied == Experiment("z1_rbs5.0e+07_tmspg8", 1, 8, None, OUT_OF_MEMORY, 15.0, True)
    assert (result.launches, result.label) == (2, "z0 mb1")
    assert result.cleanups == ("pdsh -f 1024 -w localhost pkill -f z0_gas8_tmbspg1",)


def test_an_autotuner_that_found_nothing_has_no_winner(tmp_path: Path) -> None:
    experiment(tmp_path / "autotuning_results", "profile_model_info", {"stage": 3}, 1, None)
    result = read_result(tmp_path, wall_s=60.0)
    assert (result.optimal, result.label, result.own_s) == (None, "none", None)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("Tuning completed in 0:10:45.250000. Total number of experiments: 11.", 645.25),
        ("Tuning completed in 1:00:00. Total number of experiments: 11.", 3600.0),
        ("Tuning completed in 1 day, 0:00:01. Total number of experiments: 11.", 86401.0),
        ("nothing of the kind", None),
    ],
)
def test_the_duration_that_the_autotuner_prints(said: str, seconds: float | None) -> None:
    assert own_duration_s(said) == seconds


def test_the_autotuner_keeps_the_global_batch() -> None:
    config = autotuner_config({"global_batch": 48, "gradient_clipping": 1.0}, [0, 1, 2, 3], [1, 2, 4, 8], ranks=2)
    # every experiment takes max(list) * accumulation rows on each rank (run_tuning_micro_batch_sizes)
    assert 8 * config["gradient_accumulation_steps"] * 2 == 48
    assert config["autotuning"]["fast"] is False


def test_its_commands_that_kill_reach_stubs(tmp_path: Path) -> None:
    calls = tmp_path / "calls.txt"
    stubs = place_stubs(tmp_path / "stubs")
    environment = {CALLS_VARIABLE: str(calls), "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(["sleep", "60"]) as process:
        for name in HARMLESS:
            assert subprocess.run([name, "-f", "sleep 60"], env=environment).returncode == 0
        assert process.poll() is None
        process.kill()
    assert calls.read_text().splitlines() == [f"{name} -f sleep 60" for name in HARMLESS]


def test_the_ratio_is_over_pairs_in_which_both_ran() -> None:
    found = ratio((Pair(100.0, 110.0), Pair(100.0, 130.0), Pair(None, 500.0), Pair(200.0, None)))
    assert found is not None
    assert found.mean == pytest.approx(1.2)
    # Student's t with one degree of freedom: 12.706 * 0.1414 / sqrt(2)
    assert (found.low, found.high) == pytest.approx((1.2 - 1.2706, 1.2 + 1.2706), abs=1e-3)
    assert found.of_medians == pytest.approx(1.2)
    assert ratio((Pair(100.0, 110.0), Pair(None, 1.0))) is None


def comparison(pairs: tuple[Pair, ...], wall_s: float) -> Comparison:
    optimal = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 8}
    experiments = (
        Experiment("z1_gas1_tmbspg8", 1, 8, 30.0, None, 25.0, False),
        Experiment("z1_rbs5.0e+07_tmspg8", 1, 8, None, OUT_OF_MEMORY, 15.0, True),
    )
    return Comparison(
        machine="a machine",
        versions={"deepspeed": "0.19.8"},
        date="2026-12-01",
        space="ZeRO stages [0, 1] and micro-batches [8], 16 rows a step",
        ranks=2,
        limit="256.00 MiB",
        steps=100,
        autotuner=AutotunerResult(1000.0, 990.0, experiments, optimal, ()),
        brimful=(BrimfulResult("ray", wall_s, 5, 6, 1, 7, "full z0 mb1 fp32"),),
        pairs=pairs,
    )


def test_the_page_says_what_is_met_and_what_is_not() -> None:
    text = page(comparison((Pair(100.0, 150.0), Pair(100.0, 150.0)), wall_s=99.0), "the command")
    assert "took 0.099 of the autotuner's wall time (target: at most 0.1, met)" in text
    assert "reaches 1.500 times the autotuner's (medians; target: at least 1.0, met)" in text
    assert "| Brimful, `--pool ray` | 99.0 | 11 | 6 | 1 | 7 | full z0 mb1 fp32 |" in text
    assert "| DeepSpeed's autotuner | 1000.0 | 2 | 0 | 1 | 0 | z1 mb8 |" in text
    assert "1 of its 2 experiments vary bucket sizes; they took 15 of the 40 s" in text
    text = page(comparison((Pair(100.0, 90.0), Pair(None, 90.0)), wall_s=101.0), "the command")
    assert "took 0.101 of the autotuner's wall time (target: at most 0.1, not met)" in text
    assert "there is no ratio" in text
    assert "| 2 | failed | 90 | none |" in text


def test_the_figures_survive_json() -> None:
    document = json.loads(json.dumps(comparison((Pair(1.0, 2.0), Pair(1.0, 2.0)), wall_s=50.0).document()))
    assert document["wall_ratio"] == 0.05
    assert document["throughput_ratio"]["mean"] == 2.0


def test_plain_rows_take_each_row_of_a_step_once(tmp_path: Path) -> None:
    plain = importlib.import_module("benchmarks.plain_training")  # brings deepspeed in
    np.arange(10, dtype=np.int32).tofile(tmp_path / "tokens.bin")
    np.array([0, 1, 3, 6, 10], dtype=np.int64).tofile(tmp_path / "offsets.bin")
    rows = plain.Rows(tmp_path, seed=0, pad_token_id=99)
    assert rows.micro_batches(0, micro_batch=1, accumulation=2, world_size=2) == [[[3], [3]], [[3], [3]]]
    by_rank = rows.micro_batches(plain.LONGEST_STEPS, micro_batch=1, accumulation=2, world_size=2)
    assert sorted(row for groups in by_rank for indices in groups for row in indices) == [0, 1, 2, 3]
    batch = rows.batch([1, 3])
    assert batch["input_ids"].tolist() == [[1, 2, 99, 99], [6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [6, 7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
