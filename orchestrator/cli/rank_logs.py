"""`logs`: what a rank printed, from its attempt's folder."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cli.output import Output
from orchestrator.contract.config import Frozen
from orchestrator.contract.errors import UsageError
from orchestrator.contract.record import TrialRecord
from orchestrator.report.rows import describe
from orchestrator.sweep.ledger import Ledger

POLL_S = 0.3
_CHUNK_BYTES = 65536


@dataclass(frozen=True)
class LogRequest:
    """Which log, and how much of it. None: the latest trial, its last attempt, all lines."""

    name: str
    trial: int | None
    rank: int
    attempt: int | None
    tail: int | None
    follow: bool


class LogDocument(Frozen):
    """A rank's log as JSON."""

    trial: int
    label: str
    attempt: int
    rank: int
    text: str


def show_log(request: LogRequest, home: Path, as_json: bool) -> None:
    """Print the log to standard output and say on standard error which one it is."""
    if as_json and request.follow:
        raise UsageError("--json is one document and --follow has no end: choose one of them")
    ledger = Ledger(home, request.name)
    ledger.read_sweep()
    record = _record(ledger, request.trial)
    attempt = request.attempt or len(record.attempts)
    if not 1 <= attempt <= len(record.attempts):
        raise UsageError(
            f"trial {record.trial} has {len(record.attempts)} attempts; --attempt {attempt} is none of them"
        )
    if request.rank >= record.config.world_size:
        raise UsageError(
            f"trial {record.trial} has ranks 0 to {record.config.world_size - 1}; --rank {request.rank} is none of them"
        )
    outcome = record.attempts[attempt - 1].outcome
    state = describe(outcome) if outcome is not None else "no outcome yet"
    print(f"trial {record.trial} ({record.label}), attempt {attempt}, rank {request.rank}: {state}", file=sys.stderr)
    file = ledger.attempt(record.trial, attempt).rank_log(request.rank)

    def is_over() -> bool:
        return not request.follow or _has_ended(ledger, record.trial, attempt)

    if as_json:
        text = "".join(_lines(file, request.tail, is_over))
        Output(as_json).document(
            LogDocument(trial=record.trial, label=record.label, attempt=attempt, rank=request.rank, text=text)
        )
        return
    for text in _lines(file, request.tail, is_over):
        sys.stdout.write(text)
        sys.stdout.flush()


def _record(ledger: Ledger, trial: int | None) -> TrialRecord:
    if trial is not None:
        return ledger.read_trial(trial)
    launched = [record for record in ledger.read_trials() if record.attempts]
    if not launched:
        raise UsageError(f"sweep {ledger.name} has not launched any trial yet")
    return max(launched, key=lambda record: record.attempts[-1].dispatched_s)


def _has_ended(ledger: Ledger, trial: int, attempt: int) -> bool:
    if not ledger.is_driven():
        return True
    return ledger.read_trial(trial).attempts[attempt - 1].outcome is not None


def _lines(file: Path, tail: int | None, is_over: Callable[[], bool]) -> Iterator[str]:
    """The text of `file` from its last `tail` lines on, and what is added until `is_over`."""
    position = _start(file, tail)
    while True:
        was_over = is_over()
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(position)
                data = stream.read()
            position += len(data)
            yield data.decode(errors="replace")
        if was_over:
            return
        time.sleep(POLL_S)


def _start(file: Path, tail: int | None) -> int:
    """Where the last `tail` lines begin, in bytes."""
    if tail is None or not file.exists():
        return 0
    data = file.read_bytes()
    lines = data.splitlines(keepends=True)
    return len(data) - sum(map(len, lines[max(0, len(lines) - tail) :]))
