import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import config, new_ledger, ok, spec

from orchestrator.contract.errors import StateError, SweepLockedError, UsageError
from orchestrator.contract.record import AttemptRecord, SweepState, TrialRecord
from orchestrator.sweep.ledger import Ledger, list_sweeps, sweep_names

HOLD_LOCK = """
import sys, pathlib
from orchestrator.sweep.ledger import Ledger
with Ledger(pathlib.Path(sys.argv[1]), "sweep").lock():
    print("held", flush=True)
    sys.stdin.read()
"""
READ = """
import sys, pathlib
from orchestrator.sweep.ledger import Ledger
ledger = Ledger(pathlib.Path(sys.argv[1]), "sweep")
last = 0
while last < int(sys.argv[2]):
    last = len([record for record in ledger.read_trials() if record.outcome])
print(last)
"""


def record(trial: int, ended: bool = True) -> TrialRecord:
    attempt = AttemptRecord(attempt=1, token=f"t{trial}", dispatched_s=1.0, outcome=ok() if ended else None)
    built = config(micro_batch=trial + 1)
    return TrialRecord(trial=trial, candidate=built.candidate, label=f"mb{trial}", config=built, attempts=(attempt,))


def test_records_come_back_equal_and_in_order(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, spec())
    written = [record(trial) for trial in (2, 0, 10_001, 1)]
    for each in written:
        ledger.write_trial(each)
    assert ledger.read_trials() == sorted(written, key=lambda each: each.trial)
    assert ledger.read_trial(10_001) == written[2]


def test_everything_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        ledger = new_ledger(tmp_path / "home", spec())
        ledger.write_trial(record(0))
        ledger.prepare_attempt(record(0))
        with ledger.lock():
            pass
    finally:
        os.umask(previous)
    for path in [tmp_path / "home", *(tmp_path / "home").rglob("*")]:
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize("content", ["", '{"trial": 0', '{"trial": "x"}', "\x00\x01"])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    ledger = new_ledger(tmp_path, spec())
    ledger.write_trial(record(0))
    file = ledger.folder / "trials" / "0000" / "trial.json"
    file.write_text(content)
    with pytest.raises(StateError, match=r"0000/trial\.json is damaged"):
        ledger.read_trials()


def test_a_removed_record_is_named_but_not_a_folder_whose_driver_died_before_it(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, spec())
    for trial in (0, 1):
        ledger.write_trial(record(trial))
        ledger.prepare_attempt(record(trial))
    (ledger.folder / "trials" / "0002").mkdir()
    assert len(ledger.read_trials()) == 2
    (ledger.folder / "trials" / "0000" / "trial.json").unlink()
    with pytest.raises(StateError, match=r"0000/trial\.json is missing"):
        ledger.read_trials()


def test_unknown_sweeps_and_trials_are_told_with_what_exists(tmp_path: Path) -> None:
    new_ledger(tmp_path, spec(name="known"))
    with pytest.raises(UsageError, match=r"no sweep named other in .*; it holds: known"):
        Ledger(tmp_path, "other").read_sweep()
    with pytest.raises(UsageError, match="sweep known has no trial 7"):
        Ledger(tmp_path, "known").read_trial(7)


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, spec())
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SweepLockedError, match=rf"process {other.pid} on "), ledger.lock():
            pass
        with pytest.raises(SweepLockedError):
            ledger.delete()
        assert ledger.observed_state(ledger.read_sweep()) is SweepState.RUNNING
        other.kill()
        other.wait()
    assert ledger.observed_state(ledger.read_sweep()) is SweepState.INTERRUPTED
    with ledger.lock():
        holder = ledger.holder()
        assert holder is not None
        assert holder.pid == os.getpid()


def test_delete_frees_what_it_says(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path, spec(name="gone"))
    new_ledger(tmp_path, spec(name="kept"))
    ledger.write_trial(record(0))
    size_bytes = ledger.size_bytes()
    assert size_bytes > 1000
    assert ledger.delete() >= size_bytes
    assert sweep_names(tmp_path) == ["kept"]
    assert [each.name for each in list_sweeps(tmp_path)] == ["kept"]


def test_sixteen_readers_never_see_half_a_record(tmp_path: Path) -> None:
    """field-cases G6: one writer, many readers, nothing locked out and nothing lost."""
    ledger = new_ledger(tmp_path, spec())
    command = [sys.executable, "-c", READ, str(tmp_path), "60"]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(16)]
    try:
        for trial in range(60):
            ledger.write_trial(record(trial, ended=False))
            ledger.write_trial(record(trial))
        for reader in readers:
            out, err = reader.communicate(timeout=120)
            assert (reader.returncode, out, err) == (0, "60\n", "")
    finally:
        for reader in readers:
            reader.kill()
