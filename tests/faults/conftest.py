"""Tiny real trials: a Llama of two layers on prepared rows."""

import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from orchestrator.contract.config import (
    DataSource,
    Knobs,
    Limits,
    MeasureSettings,
    Method,
    ModelSource,
    TrainSettings,
    TrialConfig,
)
from orchestrator.contract.facts import DataFacts
from orchestrator.contract.handoff import CONFIG_FILE
from orchestrator.contract.units import GIB
from orchestrator.sweep.ports import Launch

ROWS, ROW_TOKENS, VOCABULARY = 32, 32, 256
LIMIT_BYTES = 2 * GIB
MODEL = ModelSource(
    config={
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
    }
)


def write_rows(directory: Path) -> None:
    """Prepared rows as `orchestrator.trial.data` describes them."""
    directory.mkdir()
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, ROWS * ROW_TOKENS, dtype=np.int32)
    tokens.tofile(directory / "tokens.bin")
    np.arange(0, ROWS * ROW_TOKENS + 1, ROW_TOKENS, dtype=np.int64).tofile(directory / "offsets.bin")
    facts = DataFacts(
        directory=str(directory),
        digest="0",
        format="text",
        rows=ROWS,
        tokens=ROWS * ROW_TOKENS,
        longest_row_tokens=ROW_TOKENS,
        mean_row_tokens=ROW_TOKENS,
        median_row_tokens=ROW_TOKENS,
        truncated_rows=0,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        tokenizer="none",
    )
    (directory / "data.json").write_text(facts.model_dump_json())


@dataclass(frozen=True)
class Trials:
    """Makes attempts whose ranks suffer faults."""

    root: Path

    def attempt(self, faults: dict[int, str] | None = None, world_size: int = 1, **measure: float) -> Launch:
        settings = {"warmup_steps": 0, "min_steps": 2, "max_steps": 2} | measure
        config = TrialConfig(
            knobs=Knobs(method=Method.FULL, micro_batch=1, zero_stage=1 if world_size > 1 else 0),
            model=MODEL,
            data=DataSource(directory=str(self.root / "rows"), digest="0", sequence_length=ROW_TOKENS),
            train=TrainSettings(global_batch=world_size, learning_rate=1e-3),
            limits=Limits(device_memory_bytes=LIMIT_BYTES),
            measure=MeasureSettings.model_validate(settings),
            world_size=world_size,
            gradient_accumulation=1,
            device="cpu",
        )
        token = uuid.uuid4().hex
        directory = self.root / token
        directory.mkdir()
        (directory / CONFIG_FILE).write_text(config.model_dump_json())
        (directory / "fault.json").write_text(json.dumps({str(rank): fault for rank, fault in (faults or {}).items()}))
        return Launch(token, directory, config)


def seconds_since_strike(launch: Launch) -> float:
    """How long ago the fault struck."""
    return time.time() - float((launch.directory / "struck").read_text())


@pytest.fixture(scope="session")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    root = tmp_path_factory.mktemp("trials")
    write_rows(root / "rows")
    return Trials(root)
