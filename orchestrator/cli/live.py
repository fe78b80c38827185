"""What a user sees while a sweep runs: a live table on a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.cli.output import Output
from orchestrator.cli.reading import remaining_s, total_trials
from orchestrator.contract.outcome import INTERRUPTED_KINDS, Ok, OverLimit, Rejected
from orchestrator.contract.rank import Event
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord
from orchestrator.contract.units import format_bytes, format_duration, format_rate
from orchestrator.report.rows import TrialRow, describe, trial_row
from orchestrator.report.summary import OOM_KINDS, Summary, summarize
from orchestrator.search.reported import confirmed_runs, reported
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.ports import RunLog

REFRESHES_PER_S = 2
WHOLE_TRIALS = 200
"""Up to so many trials are summed up anew whenever one changes: a few milliseconds."""
SHARE_OF_TIME = 0.02
"""Of a longer sweep's time, that summing it up for the view takes at most: trials wait for the driver."""
RECENT_TRIALS = 5
SHOWN_RUNNING = 16
"""More lines than that leave the screen."""
TOLD_REJECTIONS, TOLD_EVERY = 5, 100
_TAIL_BYTES = 4096


class View(RunLog, Protocol):
    """A RunLog that also takes remarks."""

    def remark(self, text: str) -> None:
        """Say something at once."""


@contextmanager
def run_view(ledger: Ledger, output: Output) -> Iterator[View]:
    """The view that suits where standard error goes."""
    if output.stderr.is_terminal and not output.quiet:
        view = LiveView(ledger, output)
        with Live(
            get_renderable=view.render, console=output.stderr, refresh_per_second=REFRESHES_PER_S, transient=True
        ):
            yield view
    else:
        yield LineView(ledger, output)


class _Progress:
    """The sweep and its trials: those of earlier sessions, and what was heard since."""

    def __init__(self, ledger: Ledger) -> None:
        self.sweep: SweepRecord | None = None
        self.trials: dict[int, TrialRecord] = {}
        self.ended: set[int] = set()
        self._kept: Summary | None = None
        self._due_s = 0.0
        for trial in ledger.read_trials():
            self.put(trial)

    def put(self, trial: TrialRecord) -> None:
        """Take in a trial as it is now."""
        self.trials[trial.trial] = trial
        outcome = trial.outcome
        if outcome is not None and outcome.kind not in INTERRUPTED_KINDS and not isinstance(outcome, Rejected):
            self.ended.add(trial.trial)
        else:
            self.ended.discard(trial.trial)

    @property
    def is_whole(self) -> bool:
        """Whether `summary` looks at all trials whenever it is asked."""
        return len(self.trials) <= WHOLE_TRIALS

    def summary(self, is_due: bool = False) -> Summary | None:
        """Of a long sweep it may be a little old, unless it `is_due`: a look at all trials takes a share of the time at
        most."""
        now_s = time.monotonic()
        if self.sweep is None:
            return None
        if self._kept is None or is_due or self.is_whole or now_s >= self._due_s:
            self._kept = summarize(self.sweep, list(self.trials.values()), None)
            self._due_s = time.monotonic() + (time.monotonic() - now_s) / SHARE_OF_TIME
        return replace(self._kept, sweep=self.sweep)

    def elapsed_s(self, sweep: SweepRecord) -> float:
        return sweep.elapsed_s + max(0.0, time.time() - sweep.updated_s)


