"""The sweep's folder: the one truth about its trials. Its layout stands in `orchestrator.contract.record`."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from orchestrator.contract.errors import StateError, SweepLockedError, UsageError
from orchestrator.contract.handoff import AttemptFiles, read_model, storage, write_atomic
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord

SWEEP_FILE = "sweep.json"
SPEC_FILE = "spec.yaml"
FACTS_FILE = "facts.json"
TRIALS_FOLDER = "trials"
TRIAL_FILE = "trial.json"
STOP_FILE = "stop"
LOCK_FILE = "lock"
HOLDER_FILE = "lock.holder"
LOCK_PATIENCE_S = 1.0
"""How long a driver waits for the lock: longer than `is_driven` holds it while it looks."""


@dataclass(frozen=True)
class Holder:
    """Who drives a sweep."""

    host: str
    pid: int


class Ledger:
    """The records of one sweep under `HOME/sweeps/NAME`. Every write is durable when it returns.

    Only the holder of `lock()` writes records; anyone may read at any time and sees whole files. A missing or damaged
    record raises StateError that names the file.
    """

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.name = name
        self.folder = home / "sweeps" / name
        self.sweep_file = self.folder / SWEEP_FILE
        self.spec_file = self.folder / SPEC_FILE
        self.facts_file = self.folder / FACTS_FILE
        self._trials = self.folder / TRIALS_FOLDER

    def exists(self) -> bool:
        """Whether a sweep of this name was created."""
        return self.sweep_file.exists()

    def create_folder(self) -> None:
        """Make the sweep's folder, readable by its owner alone. Safe to repeat.

        Raises UsageError when the home folder does not allow it.
        """
        for folder in (self.home, self.home / "sweeps", self.folder, self._trials):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"{folder} cannot be made ({error.strerror}); choose another folder with --home"
                ) from error

    def read_sweep(self) -> SweepRecord:
        """The sweep's record. Raises UsageError when no sweep of this name exists."""
        if not self.exists():
            known = ", ".join(sweep_names(self.home)) or "none"
            raise UsageError(f"there is no sweep named {self.name} in {self.home}; it holds: {known}")
        return read_model(self.sweep_file, SweepRecord)

    def write_sweep(self, sweep: SweepRecord) -> None:
        """Store the sweep's record."""
        self.create_folder()
        write_atomic(self.sweep_file, sweep.model_dump_json(indent=1))

    def read_trials(self) -> list[TrialRecord]:
        """All trials in the order of their numbers."""
        if not self._trials.is_dir():
            return []
        folders = sorted(Path(entry.path) for entry in os.scandir(self._trials))
        records = [read_model(folder / TRIAL_FILE, TrialRecord) for folder in folders if _was_recorded(folder)]
        return sorted(records, key=lambda record: record.trial)

    def read_trial(self, trial: int) -> TrialRecord:
        """One trial. Raises UsageError when there is no trial of this number."""
        file = self._trial_folder(trial) / TRIAL_FILE
        if not file.exists():
            raise UsageError(f"sweep {self.name} has no trial {trial}; `brimful trials {self.name}` lists them")
        return read_model(file, TrialRecord)

    def write_trial(self, record: TrialRecord) -> None:
        """Store a trial's record."""
        folder = self._trial_folder(record.trial)
        _make(folder)
        write_atomic(folder / TRIAL_FILE, record.model_dump_json(indent=1))

    def attempt(self, trial: int, attempt: int) -> AttemptFiles:
        """The files of one attempt, whether they exist or not."""
        return AttemptFiles(self._trial_folder(trial) / f"attempt-{attempt}")

    def prepare_attempt(self, record: TrialRecord) -> AttemptFiles:
        """Make the folder of the trial's last attempt, with its `config.json`."""
        files = self.attempt(record.trial, record.attempts[-1].attempt)
        _make(files.directory)
        write_atomic(files.config, record.launch_config.model_dump_json(indent=1))
        return files

    def request_stop(self) -> None:
        """Ask the sweep's driver, wherever it runs, to stop."""
        write_atomic(self.folder / STOP_FILE, "stop\n")

    def stop_requested(self) -> bool:
        """Whether someone asked the driver to stop."""
        return (self.folder / STOP_FILE).exists()

    def _clear_stop(self) -> None:
        """Forget a request to a driver before."""
        with storage(self.folder):
            (self.folder / STOP_FILE).unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only driver of the sweep, whom nobody has asked to stop yet. A dead driver's lock is free.

        Raises SweepLockedError, naming host and process, while another driver lives.
        """
        self.create_folder()
        holder = self.folder / HOLDER_FILE
        lock = FileLock(self.folder / LOCK_FILE)
        with storage(self.folder):
            try:
                lock.acquire(timeout=LOCK_PATIENCE_S)
            except Timeout as error:
                raise SweepLockedError(self._locked_by()) from error
        try:
            # whoever asks from now on asks this driver, also while it still prepares
            self._clear_stop()
            write_atomic(holder, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
            yield
        finally:
            lock.release()

    def is_driven(self) -> bool:
        """Whether a living driver holds the lock."""
        if not self.folder.is_dir():
            return False
        lock = FileLock(self.folder / LOCK_FILE)
        try:
            with lock.acquire(timeout=0):
                return False
        except Timeout:
            return True
        except OSError:
            return False  # whoever cannot write here does not drive here

    def holder(self) -> Holder | None:
        """The last driver that took the lock; None when there never was one."""
        try:
            return Holder(**json.loads((self.folder / HOLDER_FILE).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise StateError(f"{self.folder / HOLDER_FILE} is damaged: {error}") from error

    def observed_state(self, sweep: SweepRecord) -> SweepState:
        """The sweep's state as an onlooker sees it: RUNNING without a living driver is INTERRUPTED."""
        if sweep.state is SweepState.RUNNING and not self.is_driven():
            return SweepState.INTERRUPTED
        return sweep.state

    def size_bytes(self) -> int:
        """Bytes of all files of the sweep."""
        return sum(file.lstat().st_size for file in self.folder.rglob("*") if not file.is_dir())

    def delete(self) -> int:
        """Remove the sweep's folder and return the bytes it held. Raises SweepLockedError while it is driven."""
        if self.is_driven():
            raise SweepLockedError(self._locked_by())
        freed_bytes = self.size_bytes()
        shutil.rmtree(self.folder)
        return freed_bytes

    def _trial_folder(self, trial: int) -> Path:
        return self._trials / f"{trial:04d}"

    def _locked_by(self) -> str:
        holder = self.holder()
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        return f"sweep {self.name} is being driven by {who}; wait for it, or `brimful stop {self.name}`"


def _make(folder: Path) -> None:
    with storage(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _was_recorded(trial_folder: Path) -> bool:
    """False for a folder whose driver died before it wrote the record; attempts come after the record."""
    return (trial_folder / TRIAL_FILE).exists() or any(trial_folder.glob("attempt-*"))


def sweep_names(home: Path) -> list[str]:
    """Names of all sweeps under `home`, sorted."""
    folder = home / "sweeps"
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if (entry / SWEEP_FILE).exists())


def list_sweeps(home: Path) -> list[Ledger]:
    """A ledger for every sweep under `home`, sorted by name."""
    return [Ledger(home, name) for name in sweep_names(home)]
