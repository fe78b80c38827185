"""Runs the real `brimful` command on a sweep of a two-layer model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMMAND = (sys.executable, "-m", "orchestrator.cli")
STUB_COMMAND = (sys.executable, str(Path(__file__).with_name("stub_brimful.py")))
DEADLINE_S = 240.0
SPEC = """\
version: 1
name: {name}
model:
  config: {{model_type: llama, vocab_size: 320, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128, attention_dropout: {dropout}}}
data: {{path: rows.txt, sequence_length: 64}}
train: {{global_batch: 2, learning_rate: 1e-3, zero_stage: 0}}
search:
  sampler: grid
  baseline: {{method: full, micro_batch: 1}}
  method: [full, lora]
  lora_rank: {ranks}
  micro_batch: [1, 2]
limits: {{device_memory: {limit}, reject_probability: 1}}
measure: {{min_steps: 2, max_steps: {steps}, max_measure_s: 600, relative_precision: 0.000001, confirm: {{top: {top}}}}}
budget: {{trials: 8}}
"""


@dataclass(frozen=True)
class Workplace:
    """A folder with specs and a home, kept apart from the user's own.

    With `behaviour` no rank trains: each does what `pools.stub_template` does under that name.
    """

    folder: Path
    behaviour: str | None = None
    deadline_s: float = DEADLINE_S

    def spec(
        self,
        name: str,
        limit: str = "512MiB",
        steps: int = 2,
        dropout: float = 0.0,
        ranks: str = "[2]",
        top: int = 0,
    ) -> Path:
        """A spec of this name; `steps` are measured in each trial, and the best `top` are measured again."""
        file = self.folder / f"{name}.yaml"
        file.write_text(SPEC.format(name=name, limit=limit, steps=steps, dropout=dropout, ranks=ranks, top=top))
        return file

    @property
    def environment(self) -> dict[str, str]:
        stub = {"DS_STUB_BEHAVES": self.behaviour} if self.behaviour is not None else {}
        return {**os.environ, "BRIMFUL_HOME": str(self.folder / "home"), "COLUMNS": "120", **stub}

    @property
    def command(self) -> tuple[str, ...]:
        return COMMAND if self.behaviour is None else STUB_COMMAND

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """The finished command."""
        return subprocess.run(
            [*self.command, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=self.deadline_s,
        )

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """The running command."""
        return subprocess.Popen(
            [*self.command, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def json(self, *arguments: str | Path) -> object:
        """What the command prints with --json: the whole of its standard output is one document."""
        run = self.run(*arguments, "--json")
        return json.loads(run.stdout)

    def trains(self, name: str, attempt: int = 1) -> bool:
        """Whether some trial of the sweep has begun to train in this attempt and not ended."""
        attempts = (self.folder / "home" / "sweeps" / name / "trials").glob(f"*/attempt-{attempt}")
        return any(
            not (folder / "outcome.json").exists() and '"first_step"' in (folder / "events.jsonl").read_text()
            for folder in attempts
            if (folder / "events.jsonl").exists()
        )


def await_true(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait until `condition` holds while `process` runs."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None:
            raise AssertionError(
                f"ended with {process.returncode} too early:\n{process.stderr and process.stderr.read()}"
            )
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.1)


def end(process: "subprocess.Popen[str]", number: signal.Signals | None = None) -> tuple[int, str, str]:
    """Send a signal, if any, and return the exit code, standard output and standard error."""
    if number is not None:
        process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return process.returncode, stdout, stderr
