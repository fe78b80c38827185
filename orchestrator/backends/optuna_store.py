"""The study as a SQLite file: for Optuna's dashboard and anyone's sampler, written by the driver alone.

Nothing is ever decided from it: when it is missing, damaged, or tells another story than the trials, it is written
anew from the study in memory.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.exceptions import StorageInternalError
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

STUDY_FILE = "study.db"
STUDY_NAME = "sweep"
CANDIDATE = "candidate"
"""User attribute of every trial: the candidate's id."""


class StudyFile:
    """Mirrors the trials of a study in memory that have a candidate into `file`.

    A file that cannot be written is given up for this session, which `say` hears: the next one writes it anew.
    """

    def __init__(self, file: Path, memory: optuna.Study, say: Callable[[str], None] = lambda line: None) -> None:
        self._file = file
        self._say = say
        self._is_lost = False
        self._numbers: dict[str, int] = {}
        with self._mirroring():
            self._storage, self._study = self._open(memory)
            stored = self._study.get_trials(deepcopy=False)
            self._numbers = {trial.user_attrs[CANDIDATE]: trial.number for trial in stored}

    def begin(self, trial: FrozenTrial) -> None:
        """Store a running trial."""
        if self._is_lost:
            return
        with self._mirroring():
            self._numbers[trial.user_attrs[CANDIDATE]] = len(self._numbers)
            self._study.add_trial(trial)

    def end(self, trial: FrozenTrial) -> None:
        """Store how a trial that was begun has ended."""
        if self._is_lost:
            return
        with self._mirroring():
            number = self._numbers[trial.user_attrs[CANDIDATE]]
            stored = running_trial(self._study, self._storage, number)
            for key, value in trial.user_attrs.items():
                stored.set_user_attr(key, value)
            for key, value in trial.constraints.items():
                stored.set_constraint(key, value)
            self._study.tell(number, trial.values if trial.state is TrialState.COMPLETE else None, state=trial.state)

    def close(self) -> None:
        """Release the file. What still runs there is queued: it is run again when the sweep goes on."""
        if self._is_lost:
            return
        with self._mirroring():
            self._change(self._storage, self._study, TrialState.RUNNING, TrialState.WAITING)
        self._storage.remove_session()
        self._storage.engine.dispose()

    @contextmanager
    def _mirroring(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, StorageInternalError, OSError) as error:
            self._is_lost = True
            cause = str(error.__cause__ or error).partition("\n")[0]
            self._say(f"{self._file} cannot be written ({cause}): it stays behind until the sweep is resumed.")

    @staticmethod
    def _change(storage: RDBStorage, study: optuna.Study, before: TrialState, after: TrialState) -> None:
        for trial in study.get_trials(deepcopy=False, states=(before,)):
            storage.set_trial_state_values(trial._trial_id, after)

    def _open(self, memory: optuna.Study) -> tuple[RDBStorage, optuna.Study]:
        wanted = [trial for trial in memory.get_trials(deepcopy=False) if CANDIDATE in trial.user_attrs]
        if self._file.exists():
            found = _load(self._file)
            if found is not None:
                storage, study = found
                if study.directions == memory.directions and _story(study.get_trials(deepcopy=False)) == _story(wanted):
                    self._change(storage, study, TrialState.WAITING, TrialState.RUNNING)
                    return found
                storage.engine.dispose()
            for file in self._file.parent.glob(f"{self._file.name}*"):
                file.unlink()
        storage = _storage(self._file)
        study = optuna.create_study(storage=storage, study_name=STUDY_NAME, directions=memory.directions)
        study.add_trials(wanted)
        return storage, study


def running_trial(study: optuna.Study, storage: BaseStorage, number: int) -> optuna.Trial:
    """The running trial of `number`, to set attributes on. The study's sampler becomes a random one, since a Trial
    asks its sampler for values when it is made."""
    study.sampler = RandomSampler(seed=0)
    study_id = storage.get_study_id_from_name(study.study_name)
    return optuna.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))


def _storage(file: Path) -> RDBStorage:
    storage = RDBStorage(f"sqlite:///{file}")
    event.listen(storage.engine, "connect", _skip_flushing)
    storage.engine.dispose()
    return storage


def _skip_flushing(connection: sqlite3.Connection, record: object) -> None:
    # A file that a power cut damages is written anew: waiting for the disk at every attribute would buy nothing.
    connection.execute("PRAGMA synchronous=OFF")


def _load(file: Path) -> tuple[RDBStorage, optuna.Study] | None:
    """The study in `file`; None when the file is damaged or holds no study of ours."""
    try:
        with sqlite3.connect(file) as connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                return None
        storage = _storage(file)
        return storage, optuna.load_study(storage=storage, study_name=STUDY_NAME)
    except (sqlite3.DatabaseError, SQLAlchemyError, StorageInternalError, KeyError):
        return None
    except RuntimeError:
        return None  # the tables of another version of Optuna


def _story(trials: list[FrozenTrial]) -> list[tuple[object, ...]]:
    return [
        (
            trial.user_attrs.get(CANDIDATE),
            TrialState.RUNNING if trial.state is TrialState.WAITING else trial.state,
            trial.values,
            trial.params,
            trial.distributions,
            trial.constraints,
        )
        for trial in trials
    ]
