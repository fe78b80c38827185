"""Exports: the agreed files, and each of them read by the library that it is for."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sweep_records import config, make_facts, make_sweep, measurement

from orchestrator.contract.config import Knobs
from orchestrator.contract.errors import StateError, UsageError
from orchestrator.contract.outcome import Crashed, Ok, Phase
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.contract.units import MIB
from orchestrator.report.export.folder import export_files, write_export
from orchestrator.report.export.measured import MeasuredTrial, measured_trial

GOLDEN = Path(__file__).parent / "golden"
ADAMW = {
    "class": "torch.optim.adamw.AdamW",
    "lr": 1e-4,
    "weight_decay": 0.0,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "fused": True,
}
SGD = {"class": "torch.optim.sgd.SGD", "lr": 1e-4, "weight_decay": 0.0, "fused": True}
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}


def deepspeed_of(knobs: Knobs, accumulation: int) -> dict[str, object]:
    zero: dict[str, object] = {"stage": knobs.zero_stage}
    if knobs.zero_stage:
        zero |= {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, "overlap_comm": False}
    if knobs.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": 100_000, "stage3_param_persistence_threshold": 1000}
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    content: dict[str, object] = {
        "train_micro_batch_size_per_gpu": knobs.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    return content | ({"bf16": {"enabled": True}} if knobs.precision == "bf16" else {})


def exported(rows: str = "/data/rows", world_size: int = 1, **knobs: object) -> MeasuredTrial:
    """A trial of one of the shapes below, as the trial plane reports it."""
    content = config(**knobs)
    content = content.model_copy(
        update={
            "data": content.data.model_copy(update={"directory": rows, "sequence_length": 64}),
            "world_size": world_size,
            "gradient_accumulation": content.gradient_accumulation // world_size,
            "model": content.model.model_copy(update={"config": TINY_LLAMA}),
        }
    )
    resolved = {
        "deepspeed": deepspeed_of(content.knobs, content.gradient_accumulation),
        "optimizer": SGD if content.knobs.optimizer == "sgd" else ADAMW,
        "lora": LORA if content.knobs.method == "lora" else None,
        "environment": ENVIRONMENT,
    }
    attempt = AttemptRecord(
        attempt=1,
        token="t",
        dispatched_s=1.0,
        outcome=Ok(measurement=measurement(1500.0, 700 * MIB, resolved=resolved)),
    )
    record = TrialRecord(trial=4, candidate="c0ffee", label="a label", config=content, attempts=(attempt,))
    facts = make_facts()
    data = facts.data.model_copy(update={"directory": content.data.directory})
    return measured_trial(make_sweep(), record, [record], facts.model_copy(update={"data": data}), "0.1.0")


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, object]] = {
    "full": {"gradient_checkpointing": "full", "optimizer": "sgd"},
    "lora": {
        "method": "lora",
        "lora_rank": 8,
        "lora_targets": ("q_proj", "v_proj"),
        "zero_stage": 3,
        "precision": "bf16",
        "gradient_checkpointing": "full",
        "world_size": 2,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_file_is_as_agreed(shape: str) -> None:
    files = export_files(exported(**SHAPES[shape]))
    golden = {file.name.removesuffix(".golden"): file.read_text() for file in (GOLDEN / f"export-{shape}").iterdir()}
    assert files == golden


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty prepared rows of 5 to 64 tokens, in the format of the trial plane."""
    folder = tmp_path / "rows"
    folder.mkdir()
    lengths = np.concatenate([[64, 64], np.random.default_rng(0).integers(5, 64, size=38)])
    np.random.default_rng(1).integers(0, 128, size=int(lengths.sum())).astype(np.int32).tofile(folder / "tokens.bin")
    np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tofile(folder / "offsets.bin")
    facts = make_facts().data.model_copy(update={"directory": str(folder)})
    (folder / "data.json").write_text(facts.model_dump_json())
    return folder