class LineView:
    """One line for each end of a trial; a trial that was cancelled has not come to its end."""

    def __init__(self, ledger: Ledger, output: Output) -> None:
        self._output = output
        self._progress = _Progress(ledger)
        self._rejected = 0
        self._warned: set[str] = set()

    def sweep_changed(self, sweep: SweepRecord) -> None:
        """See `RunLog`."""
        self._progress.sweep = sweep
        if sweep.waits_for and sweep.state is SweepState.RUNNING:
            self._output.say(f"{_sentence(sweep.waits_for)}.")

    def trial_changed(self, trial: TrialRecord) -> None:
        """See `RunLog`."""
        self._progress.put(trial)
        if isinstance(trial.outcome, Rejected):
            self._tell_rejected(trial.label, trial.outcome)
            return
        summary = self._progress.summary()
        if summary is not None and trial.confirmations:
            self._tell_confirmation(trial, summary)
            return
        if summary is None or trial.outcome is None or trial.outcome.kind in INTERRUPTED_KINDS:
            return
        row = self._row(trial, summary)
        if self._may_be_best(row, summary):
            summary = self._progress.summary(is_due=True) or summary
        self._tell_excluded(summary)
        done = len(self._progress.ended)
        left_s = remaining_s(summary, self._progress.elapsed_s(summary.sweep), done)
        left = f", about {format_duration(left_s)} left" if left_s else ""
        is_best = summary.best is not None and summary.best.trial == trial.trial
        self._output.say(
            f"[{done}/{total_trials(summary)}] trial {row.trial} {row.label}: {result_text(row)}"
            f"{' (best so far)' if is_best else ''}{left}"
        )
        if row.is_baseline and summary.loss_warning:
            self._output.say(f"Warning: {summary.loss_warning}")

    def _row(self, trial: TrialRecord, summary: Summary) -> TrialRow:
        if not self._progress.is_whole:
            return trial_row(trial, summary.sweep.state, reported([trial]).get(trial.trial))
        return next(each for each in summary.rows if each.trial == trial.trial)

    def _may_be_best(self, row: TrialRow, summary: Summary) -> bool:
        """Whether only a look at all trials of a long sweep tells that this is the best."""
        if self._progress.is_whole or row.outcome is None or row.outcome["kind"] != "ok":
            return False
        best = summary.best
        return best is None or (row.tokens_per_second or 0.0) > (best.tokens_per_second or 0.0)

    def _tell_confirmation(self, trial: TrialRecord, summary: Summary) -> None:
        if trial.running is not None:
            if sum(len(each.confirmations) for each in self._progress.trials.values()) == 1:
                self._output.say("The search is over. The best run again, one at a time, before a winner is declared.")
            self._output.say(f"{confirming_text(trial, summary)}.")
            return
        last = trial.confirmations[-1]
        if last.outcome is None or last.outcome.kind in INTERRUPTED_KINDS:
            return
        text = describe(last.outcome)
        if isinstance(last.outcome, Ok | OverLimit):
            text += f", {format_rate(last.outcome.measurement.tokens_per_second)} tokens/s"
        found = trial.measurement.tokens_per_second if trial.measurement is not None else 0.0
        self._output.say(f"confirming trial {trial.trial} {trial.label}: {text} ({format_rate(found)} in the search)")

    def _tell_excluded(self, summary: Summary) -> None:
        """Each node once."""
        for each, warning in zip(summary.excluded, summary.node_warnings, strict=True):
            if each.node not in self._warned:
                self._warned.add(each.node)
                self._output.say(f"Warning: {warning}")

    def _tell_rejected(self, label: str, outcome: Rejected) -> None:
        """The first ones, then now and then: there may be thousands."""
        self._rejected += 1
        if self._rejected <= TOLD_REJECTIONS:
            self._output.say(f"{label}: {describe(outcome)}")
        elif self._rejected % TOLD_EVERY == 0:
            self._output.say(f"{self._rejected} candidates were not launched: they are predicted not to fit.")

    def remark(self, text: str) -> None:
        """See `View`."""
        self._output.say(text)

    def close(self) -> None:
        """See `RunLog`."""


def confirming_text(trial: TrialRecord, summary: Summary) -> str:
    """Which run of the confirmation this is, of how many of the trial."""
    repeats = SweepSpec.model_validate(summary.sweep.spec).measure.confirm.repeats
    run = len(confirmed_runs(trial)) + 1
    return f"Confirming the best: run {run} of {repeats} of trial {trial.trial} ({trial.label})"


def result_text(row: TrialRow) -> str:
    """What became of the trial, with its speed and peak when it ran."""
    if row.tokens_per_second is None:
        return row.summary
    return (
        f"{row.summary}, {format_rate(row.tokens_per_second)} tokens/s, peak {format_bytes(row.peak_memory_bytes or 0)}"
    )


