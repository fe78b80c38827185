"""The sweep's MLflow log: a projector thread that follows the records, however long the store is away.

The records are the spool: what could not be brought in stays marked as owed, in this session or the next. Nothing
here is on the scheduling path: the driver's calls only mark what changed.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.mlflow_runs import attempt_content, sweep_content
from orchestrator.backends.mlflow_store import RunStore, be_quiet
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Ok, OverLimit
from orchestrator.contract.record import AttemptRecord, SweepRecord, SweepState, TrialRecord
from orchestrator.spec.sweep import TrackingSection
from orchestrator.sweep.ledger import Ledger

SUMMARY_EVERY_S = 2.0
"""The sweep's own run is brought up to date at most this often while trials end."""
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 20.0
CLOSE_S, HURRIED_CLOSE_S = 15.0, 3.0


def store_uri(tracking: TrackingSection, home: Path) -> str:
    """The tracking store's URI: the spec's, or a SQLite file under `home`."""
    return tracking.uri or f"sqlite:///{home.resolve() / 'mlflow.db'}"


@dataclass
class _Owed:
    """What is still to be brought in."""

    trials: dict[int, TrialRecord] = field(default_factory=dict)
    sweep: SweepRecord | None = None
    files: list[tuple[Path, str | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.trials or self.sweep or self.files)


class MlflowLog:
    """A RunLog over an MLflow store. `records` are the trials of earlier sessions; they are caught up with.

    `warn` gets one sentence when the store goes away and one at the end when something is left unsynced; it is
    called from either thread.
    """

    def __init__(
        self,
        ledger: Ledger,
        tracking: TrackingSection,
        warn: Callable[[str], None],
        records: Iterable[TrialRecord] = (),
        close_s: float = CLOSE_S,
    ) -> None:
        self._ledger = ledger
        self._tracking = tracking
        self._uri = store_uri(tracking, ledger.home)
        self._warn = warn
        self._close_s = close_s
        self._records = {record.trial: record for record in records}
        self._sweep: SweepRecord | None = None
        self._owed = _Owed(trials=dict(self._records))
        self._changed = threading.Condition()
        self._closing = False
        self._has_warned = False
        self._store: RunStore | None = None
        self._summary_due_s = 0.0
        self._has_dataset = False
        self._parent_id: str | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow-projector", daemon=True)
        self._thread.start()

    def sweep_changed(self, sweep: SweepRecord) -> None:
        """Bring the sweep's run up to date soon."""
        with self._changed:
            self._sweep = self._owed.sweep = sweep
            self._changed.notify()

    def trial_changed(self, trial: TrialRecord) -> None:
        """Bring the trial's runs up to date soon."""
        with self._changed:
            self._records[trial.trial] = self._owed.trials[trial.trial] = trial
            self._changed.notify()

    def attach(self, file: Path, folder: str | None = None) -> None:
        """Copy a file, such as a report or an export, to the sweep's artifacts under `folder`."""
        with self._changed:
            self._owed.files.append((file, folder))
            self._owed.sweep = self._sweep
            self._changed.notify()

    def hurry(self) -> None:
        """Let `close` wait for a few seconds only: whoever stops the sweep waits for it."""
        self._close_s = min(self._close_s, HURRIED_CLOSE_S)

    def close(self) -> None:
        """Give the projector a bounded time to finish, then say what is left and how to bring it in."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(self._close_s)
        with self._changed:
            left = len(self._owed.trials)
            is_left = bool(self._owed) or self._thread.is_alive()
        if is_left:
            self._warn(
                f"MLflow is behind by {left} trials; they are safe in {self._ledger.folder}: "
                f"`brimful sync {self._ledger.name}` sends them when the store is back"
            )

    @property
    def parent_run_id(self) -> str | None:
        """Id of the sweep's run, None before it was made."""
        return self._parent_id

    def _work(self) -> None:
        # mlflow is imported and its database made in this thread, beside the first trials
        be_quiet()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        retry_s = RETRY_FIRST_S
        while self._wait_for_work():
            try:
                self._project()
                retry_s = RETRY_FIRST_S
            except (MlflowException, SQLAlchemyError, OSError) as error:
                if not self._stays_to_retry(error, retry_s):
                    return
                retry_s = min(2 * retry_s, RETRY_MOST_S)

    def _wait_for_work(self) -> bool:
        """Wait until something is owed; False when the log closes and nothing is."""
        with self._changed:
            while not (self._owed and self._sweep) and not self._closing:
                self._changed.wait()
            return bool(self._owed and self._sweep)

    def _stays_to_retry(self, error: Exception, retry_s: float) -> bool:
        with self._changed:
            if not self._has_warned:
                self._has_warned = True
                reason = str(error).strip().partition("\n")[0][:200]
                self._warn(f"MLflow cannot be reached; the sweep goes on and is sent later: {reason}")
            if self._closing:
                return False
            self._changed.wait_for(lambda: self._closing, timeout=retry_s)
            return True

    def _project(self) -> None:
        """Bring in everything that is owed; what fails stays owed."""
        store = self._opened()
        sweep = self._sweep
        assert sweep is not None, "work waits for the sweep's record"
        parent = store.parent(sweep_content(sweep, ()))
        self._parent_id = parent
        while self._owed.trials:
            with self._changed:
                trial = self._owed.trials[min(self._owed.trials)]
            for attempt in trial.attempts:
                self._project_attempt(store, parent, trial, attempt)
            with self._changed:
                if self._owed.trials[trial.trial] is trial:
                    del self._owed.trials[trial.trial]
                self._owed.sweep = self._owed.sweep or self._sweep
            self._project_sweep(store, parent, is_forced=False)
        self._project_sweep(store, parent, is_forced=True)
        self._project_files(store, parent)

    def _opened(self) -> RunStore:
        if self._store is None:
            is_local = self._tracking.uri is None
            artifacts = self._ledger.home.resolve() / "mlartifacts" if is_local else None
            self._store = RunStore(self._uri, self._tracking.experiment, artifacts, self._ledger.folder)
        return self._store

    def _project_attempt(self, store: RunStore, parent: str, trial: TrialRecord, attempt: AttemptRecord) -> None:
        if store.is_done(attempt.token) or self._sweep is None:
            return
        content = attempt_content(self._sweep, trial, attempt)
        run_id = store.child(content, parent)
        store.log(run_id, content)
        if attempt.outcome is None:
            return
        files = self._ledger.attempt(trial.trial, attempt.attempt)
        self._project_attempt_files(store, run_id, files, attempt)
        store.mark_done(attempt.token)

    def _project_attempt_files(self, store: RunStore, run_id: str, files: AttemptFiles, attempt: AttemptRecord) -> None:
        store.log_file(run_id, files.config, None)
        store.log_file(run_id, files.outcome, None)
        if isinstance(attempt.outcome, Ok | OverLimit):
            text = json.dumps(attempt.outcome.measurement.resolved, indent=1)
            store.log_text(run_id, text, "ds_config.json")

    def _project_sweep(self, store: RunStore, parent: str, is_forced: bool) -> None:
        """Bring the sweep's run up to date. While trials stream in it is only done every few seconds."""
        if not is_forced and time.monotonic() < self._summary_due_s:
            return
        self._summary_due_s = time.monotonic() + SUMMARY_EVERY_S
        with self._changed:
            sweep, trials = self._owed.sweep, [self._records[trial] for trial in sorted(self._records)]
        if sweep is None:
            return
        store.log(parent, sweep_content(sweep, trials))
        if trials and not self._has_dataset:
            data = trials[0].config.data
            store.log_dataset(parent, data.directory, data.digest)
            self._has_dataset = True
        if sweep.state is not SweepState.RUNNING:
            store.log_file(parent, self._ledger.spec_file, None)
            store.log_file(parent, self._ledger.facts_file, None)
        with self._changed:
            if self._owed.sweep is sweep:
                self._owed.sweep = None

    def _project_files(self, store: RunStore, parent: str) -> None:
        while self._owed.files:
            file, folder = self._owed.files[0]
            store.log_file(parent, file, folder)
            with self._changed:
                self._owed.files.pop(0)
