"""The attempt's folder: the names of its files, whole-or-nothing writes, and the command that runs it."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.errors import StateError, StorageError
from orchestrator.contract.outcome import OUTCOME, Outcome
from orchestrator.contract.rank import Event, RankReport

Model = TypeVar("Model", bound=BaseModel)

CONFIG_FILE = "config.json"
EVENTS_FILE = "events.jsonl"
OUTCOME_FILE = "outcome.json"

ATTEMPT_VARIABLE = "BRIMFUL_ATTEMPT"
"""Set in every process of an attempt to its token, so that strays can be found."""

EXIT_STORAGE = 74
"""A rank's exit code when it could not write its files (EX_IOERR of sysexits.h)."""


class AttemptFiles:
    """Every file of one attempt's folder, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / CONFIG_FILE
        self.events = directory / EVENTS_FILE
        self.outcome = directory / OUTCOME_FILE

    def rank_log(self, rank: int) -> Path:
        """Standard output and error of one rank."""
        return self.directory / f"rank{rank}.log"

    def rank_report(self, rank: int) -> Path:
        """The rank's `RankReport`."""
        return self.directory / f"rank{rank}.json"

    def read_config(self) -> TrialConfig:
        """The trial's configuration. Raises StateError when the file is missing or damaged."""
        return read_model(self.config, TrialConfig)

    def read_outcome(self) -> Outcome | None:
        """The outcome, or None while there is none. Raises StateError when the file is damaged."""
        if not self.outcome.exists():
            return None
        try:
            return OUTCOME.validate_json(self.outcome.read_bytes())
        except ValidationError as error:
            raise StateError(f"{self.outcome} is damaged: {error.errors()[0]['msg']}") from error

    def write_outcome(self, outcome: Outcome) -> None:
        """Store the outcome, whole or not at all."""
        write_atomic(self.outcome, OUTCOME.dump_json(outcome, indent=1))

    def read_report(self, rank: int) -> RankReport | None:
        """The rank's report, or None when there is none or only a torn one."""
        try:
            return RankReport.model_validate_json(self.rank_report(rank).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def read_events(self) -> list[Event]:
        """All whole lines of the event file, in order; a torn last line is left out."""
        if not self.events.exists():
            return []
        events = []
        for line in self.events.read_bytes().splitlines():
            try:
                events.append(Event.model_validate_json(line))
            except ValidationError:
                continue
        return events


def read_model(path: Path, model: type[Model]) -> Model:
    """The model stored at `path`. Raises StateError when the file is missing or damaged."""
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise StateError(f"{path} is missing") from error
    except ValidationError as error:
        raise StateError(f"{path} is damaged: {error.errors()[0]['msg']}") from error


_MENDS = {
    errno.ENOSPC: "free some space and say the command again",
    errno.EDQUOT: "free some space and say the command again",
    errno.EROFS: "make it writable or choose another folder",
    errno.EACCES: "make it writable or choose another folder",
    errno.EPERM: "make it writable or choose another folder",
}
_MEND = "look at the disk, then say the command again"


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Whatever the system refuses inside is a StorageError that names `path`, the cause and the mend."""
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        mend = _MENDS.get(error.errno or 0, _MEND)
        raise StorageError(f"{path} cannot be written: {cause}; {mend} (what was stored before is whole)") from error


@contextmanager
def _aside(path: Path) -> Iterator[int]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` aside, flush it to the disk and rename it to `path`: the old file or the new one, never half.

    Raises StorageError when the system refuses.
    """
    data = content.encode() if isinstance(content, str) else content
    with storage(path):
        with _aside(path) as descriptor:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def trial_command(directory: Path) -> list[str]:
    """The command that runs the attempt in `directory` by hand."""
    return [sys.executable, "-m", "orchestrator.trial", str(directory)]
