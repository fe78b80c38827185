"""Runs the autotuner of the installed DeepSpeed from its command line to its winner, on CPU ranks of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow

from orchestrator.trial.preload import PROCESS_ENVIRONMENT

SCRIPT = Path(__file__).parent / "plain_training.py"
HARMLESS = ("pdsh", "ssh", "pkill", "killall")
CALLS_VARIABLE = "AUTOTUNER_STUB_CALLS"
_STUB = f'#!/bin/sh\necho "${{0##*/}} $*" >> "${CALLS_VARIABLE}"\nexit 0\n'
_STOP_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Experiment:
    """One run of the user's script. `metric` is the autotuner's own (samples/s); None: the run brought none.

    `duration_s` is from the launch to the end of the run, without the autotuner's waiting.
    """

    name: str
    zero_stage: int
    micro_batch: int
    metric: float | None
    error: str | None
    duration_s: float
    varies_buckets: bool


@dataclass(frozen=True)
class AutotunerResult:
    """From the command to the end of the process. `wall_s` is our clock, `own_s` what the autotuner printed."""

    wall_s: float
    own_s: float | None
    experiments: tuple[Experiment, ...]
    optimal: dict[str, Any] | None
    """The DeepSpeed configuration that it chose; None: none ran."""
    cleanups: tuple[str, ...]
    """The commands by which it would have killed processes, which reached a stub."""

    @property
    def launches(self) -> int:
        """Runs of the user's script, the one that profiles the model counted."""
        return len(self.experiments)

    @property
    def label(self) -> str:
        """The chosen configuration in few words."""
        if self.optimal is None:
            return "none"
        return f"z{self.optimal['zero_optimization']['stage']} mb{self.optimal['train_micro_batch_size_per_gpu']}"


def autotuner_config(
    train: Mapping[str, Any], stages: list[int], micro_batches: list[int], ranks: int
) -> dict[str, Any]:
    """The user's ds_config.json.

    With a list of micro-batches the autotuner keeps `max(micro_batches) * gradient_accumulation_steps` rows a rank in
    every experiment, which is the fixed global batch. All settings of the autotuner that are not here are its defaults:
    metric throughput, profile steps 3 to 5, grid search, 50 trials, early stopping after 5.
    """
    rows_per_rank = train["global_batch"] // ranks
    return {
        "train_micro_batch_size_per_gpu": micro_batches,
        "gradient_accumulation_steps": rows_per_rank // max(micro_batches),
        "gradient_clipping": train["gradient_clipping"],
        # without the list only stage 0 is tuned
        "zero_optimization": {"stage": stages},
        # the optimizer is the script's own, as it is Brimful's
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "autotuning": {"enabled": True, "fast": False, "metric": "throughput"},
    }


def run_autotuner(
    config: dict[str, Any], settings: Path, ranks: int, folder: Path, timeout_s: float
) -> AutotunerResult:
    """Tune in `folder`, which must not exist. Raises SystemExit when it fails or takes longer than `timeout_s`."""
    folder.mkdir()
    (folder / "ds_config.json").write_text(json.dumps(config, indent=1))
    environment = _environment(folder, ranks)
    command = ["deepspeed", "--num_nodes", "1", "--num_gpus", str(ranks), "--autotuning", "tune", str(SCRIPT)]
    command += ["--deepspeed_config", "ds_config.json", "--settings", str(settings)]
    with (folder / "autotuner.log").open("wb") as log:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the autotuner took longer than {timeout_s:.0f} s; see {log.name}") from None
        finally:
            if process.poll() is None:
                _end(process)
        wall_s = time.perf_counter() - start_s
    if status != 0:
        raise SystemExit(f"the autotuner ended with code {status}; see {folder / 'autotuner.log'}")
    return read_result(folder, wall_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group that we started, and nothing else."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_STOP_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_environment() -> dict[str, str]:
    """What the plain script runs under: Brimful's malloc settings, so that a limit means the same, and CPUs."""
    return {**PROCESS_ENVIRONMENT, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def place_stubs(folder: Path) -> Path:
    """Commands that only note how they were called, for those by which the autotuner kills processes by pattern."""
    folder.mkdir()
    for name in HARMLESS:
        (folder / name).write_text(_STUB)
        (folder / name).chmod(0o755)
    return folder


def _environment(folder: Path, ranks: int) -> dict[str, str]:
    stubs = place_stubs(folder / "stubs")
    path = os.pathsep.join([str(stubs), str(Path(sys.executable).parent), os.environ["PATH"]])
    tracking = f"sqlite:///{folder / 'mlflow.db'}"
    return {
        **os.environ,
        **cpu_environment(),
        "PATH": path,
        CALLS_VARIABLE: str(folder / "stub_calls.txt"),
        # what DeepSpeed takes for the number of CPU devices
        "LOCAL_SIZE": str(ranks),
        "MLFLOW_TRACKING_URI": tracking,
        "MLFLOW_RUN_ID": _mlflow_run(tracking),
    }


def _mlflow_run(tracking: str) -> str:
    client = mlflow.MlflowClient(tracking)
    return str(client.create_run(client.create_experiment("autotuning")).info.run_id)


def read_result(folder: Path, wall_s: float) -> AutotunerResult:
    """What the autotuner left in `folder`: one folder an experiment, a summary, and the optimal configuration."""
    results = folder / "autotuning_results"
    experiments = [read_experiment(path.parent) for path in sorted(results.glob("*/exp.json"), key=_written_s)]
    summary, optimal = results / "summary.txt", results / "ds_config_optimal.json"
    calls = folder / "stub_calls.txt"
    return AutotunerResult(
        wall_s=wall_s,
        own_s=own_duration_s(summary.read_text()) if summary.is_file() else None,
        experiments=tuple(experiments),
        optimal=json.loads(optimal.read_text()) if optimal.is_file() else None,
        cleanups=tuple(calls.read_text().splitlines()) if calls.is_file() else (),
    )


def _written_s(path: Path) -> float:
    return path.stat().st_mtime


def read_experiment(folder: Path) -> Experiment:
    """One experiment's folder: `exp.json`, written as it starts, two logs, and `metrics.json` if it ran to its end."""
    document = json.loads((folder / "exp.json").read_text())
    config = document["ds_config"]
    metrics = folder / "metrics.json"
    metric = float(json.loads(metrics.read_text())["throughput"]) if metrics.is_file() else None
    has_result = metric is not None or (folder / "model_info.json").is_file()
    return Experiment(
        name=document["name"],
        zero_stage=config["zero_optimization"]["stage"],
        micro_batch=config["train_micro_batch_size_per_gpu"],
        metric=metric,
        error=None if has_result else last_error(folder / "stderr.log"),
        duration_s=max(_written_s(path) for path in folder.iterdir()) - _written_s(folder / "exp.json"),
        varies_buckets="reduce_bucket_size" in config["zero_optimization"],
    )


def last_error(log: Path) -> str:
    """The first line that names an exception, or that there is none."""
    if log.is_file():
        for line in log.read_text(errors="replace").splitlines():
            found = re.search(r"\b\w*(?:Error|Exception)\b: .*", line)
            if found:
                return found.group(0)
    return "no error was written"


def own_duration_s(summary: str) -> float | None:
    """Seconds of `Tuning completed in 0:10:45.123. Total number of experiments: 11.`"""
    found = re.search(r"Tuning completed in (?:(\d+) days?, )?(\d+):(\d+):([\d.]+?)\.? Total", summary)
    if found is None:
        return None
    days, hours, minutes, seconds = found.groups()
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + float(seconds)
