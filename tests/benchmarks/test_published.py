"""Rows of published measurements, read as runs; and scores, computed by hand."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published_cells import Row
from benchmarks.published_measured import Measured
from benchmarks.published_rows import PublishedRun, Skipped, interpret
from benchmarks.published_scores import Prediction, ScoredRun, scores, with_margins
from orchestrator.contract.config import Checkpointing
from orchestrator.contract.profile import LossPath, Quantization
from orchestrator.contract.units import GIB

LORA_OF_MISTRAL = {
    "id": "invented-001",
    "source": "somebody/benchmarks results.csv",
    "model": "mistralai/Mistral-7B-v0.1",
    "method": "lora",
    "lora_rank": "16",
    "lora_targets": "q_proj v_proj",
    "precision": "bf16-pure",
    "optimizer": "adamw_torch",
    "parallelism": "single",
    "n_gpus": "1",
    "gpu": "A100",
    "gpu_gb": "80",
    "offload": "none",
    "grad_ckpt": "full",
    "seq_len": "4096",
    "micro_batch": "4",
    "packed": "packed",
    "attention": "flash_attention_2",
    "fused_ce": "no",
    "oom": "no",
    "tokens_per_s_per_gpu": "3000",
    "notes": "torch 2.4.1, transformers 4.48.1",
    "peak_allocated_gib": "24.5",
    "tier": "A",
}


def row(**changes: str) -> Row:
    return dict.fromkeys(published.NEEDED_COLUMNS, "") | LORA_OF_MISTRAL | changes


def run(**changes: str) -> PublishedRun:
    found = interpret(row(**changes))
    assert isinstance(found, PublishedRun), found
    return found


def reason(**changes: str) -> str:
    found = interpret(row(**changes))
    assert isinstance(found, Skipped)
    return found.reason


def test_a_row_becomes_a_run() -> None:
    found = run()
    request, job = found.request, found.job
    assert request.model.config is not None
    assert request.model.config["model_type"] == "mistral"
    assert (request.dtype, request.autocast, request.attention) == ("bf16", None, "flash_attention_2")
    assert request.gradient_checkpointing is Checkpointing.FULL
    assert request.use_reentrant
    assert request.loss is LossPath.TRANSFORMERS_4_48
    assert request.adapter is not None
    assert request.adapter["target_modules"] == ["q_proj", "v_proj"]
    assert (job.point.micro_batch, job.point.sequence_tokens, job.point.lora_rank) == (4, 4096, 16)
    assert (job.engine, job.world_size, job.optimizer_loop, job.master_dtype) == ("torch", 1, "foreach", None)
    assert found.card.capacity_bytes == pytest.approx(79.15 * GIB)
    assert found.measured == Measured("ran", 24.5 * GIB, None, None, 3000)


@pytest.mark.parametrize(
    ("notes", "fused_ce", "loss"),
    [
        ("transformers 4.45.2", "no", LossPath.TRANSFORMERS_4_45),
        ("transformers 4.48.1", "no", LossPath.TRANSFORMERS_4_48),
        ("transformers 5.13.1", "no", LossPath.TRANSFORMERS),
        ("", "", LossPath.TRANSFORMERS),
        ("transformers 4.45.2", "no (triton in-place CE on full logits)", LossPath.INPLACE_4_45),
        ("transformers 4.48.1", "no (triton in-place CE on full logits)", LossPath.INPLACE_4_48),
        ("transformers 4.48.1", "liger fused linear CE", LossPath.FUSED_LINEAR),
    ],
)
def test_the_version_decides_the_loss(notes: str, fused_ce: str, loss: LossPath) -> None:
    assert run(notes=notes, fused_ce=fused_ce).request.loss is loss


def test_an_old_gpt2_never_casts_its_logits() -> None:
    gpt2 = {"model": "openai-community/gpt2", "method": "full", "seq_len": "1024"}
    assert run(**gpt2, notes="transformers 4.12.0").request.loss is LossPath.TRANSFORMERS_UNCAST
    assert run(**gpt2, notes="transformers 4.52.1").request.loss is LossPath.TRANSFORMERS


@pytest.mark.parametrize(
    ("precision", "weights", "autocast"),
    [
        ("bf16-pure", "bf16", None),
        ("fp16-pure", "fp16", None),
        ("bf16", "bf16", "bf16"),
        ("bf16-amp", "fp32", "bf16"),
        ("fp16-amp", "fp32", "fp16"),
        ("bf16-mixed (fp32 weights)", "fp32", "bf16"),
        ("fp32", "fp32", None),
        ("bf16 (DeepSpeed)", "bf16", None),
    ],
)
def test_words_for_precision(precision: str, weights: str, autocast: str | None) -> None:
    request = run(precision=precision).request
    assert (request.dtype, request.autocast) == (weights, autocast)


def test_engines() -> None:
    zero = run(parallelism="zero3", n_gpus="8", offload="optimizer cpu + params cpu", precision="bf16").job
    assert (zero.engine, zero.zero_stage, zero.world_size, zero.master_dtype) == ("deepspeed", 3, 8, "fp32")
    assert (zero.offload_optimizer, zero.offload_param) == ("cpu", "cpu")
    assert run(parallelism="zero2", n_gpus="8", precision="bf16").request.autocast is None
    assert run(parallelism="fsdp(full_shard)", n_gpus="2", precision="bf16-amp").job.master_dtype == "fp32"
    assert run(parallelism="fsdp", n_gpus="2").job.master_dtype is None
    assert run(parallelism="ddp", n_gpus="16").job.ranks_on_node == 8


def test_quantised_rows() -> None:
    qlora = {"method": "qlora", "precision": "bf16"}
    assert run(**qlora).request.quantization is Quantization.NF4_DOUBLE
    assert run(**qlora).request.kbit_preparation
    gptq = run(**qlora, model="TheBloke/Mistral-7B-v0.1-GPTQ").request
    assert (gptq.quantization, gptq.kbit_preparation) == (Quantization.INT4, False)
    assert gptq.model == run().request.model


def test_the_trainers_default_optimizer_changed_with_torch() -> None:
    default = {"optimizer": "adamw_torch (default)"}
    assert run(**default, notes="torch 2.6.0").job.optimizer_loop == "foreach"
    assert run(**default, notes="torch 2.10.0").job.optimizer_loop == "fused"


def test_a_cap_on_lengths_leaves_a_range() -> None:
    found = run(packed="padded to longest, length-bucketed", notes="seq_len is the cap, batches are shorter")
    assert found.job.point.sequence_tokens == 4096
    assert found.shortest_tokens < 4096
    assert found.mean_tokens == 4096
    assert found.request.is_padded


def test_the_mean_length_follows_from_rate_and_duration() -> None:
    """600 tokens/s for 2 s over steps of four rows."""
    capped = {"packed": "padded to longest", "notes": "seq_len is the cap"}
    assert run(**capped, tokens_per_s_per_gpu="600", step_time_s="2").mean_tokens == 300
    assert run(tokens_per_s_per_gpu="600", step_time_s="2").mean_tokens == 4096


def test_other_methods_of_peft() -> None:
    request = run(method="peft:loha", lora_rank="8", notes="loha/invented-rank8").request
    assert request.adapter == {"peft_type": "LOHA", "target_modules": ["q_proj", "v_proj"], "r": 8}
    assert not request.has_rank
    dora = run(notes="lora/invented-rank16-dora").request.adapter
    assert dora is not None
    assert dora["use_dora"] is True


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tier": "C"}, "tier C"),
        ({"seq_len": ""}, "seq_len not stated"),
        ({"model": "nobody/has-this"}, "unknown model: nobody/has-this"),
        ({"parallelism": "tp 8, pp 2"}, "engine not priced: tp 8"),
        ({"parallelism": "fsdp(SHARD_GRAD_OP)"}, "engine not priced: fsdp"),
        ({"compile": "yes"}, "torch.compile is not traced"),
        ({"grad_ckpt": "selective (per-op)"}, "checkpointing not priced: selective"),
        ({"offload": "activations cpu"}, "activations offloaded to the host are not priced"),
        ({"offload": "cpu params"}, "offload under torch is not priced"),
        ({"precision": "fp8"}, "precision fp8 is not priced"),
        ({"optimizer": "muon"}, "optimizer not priced: muon"),
        ({"fused_ce": "chunked CE"}, "loss not priced: chunked cross-entropy"),
        ({"lora_rank": ""}, "lora_rank not stated"),
        ({"lora_targets": ""}, "lora_targets not stated"),
        ({"method": "peft:adapter"}, "its own model code is not traced"),
        ({"micro_batch": "four"}, "micro_batch is not a number"),
    ],
)
def test_what_cannot_be_predicted_is_skipped_with_its_reason(changes: dict[str, str], told: str) -> None:
    assert reason(**changes) == told


def test_samples_count_in_tokens_only_where_rows_are_full() -> None:
    samples = {"tokens_per_s_per_gpu": "", "samples_per_s": "2", "n_gpus": "2", "parallelism": "ddp"}
    assert run(**samples, packed="packed").measured.tokens_per_s == 2 * 4096 / 2
    assert run(**samples, packed="padded").measured.tokens_per_s is None


def scored(
    name: str, measured: Measured, allocated_gib: float = 10, fits: float | None = 1.0, tokens_per_s: float | None = 100
) -> ScoredRun:
    interval = (10 * GIB, 12 * GIB)
    prediction = Prediction(allocated_gib * GIB, interval, allocated_gib * GIB, fits, tokens_per_s, "forward", "logits")
    return ScoredRun(replace(run(id=name), measured=measured), prediction)


def test_memory_scores() -> None:
    rows = [
        scored("x-1", Measured("ran", 10 * GIB, 11 * GIB, None, None), allocated_gib=10.5),
        scored("x-2", Measured("ran", 10 * GIB, 13 * GIB, None, None), allocated_gib=9),
        scored("x-3", Measured("ran", None, None, None, None), fits=0.2),
        scored("x-4", Measured("out_of_memory", None, None, None, None), fits=0.1),
        scored("x-5", Measured("out_of_memory", None, None, None, None), fits=0.9),
        scored("x-6", Measured("failed", None, None, None, None), fits=0.4),
    ]
    found = scores(rows, [Skipped("x-7", "x", "A", "ran", "seq_len not stated")])
    assert (found["rows_scored"], found["rows_skipped"]) == (6, 1)
    assert found["skipped_reasons"] == {"seq_len not stated": 1}
    assert found["allocated_median_abs_error_pct"] == pytest.approx(7.5)
    assert found["allocated_worst"] == [{"id": "x-2", "error_pct": -10.0}, {"id": "x-1", "error_pct": 5.0}]
    assert found["reserved_inside_interval_pct"] == 50
    assert found["reserved_outside"] == ["x-2"]
    assert (found["oom_recall"], found["oom_precision"]) == (0.5, 0.5)
    assert (found["oom_missed"], found["oom_false_alarms"]) == (["x-5"], ["x-3"])
    assert found["failed_predicted_oom_pct"] == 100


def test_a_boundary_is_scored_by_its_error() -> None:
    """The longest sequence that fits on 79.15 GiB is predicted to need 81."""
    measured = Measured("ran", None, None, None, None)
    row_at_boundary = scored("x-1", measured, allocated_gib=81, fits=0.4)
    row_at_boundary = replace(row_at_boundary, run=replace(row_at_boundary.run, is_boundary=True))
    found = scores([row_at_boundary], [])
    assert (found["oom_rows_that_ran"], found["oom_false_alarms"]) == (0, [])
    assert found["boundary_median_error_pct"] == pytest.approx(2.34)
    assert run(notes="MAX context that fits (boundary, not a reading)").is_boundary


def test_intervals_are_widened_by_the_errors_of_other_sources() -> None:
    """Ten rows of source a are 4 % off; source b has no errors of its own, and the least count of others."""
    measured = Measured("ran", 10 * GIB, 12.3 * GIB, None, None)
    a_rows = [scored(f"a-{number}", measured, allocated_gib=10.4) for number in range(10)]
    b_row = scored("b-0", measured, allocated_gib=20)
    *_, last = with_margins([*a_rows, b_row])
    assert last.prediction.reserved_bytes == pytest.approx((9.6 * GIB, 12.48 * GIB))
    assert (b_row.is_inside, last.is_inside) == (False, True)
    first = with_margins([*a_rows, b_row])[0]
    assert first.prediction.margin == pytest.approx(0.05)


def test_speed_is_corrected_by_the_other_half_of_a_source() -> None:
    """The even rows measure twice the prediction, the odd ones three times: each half corrects the other."""
    rows = [
        scored(f"x-{number}", Measured("ran", None, None, None, ratio * 100), tokens_per_s=100)
        for number, ratio in enumerate((2, 3, 2, 3))
    ]
    found = scores(rows, [])
    assert found["tokens_per_s_rows"] == 4
    worst = {entry["id"]: entry["error_pct"] for entry in found["tokens_per_s_worst"]}  # type: ignore
    assert worst["x-0"] == pytest.approx(50)
    assert worst["x-1"] == pytest.approx(-33.33)
    assert found["tokens_per_s_rank_correlation"] is None


def test_ranks_are_compared_within_a_source() -> None:
    def speeds(source: str, pairs: list[tuple[float, float]]) -> list[ScoredRun]:
        return [
            scored(f"{source}-{number}", Measured("ran", None, None, None, measured), tokens_per_s=predicted)
            for number, (predicted, measured) in enumerate(pairs)
        ]

    rows = [*speeds("a", [(1, 10), (2, 20), (3, 30)]), *speeds("b", [(1, 300), (2, 200), (3, 100)])]
    assert scores(rows[:3], [])["tokens_per_s_rank_correlation"] == 1
    assert scores(rows, [])["tokens_per_s_rank_correlation"] == 0


def test_the_command_prints_an_object_for_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, published.NEEDED_COLUMNS)
        writer.writeheader()
        writer.writerows([row(tier="C"), row(id="other-001", compile="yes")])
    assert published.main([str(table), "--json", "--cache", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["total", "tier_a", "invented", "other"]
    assert printed["total"]["rows_skipped"] == 2
    assert printed["tier_a"]["skipped_reasons"] == {"torch.compile is not traced": 1}
    assert printed["other"]["allocated_median_abs_error_pct"] is None
    assert published.main([str(table), "--json", "--check", "--cache", str(tmp_path)]) == 1


def test_a_file_that_is_no_table_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    table.write_text("id,model\n1,x\n")
    assert published.main([str(table)]) == 2
    assert "columns are missing: source" in capsys.readouterr().err
    assert published.main([str(tmp_path / "none.csv")]) == 2


def test_the_clock_has_the_kernels_that_run_where_they_differ_from_what_is_held() -> None:
    lora = {"method": "lora", "lora_rank": "16", "lora_targets": "q_proj v_proj", "precision": "bf16-amp"}
    sharded = run(**lora, parallelism="fsdp(full_shard)", n_gpus="2")
    assert sharded.request.adapter_dtype == "bf16"
    # each adapter's input is cast to its float32 shard's type
    assert sharded.clock_request.adapter_dtype is None
    quantised = {
        **lora,
        "method": "qlora",
        "notes": "framework_config=accelerated-peft-bnb-foak; NF4 base (bitsandbytes)",
    }
    fused = run(**quantised)
    assert fused.request.adapter_dtype is None
    assert fused.clock_request.adapter_dtype == "bf16"
    plain = run(**{**quantised, "notes": "framework_config=accelerated-peft-bnb; NF4 base (bitsandbytes)"})
    assert plain.clock_request == plain.request
