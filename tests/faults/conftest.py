"""Tiny real trials, the leak check around every test, and the figures that the tests state.

A test names the faults that it injects (`@pytest.mark.fault("A1")`) and states figures by the `figure` fixture. With
BRIMFUL_FAULTS_RECORD in the environment every test leaves one line of JSON in that file (`benchmarks.faults`).
"""

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cli.brimful_command import Workplace

from faults import leaks
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


RECORD_VARIABLE = "BRIMFUL_FAULTS_RECORD"
_FIGURES = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session", autouse=True)
def session_folder() -> Iterator[None]:
    """A TMPDIR of its own marks every process of the session; a short path, for the sockets of Ray."""
    folder = tempfile.mkdtemp(prefix="bfs", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(leaks.SESSION_VARIABLE, folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def nothing_left(session_folder: None) -> Iterator[None]:
    """After a module, with its pools and clusters closed, no process of it is left."""
    yield
    leaks.await_gone(leaks.session_processes)


@pytest.fixture(autouse=True)
def no_rank_left(session_folder: None) -> Iterator[None]:
    """After a test no process of a trial is left."""
    yield
    leaks.await_gone(leaks.ranks)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """State a measured figure: what it is, and its value with the unit."""
    figures = request.node.stash.setdefault(_FIGURES, {})

    def state(name: str, value: str) -> None:
        figures[name] = value

    return state


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped or is expected to fail; empty otherwise."""
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    return str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> object:
    report = yield
    record = os.environ.get(RECORD_VARIABLE)
    if record and (call.when == "call" or report.outcome != "passed"):
        line = {
            "test": item.nodeid,
            "title": item.name,
            "faults": [name for mark in item.iter_markers("fault") for name in mark.args],
            "outcome": "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome,
            "reason": _reason(report),
            "when": call.when,
            "seconds": round(call.duration, 1),
            "figures": item.stash.get(_FIGURES, {}),
            "is_slow": item.get_closest_marker("slow") is not None,
        }
        with open(record, "a") as file:
            file.write(json.dumps(line) + "\n")
    return report


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


@pytest.fixture(scope="session")
def prepared(session_folder: None, tests_importable: None, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose home holds the preflight of the spec's model and data; `faults.sweeps.new_place` copies it."""
    folder = tmp_path_factory.mktemp("prepared")
    lines = (f"line {number} of a text about {'many ' * (number % 7)}things\n" for number in range(60))
    (folder / "rows.txt").write_text("".join(lines))
    place = Workplace(folder, behaviour="ok")
    run = place.run("run", place.spec("prepared"), "--pool", "local", "--no-tracking")
    assert run.returncode == 0, run.stderr
    return place