class LiveView:
    """Progress, the best so far, what runs and what ended last; `render` is called from rich's thread."""

    def __init__(self, ledger: Ledger, output: Output) -> None:
        self._ledger = ledger
        self._output = output
        self._progress = _Progress(ledger)
        self._remarks: list[str] = []
        self._running_trials: set[int] = set()

    def sweep_changed(self, sweep: SweepRecord) -> None:
        """See `RunLog`."""
        self._progress.sweep = sweep

    def trial_changed(self, trial: TrialRecord) -> None:
        """See `RunLog`."""
        self._progress.put(trial)
        if trial.running is None:
            self._running_trials.discard(trial.trial)
        else:
            self._running_trials.add(trial.trial)

    def remark(self, text: str) -> None:
        """See `View`. Called from a signal handler too, so it only appends."""
        self._remarks.append(text)

    def close(self) -> None:
        """See `RunLog`."""

    def render(self) -> RenderableType:
        """The screen as it stands."""
        summary = self._progress.summary()
        if summary is None:
            return Text("Starting.")
        elapsed_s = self._progress.elapsed_s(summary.sweep)
        parts: list[RenderableType] = [Text(_head(summary, elapsed_s), style="bold"), _best(summary)]
        parts += [
            Text(f"  {confirming_text(record, summary)}", style="green")
            for record in self._running_records()
            if record.confirmations
        ]
        parts.append(self._running(summary))
        ended = sorted(summary.ended, key=lambda row: self._ended_s(row.trial))[-RECENT_TRIALS:]
        parts += [Text(f"  trial {row.trial} {row.label}: {result_text(row)}", style=_style(row)) for row in ended]
        warnings = [*([summary.loss_warning] if summary.loss_warning else []), *summary.node_warnings]
        warnings += [_sentence(summary.sweep.waits_for)] if summary.sweep.waits_for else []
        remarks = [*warnings, *self._remarks[-3:]]
        parts += [Text(remark, style="yellow") for remark in remarks]
        return Group(*parts)

    def _ended_s(self, trial: int) -> float:
        return self._progress.trials[trial].attempts[-1].ended_s or 0.0

    def _running(self, summary: Summary) -> RichTable:
        table = RichTable(box=None, pad_edge=False, show_header=False)
        if summary.sweep.state is not SweepState.RUNNING:
            return table
        running = self._running_records()
        for record in running[:SHOWN_RUNNING]:
            attempt = record.attempts[-1]
            event = last_event(self._ledger.attempt(record.trial, attempt.attempt).events)
            since = format_duration(max(0.0, time.time() - attempt.dispatched_s))
            table.add_row("  running", f"trial {record.trial}", Text(record.label), Text(_doing(event)), since)
        if len(running) > SHOWN_RUNNING:
            table.add_row("  running", f"and {len(running) - SHOWN_RUNNING} more")
        return table

    def _running_records(self) -> list[TrialRecord]:
        """In the order of their numbers."""
        return [self._progress.trials[trial] for trial in sorted(self._running_trials)]


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _head(summary: Summary, elapsed_s: float) -> str:
    done, total = len(summary.ended), total_trials(summary)
    left_s = remaining_s(summary, elapsed_s)
    filled = round(24 * done / total) if total else 0
    text = f"{summary.sweep.name} [{'#' * filled}{'.' * (24 - filled)}] {done}/{total} trials"
    text += f", {summary.fit} fit, {summary.out_of_memory} out of memory"
    other = done - summary.fit - summary.out_of_memory
    text += f", {other} other" if other else ""
    text += f", {summary.not_launched} not launched" if summary.not_launched else ""
    text += f", {format_duration(elapsed_s)} so far"
    return text + (f", about {format_duration(left_s)} left" if left_s else "")


def _best(summary: Summary) -> Text:
    return Text(f"  best so far: {summary.winner_text}" if summary.best else "  nothing fits yet", style="green")


def _doing(event: Event | None) -> str:
    if event is None:
        return "starting"
    return event.phase if event.step is None else f"{event.phase}, step {event.step}"


def _style(row: TrialRow) -> str:
    kind = row.outcome["kind"] if row.outcome is not None else ""
    return "" if kind == "ok" else "red" if kind in OOM_KINDS else "yellow"


def last_event(file: Path) -> Event | None:
    """The last whole event of `file`; None when there is none yet."""
    if not file.exists():
        return None
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = stream.read().splitlines()
    for line in reversed(lines):
        try:
            return Event.model_validate_json(line)
        except ValidationError:
            continue
    return None
