"""kill -9 of the driver at random moments: nothing that was finished changes, nothing is lost, nothing counts twice."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.contract.record import AttemptRecord, SweepState
from orchestrator.search.reported import confirmed_runs
from orchestrator.sweep.ledger import Ledger

DRIVER = Path(__file__).with_name("crash_driver.py")
DEADLINE_S = 60.0


def finished_files(ledger: Ledger) -> dict[Path, bytes]:
    """Content of the record of every trial that ended for good."""
    records = ledger.read_trials()
    files = [
        ledger.folder / "trials" / f"{r.trial:04d}" / "trial.json"
        for r in records
        if r.outcome and r.outcome.kind != "cancelled"
    ]
    return {file: file.read_bytes() for file in files}


def kill_after(home: Path, trials: int, ended: int, delay_s: float) -> None:
    """Start the driver and kill it `delay_s` after the ledger holds `ended` outcomes of this session's budget."""
    ledger = Ledger(home, "sweep")
    with subprocess.Popen([sys.executable, str(DRIVER), str(home), str(trials)]) as driver:
        deadline_s = time.monotonic() + DEADLINE_S
        while len(finished_files(ledger)) < ended and driver.poll() is None:
            assert time.monotonic() < deadline_s, "the driver makes no progress"
            time.sleep(0.002)
        time.sleep(delay_s)
        driver.kill()


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_driver_loses_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    """field-cases G8: a budget of 10, killed and resumed twice, ends with exactly 10 finished trials."""
    dice = random.Random(seed)
    ledger = Ledger(tmp_path, "sweep")
    seen: dict[Path, bytes] = {}
    for ended in sorted(dice.sample(range(1, 10), k=2)):
        kill_after(tmp_path, trials=10, ended=ended, delay_s=dice.uniform(0, 0.02))
        for file, content in seen.items():
            assert file.read_bytes() == content, f"{file} changed after it was finished"
        seen = finished_files(ledger)
    resumed = subprocess.run([sys.executable, str(DRIVER), str(tmp_path), "10"], timeout=DEADLINE_S, check=False)
    assert resumed.returncode == 0

    trials = ledger.read_trials()
    assert [trial.trial for trial in trials] == list(range(10))
    assert len({trial.candidate for trial in trials}) == 10
    assert [trial.outcome.kind for trial in trials if trial.outcome] == [
        "oom_device" if trial.config.knobs.micro_batch % 3 == 0 else "ok" for trial in trials
    ]
    for file, content in seen.items():
        assert file.read_bytes() == content, f"{file} changed after it was finished"
    for trial in trials:
        accepted = [a for a in trial.attempts if a.outcome is not None and a.outcome.kind != "cancelled"]
        assert len(accepted) == 1
    assert ledger.read_sweep().state is SweepState.FINISHED


def finished_attempts(ledger: Ledger) -> dict[str, AttemptRecord]:
    """Every attempt that came to an end of its own, by token."""
    attempts = (attempt for record in ledger.read_trials() for attempt in record.attempts)
    return {a.token: a for a in attempts if a.outcome is not None and a.outcome.kind != "cancelled"}


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_driver_neither_loses_nor_repeats_a_run_of_the_confirmation(tmp_path: Path, seed: int) -> None:
    """Four trials, the best two of which are measured three times again: ten runs, however often it is killed."""
    dice = random.Random(seed)
    ledger = Ledger(tmp_path, "sweep")
    command = [sys.executable, str(DRIVER), str(tmp_path), "4", "2"]
    seen: dict[str, AttemptRecord] = {}
    for ended in sorted(dice.sample(range(4, 10), k=2)):
        with subprocess.Popen(command) as driver:
            deadline_s = time.monotonic() + DEADLINE_S
            while len(finished_attempts(ledger)) < ended and driver.poll() is None:
                assert time.monotonic() < deadline_s, "the driver makes no progress"
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.02))
            driver.kill()
        assert seen.items() <= finished_attempts(ledger).items()
        seen = finished_attempts(ledger)
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 0

    assert seen.items() <= finished_attempts(ledger).items()
    trials = ledger.read_trials()
    ran = {trial.config.knobs.micro_batch: len(confirmed_runs(trial)) for trial in trials}
    assert ran == {1: 0, 2: 3, 3: 0, 4: 3}
    assert len(finished_attempts(ledger)) == 4 + 6
    assert ledger.read_sweep().state is SweepState.FINISHED
