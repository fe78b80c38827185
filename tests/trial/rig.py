"""A tiny model, tiny data, and a client of one warm template for tests that train for real."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.facts import DataFacts
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Outcome
from orchestrator.contract.rank import (
    TEMPLATE_REPLY,
    KillRequest,
    RankExited,
    RankReady,
    RankRequest,
    RankStarted,
    TemplateRequest,
)

VOCABULARY = 512
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
_EMBEDDINGS, _PER_LAYER = 2 * 512 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
FULL_PARAMETERS = _EMBEDDINGS + 2 * _PER_LAYER + 64
LORA_PARAMETERS = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
SHARDED = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
STAGE3 = {
    "stage3_max_live_parameters": 200_000,
    "stage3_max_reuse_distance": 200_000,
    "stage3_prefetch_bucket_size": 20_000,
    "stage3_param_persistence_threshold": 640,
    "sub_group_size": 1_000_000,
}
LORA = {"method": "lora", "lora_rank": 4, "lora_targets": "all-linear"}
FULL = {"method": "full"}


def write_data(directory: Path, lengths: list[int], eval_lengths: Sequence[int] = ()) -> Path:
    """Prepared rows of random tokens with these lengths, and held-out ones."""
    from orchestrator.trial.prepare import write_rows

    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, VOCABULARY, length).astype(np.int32) for length in lengths]
    eval_rows = [generator.integers(1, VOCABULARY, length).astype(np.int32) for length in eval_lengths]
    facts = DataFacts(
        directory=str(directory),
        digest="tiny",
        format="text",
        rows=len(rows),
        tokens=sum(lengths),
        longest_row_tokens=max(lengths),
        mean_row_tokens=float(np.mean(lengths)),
        median_row_tokens=float(np.median(lengths)),
        truncated_rows=0,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        tokenizer="none",
    )
    write_rows(directory, rows, facts, eval_rows)
    return directory


def trial_config(rows: Path, knobs: Mapping[str, Any], **changes: Any) -> TrialConfig:
    """A small trial; `changes` replace whole sections, `accumulation` and `world_size` set the batch."""
    world_size, accumulation = changes.pop("world_size", 1), changes.pop("accumulation", 2)
    chosen = {"micro_batch": 2, **knobs}
    stage = chosen.get("zero_stage", 0)
    chosen = {**(SHARDED if stage else {}), **(STAGE3 if stage == 3 else {}), **chosen}
    content = {
        "knobs": chosen,
        "model": {"config": LLAMA},
        "data": {"directory": str(rows), "digest": "tiny", "sequence_length": 64},
        "train": {"global_batch": chosen["micro_batch"] * accumulation * world_size, "learning_rate": 1e-3},
        "measure": {"min_steps": 2, "max_steps": 3, "warmup_steps": 1},
        "world_size": world_size,
        "gradient_accumulation": accumulation,
        "device": "cpu",
    }
    return TrialConfig.model_validate({**content, **changes})


def write_trial(directory: Path, config: TrialConfig, fault: str | None = None) -> AttemptFiles:
    """An attempt's folder; `fault` names what `faulty_template` does to the rank."""
    directory.mkdir(parents=True, exist_ok=True)
    files = AttemptFiles(directory)
    files.config.write_text(config.model_dump_json())
    if fault is not None:
        (directory / "fault").write_text(fault)
    return files


class TemplateClient:
    """A template of this folder, spoken to by its line protocol."""

    def __init__(self, module: str = "trial.faulty_template") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
        )
        self._tokens = 0
        ready = self._hear()
        assert isinstance(ready, RankReady)

    def start(self, files: AttemptFiles, rank: int = 0, world_size: int = 1) -> RankStarted:
        """Ask for a rank and wait until it exists."""
        self._tokens += 1
        self.say(
            RankRequest(
                token=f"token-{self._tokens}",
                directory=str(files.directory),
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                master_addr="127.0.0.1",
                master_port=1,
            )
        )
        started = self._hear()
        assert isinstance(started, RankStarted)
        return started

    def kill(self, token: str) -> None:
        """Ask for the end of a rank."""
        self.say(KillRequest(token=token))

    def exited(self) -> RankExited:
        """Wait for the next rank to end."""
        reply = self._hear()
        assert isinstance(reply, RankExited)
        return reply

    def run(self, files: AttemptFiles) -> tuple[RankExited, Outcome | None]:
        """Run a trial of one rank to its end."""
        self.start(files)
        exited = self.exited()
        report = files.read_report(0)
        return exited, report.outcome if report is not None else None

    def say(self, request: TemplateRequest) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(request.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> int:
        """Close the template's input; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def _hear(self) -> RankReady | RankStarted | RankExited:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the template has ended"
        return TEMPLATE_REPLY.validate_python(json.loads(line))
