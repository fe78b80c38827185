"""`python -m orchestrator.trial DIR`, as a user types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.contract.outcome import Invalid, Ok, OomDevice
from trial.rig import FULL, LORA, trial_config, write_trial

ROOT = Path(__file__).parents[2]
BLOCKED = ("ray", "optuna", "mlflow")


@pytest.fixture(scope="session")
def blocked_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the control plane's services cannot be imported."""
    folder = tmp_path_factory.mktemp("blocked")
    for name in BLOCKED:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is blocked')\n")
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


def run(
    directory: Path, environment: dict[str, str], launcher: tuple[str, ...] = ("-m", "orchestrator.trial")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(directory)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "orchestrator.trial")


def test_help_needs_no_service(blocked_environment: dict[str, str]) -> None:
    done = run(Path("--help"), blocked_environment)
    assert done.returncode == 0
    assert "the attempt's folder" in done.stdout


@pytest.mark.trains
def test_a_trial_runs_alone_without_the_control_plane(
    blocked_environment: dict[str, str], data: Path, tmp_path: Path
) -> None:
    files = write_trial(tmp_path, trial_config(data, LORA))
    files.outcome.write_text("left by another run")
    done = run(tmp_path, blocked_environment)
    assert done.returncode == 0, done.stderr
    outcome = files.read_outcome()
    assert isinstance(outcome, Ok)
    assert done.stdout.splitlines()[-1].startswith(f"ok: {outcome.measurement.tokens_per_second:.0f} tokens/s")
    assert [event.event for event in files.read_events()].count("first_step") == 1


@pytest.mark.trains
@pytest.mark.parametrize("zero_stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_ranks_run_under_torchrun(
    blocked_environment: dict[str, str], data: Path, tmp_path: Path, zero_stage: int
) -> None:
    config = trial_config(data, {**FULL, "zero_stage": zero_stage}, world_size=2)
    files = write_trial(tmp_path, config)
    done = run(tmp_path, blocked_environment, torchrun(2))
    assert done.returncode == 0, done.stderr
    outcome = files.read_outcome()
    assert isinstance(outcome, Ok)
    found = outcome.measurement
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.peak_memory_bytes == max(rank.peak_memory_bytes for rank in found.ranks)
    assert found.sequences == found.measured_steps * config.train.global_batch
    assert {event.rank for event in files.read_events() if event.event == "step"} == {0, 1}


@pytest.mark.trains
def test_the_rank_that_runs_out_of_memory_decides_for_the_group(
    blocked_environment: dict[str, str], data: Path, tmp_path: Path
) -> None:
    limits = {"device_memory_bytes": 40 * 2**20}
    files = write_trial(tmp_path, trial_config(data, {**FULL, "zero_stage": 2}, world_size=2, limits=limits))
    done = run(tmp_path, blocked_environment, torchrun(2))
    assert done.returncode != 0
    assert isinstance(files.read_outcome(), OomDevice)


def test_a_wrong_number_of_ranks_is_refused_with_the_command(data: Path, tmp_path: Path) -> None:
    write_trial(tmp_path, trial_config(data, FULL, world_size=2))
    done = run(tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "has 2 ranks, this launch has 1; run: torchrun --nproc-per-node 2" in done.stderr


def test_a_folder_without_a_trial_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'config.json'} is missing\n"


@pytest.mark.trains
@pytest.mark.slow
def test_an_invalid_trial_fails_with_its_reason(data: Path, tmp_path: Path) -> None:
    train = {"global_batch": 3, "learning_rate": 1e-3}
    files = write_trial(tmp_path, trial_config(data, FULL, train=train))
    done = run(tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert isinstance(files.read_outcome(), Invalid)
    assert "invalid: phase init, reason rank 0 runs micro-batch 2" in done.stdout
