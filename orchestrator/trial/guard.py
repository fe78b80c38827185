"""The end of every rank, however it comes: the one broad except, which turns an error into an outcome."""

import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TypeGuard

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.errors import StorageError
from orchestrator.contract.handoff import EXIT_STORAGE, AttemptFiles, write_atomic
from orchestrator.contract.outcome import Ok, Outcome, OverLimit, Phase
from orchestrator.contract.rank import RankReport
from orchestrator.trial.classify import Failure, Verdict, classify
from orchestrator.trial.device import Device, open_device
from orchestrator.trial.events import EventLog
from orchestrator.trial.group import RankPlace
from orchestrator.trial.run import Trial

EXIT_RAN = 0
EXIT_DID_NOT_RUN = 1


def run_rank(directory: Path) -> int:
    """Run this process's rank of the trial in `directory` and write its report.

    The rank is the one that torchrun's variables name. Returns 0 when the trial ran (`ok` or `over_limit`), else 1, and
    EXIT_STORAGE when there is no report, since the disk did not take it.
    SIGUSR1 prints the stack of every thread to standard error.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        return _run_rank(AttemptFiles(directory))
    except (OSError, StorageError) as error:
        # the trial's own errors never come here: its event file could not be opened, or its report not be written
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        return EXIT_STORAGE


def _run_rank(files: AttemptFiles) -> int:
    place = RankPlace.from_environment()
    os.environ.update(place.to_environment())
    config = files.read_config()
    events = EventLog(files.events, place.rank)
    verdict = _guarded(config, place, events)
    report = RankReport(
        rank=place.rank, time_s=time.time(), outcome=verdict.outcome, is_consequence=verdict.is_consequence
    )
    write_atomic(files.rank_report(place.rank), report.model_dump_json(indent=1))
    return EXIT_RAN if has_run(verdict.outcome) else EXIT_DID_NOT_RUN


def has_run(outcome: Outcome) -> TypeGuard[Ok | OverLimit]:
    """Whether the trial ran to its end and was measured."""
    return isinstance(outcome, Ok | OverLimit)


def _guarded(config: TrialConfig, place: RankPlace, events: EventLog) -> Verdict:
    device: Device | None = None
    try:
        device = open_device(config, place)
        return Verdict(Trial(config, place, device, events).run())
    except Exception as error:  # noqa: BLE001
        failure = _failure(error, config, place, events, device)
    print(failure.traceback, file=sys.stderr, flush=True)
    return classify(failure)


def _failure(
    error: Exception, config: TrialConfig, place: RankPlace, events: EventLog, device: Device | None
) -> Failure:
    if device is not None:
        # before anything else: even reading the peak takes memory that a tight limit may not leave
        device.lift_limit()
    peak_bytes = device.used_bytes() if device is not None else None
    reserved_bytes = device.reserved_bytes() if device is not None else None
    return Failure(
        types=tuple(each.__name__ for each in type(error).__mro__),
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
        phase=events.phase,
        rank=place.rank,
        device=device.kind if device is not None else ("cpu" if config.device == "auto" else config.device),
        step=events.step,
        batch_tokens=events.batch_tokens if events.phase in (Phase.FORWARD, Phase.BACKWARD) else None,
        limit_bytes=None if device is None or device.is_host_bound else device.limit_bytes,
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
    )