ROUND_TRIP = """
import json, sys
from transformers import TrainingArguments
from deepspeed.runtime.config import DeepSpeedConfig
for folder in sys.argv[1:]:
    read = lambda name: json.load(open(folder + "/" + name))
    arguments = TrainingArguments(**{**read("training_arguments.json"), "deepspeed": folder + "/ds_config.json"})
    found = {
        "micro_batch": arguments.per_device_train_batch_size,
        "checkpointing": arguments.gradient_checkpointing,
        "reentrant": (arguments.gradient_checkpointing_kwargs or {}).get("use_reentrant"),
        "world": arguments.world_size,
    }
    arguments.hf_deepspeed_config.trainer_config_process(arguments)
    raw = read("ds_config.json")
    raw["train_batch_size"] = raw["train_micro_batch_size_per_gpu"] * raw["gradient_accumulation_steps"]
    config = DeepSpeedConfig(raw)
    found["zero_stage"] = config.zero_config.stage
    found["offload"] = config.zero_config.offload_optimizer is not None and config.zero_config.offload_optimizer.device
    found["bucket"] = config.zero_config.reduce_bucket_size
    found["bf16"] = config.bfloat16_config.enabled
    try:
        from peft import LoraConfig
        lora = LoraConfig.from_pretrained(folder)
        found["lora"] = [lora.r, lora.lora_alpha, sorted(lora.target_modules), lora.task_type]
    except (OSError, ValueError):
        found["lora"] = None
    print(json.dumps(found))
"""


def test_each_file_is_read_by_its_own_library(rows: Path, tmp_path: Path) -> None:
    folders = {shape: tmp_path / shape for shape in SHAPES}
    for shape, folder in folders.items():
        write_export(exported(str(rows), **SHAPES[shape]), folder)
    run = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP, *map(str, folders.values())],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    documents = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"micro_batch"')]
    shared = {"micro_batch": 2, "checkpointing": True, "reentrant": False, "world": 1}
    assert dict(zip(folders, documents, strict=True)) == {
        "full": shared | {"zero_stage": 0, "offload": False, "bucket": 500_000_000, "bf16": False, "lora": None},
        "lora": shared
        | {
            "zero_stage": 3,
            "offload": "cpu",
            "bucket": 500_000,
            "bf16": True,
            "lora": [8, 16, ["q_proj", "v_proj"], "CAUSAL_LM"],
        },
    }


@pytest.mark.trains
@pytest.mark.parametrize("shape", SHAPES)
def test_the_launch_script_trains(shape: str, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_export(exported(str(rows), **SHAPES[shape]), folder)
    run = subprocess.run(
        ["bash", str(folder / "launch.sh"), "--max-steps", "5"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"tokens_per_second"')))
    assert result["measured_steps"] == 2
    assert result["tokens_per_second"] > 0
    assert result["peak_memory_bytes"] > MIB
    saved = {file.name for file in (folder / "output").iterdir()}
    assert saved & {"model.safetensors", "adapter_model.safetensors"}


def test_a_second_export_needs_force(rows: Path, tmp_path: Path) -> None:
    trial = exported(str(rows), **SHAPES["lora"])
    write_export(trial, tmp_path / "out")
    with pytest.raises(UsageError, match="--force"):
        write_export(trial, tmp_path / "out")
    write_export(exported(str(rows), **SHAPES["full"]), tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_lost_rows_are_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"tokens\.bin is missing"):
        write_export(exported(str(tmp_path / "gone"), **SHAPES["full"]), tmp_path / "out")


def test_a_trial_without_numbers_cannot_be_exported() -> None:
    crash = Crashed(phase=Phase.LOAD, rank=0, error="ValueError: no", exit_code=1)
    attempt = AttemptRecord(attempt=1, token="t", dispatched_s=1.0, outcome=crash)
    record = TrialRecord(trial=2, candidate="c", label="l", config=config(), attempts=(attempt,))
    with pytest.raises(UsageError, match="did not run to its end"):
        measured_trial(make_sweep(), record, [record], None, "0.1.0")


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, "RDZV_ENDPOINT: measured on 2 nodes: start this on each of them with RDZV_ENDPOINT=first-node:29400"),
        ({"RDZV_ENDPOINT": "a:1"}, "--nnodes 2 --nproc-per-node 2 --rdzv-id quickstart-4 --rdzv-backend c10d"),
        ({"NNODES": "1", "NPROC_PER_NODE": "4"}, "--nnodes 1 --nproc-per-node 4 --standalone train.py"),
    ],
)
def test_a_trial_over_two_nodes_is_launched_on_two(
    variables: dict[str, str], launched: str, rows: Path, tmp_path: Path
) -> None:
    trial = exported(str(rows), **SHAPES["full"])
    wide = trial.config.model_copy(update={"world_size": 4, "nodes": 2})
    trial = replace(trial, record=trial.record.model_copy(update={"config": wide}))
    write_export(trial, tmp_path / "out")
    assert ", 2 on each of 2 nodes." in " ".join(trial.header())
    echo = tmp_path / "echo"
    echo.write_text('#!/bin/sh\necho "$@"\n')
    echo.chmod(0o700)
    run = subprocess.run(
        ["bash", str(tmp_path / "out" / "launch.sh")],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHON": str(echo), **variables},
    )
    assert launched in run.stdout + run.stderr
