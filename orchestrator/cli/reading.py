"""`status`, `list`, `trials` and `best`: what the records say."""

import time
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.cli.output import Output
from orchestrator.contract.config import Frozen
from orchestrator.contract.errors import EXIT_NOTHING_FITS, EXIT_OK, StateError
from orchestrator.contract.facts import Facts
from orchestrator.contract.handoff import read_model
from orchestrator.contract.record import SweepState
from orchestrator.contract.units import format_bytes, format_duration, format_rate
from orchestrator.report.cost import cost_headline
from orchestrator.report.rows import TrialRow
from orchestrator.report.summary import Summary, summarize
from orchestrator.report.tables import NOTHING, Table
from orchestrator.report.terminal import terminal_table
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger, list_sweeps


class StatusRow(Frozen):
    """One sweep in one line."""

    name: str
    state: SweepState
    done: int
    total: int
    """Trials that the budget or the space allows."""
    running: int
    confirming: int
    """Trials that are being measured again, before a winner is declared."""
    fit: int
    out_of_memory: int
    other: int
    rejected: int
    """Predicted not to fit, never launched; not among those done."""
    best_trial: int | None
    best_label: str | None
    best_tokens_per_second: float | None
    baseline_speedup: float | None
    elapsed_s: float
    remaining_s: float | None
    """Estimated from the trials so far; None unless the sweep runs and one has ended."""
    excluded_nodes: dict[str, tuple[str, ...]] = {}
    """Nodes that get no more trials while others can hold them, with what was seen there."""
    waits_for: str = ""
    """Which nodes the next trial waits for, in words."""
    reason: str


class DamagedRow(Frozen):
    """A sweep of which a record cannot be read; the others are listed all the same."""

    name: str
    state: Literal["damaged"] = "damaged"
    reason: str
    """Which file, and what is wrong with it."""


def read_summary(home: Path, name: str) -> Summary:
    """The summary of a sweep as an onlooker sees it. Raises UsageError when there is none of this name."""
    return _summary(Ledger(home, name))


def _summary(ledger: Ledger) -> Summary:
    sweep = ledger.read_sweep()
    sweep = sweep.model_copy(update={"state": ledger.observed_state(sweep)})
    try:
        SweepSpec.model_validate(sweep.spec)
    except ValidationError as error:
        raise StateError(f"{ledger.sweep_file} is damaged: spec: {error.errors()[0]['msg']}") from error
    facts = read_model(ledger.facts_file, Facts) if ledger.facts_file.exists() else None
    return summarize(sweep, ledger.read_trials(), facts)


def status_row(summary: Summary) -> StatusRow:
    """The line of `summary`."""
    sweep, best = summary.sweep, summary.best
    done, total = len(summary.ended), total_trials(summary)
    is_running = sweep.state is SweepState.RUNNING
    elapsed_s = sweep.elapsed_s + (max(0.0, time.time() - sweep.updated_s) if is_running else 0.0)
    return StatusRow(
        name=sweep.name,
        state=sweep.state,
        done=done,
        total=total,
        running=sum(row.state == "running" for row in summary.rows),
        confirming=sum(row.is_confirming for row in summary.rows),
        fit=summary.fit,
        out_of_memory=summary.out_of_memory,
        other=done - summary.fit - summary.out_of_memory,
        rejected=summary.not_launched,
        best_trial=best.trial if best else None,
        best_label=best.label if best else None,
        best_tokens_per_second=best.tokens_per_second if best else None,
        baseline_speedup=best.baseline_speedup if best else None,
        elapsed_s=elapsed_s,
        remaining_s=remaining_s(summary, elapsed_s) if is_running else None,
        excluded_nodes={each.node: each.evidence for each in summary.excluded},
        waits_for=sweep.waits_for if is_running else "",
        reason=sweep.reason,
    )


def total_trials(summary: Summary) -> int:
    """How many trials the sweep will have at most."""
    budget = SweepSpec.model_validate(summary.sweep.spec).budget.trials
    total = (summary.sweep.candidates or len(summary.rows)) - summary.not_launched
    return min(total, budget) if budget is not None else total


def remaining_s(summary: Summary, elapsed_s: float, done: int | None = None) -> float | None:
    """Seconds until the end at the pace so far, at most what the time budget leaves; None before the first end.

    `done`: trials that have ended, where more is known of them than `summary` says.
    """
    done = len(summary.ended) if done is None else done
    if done == 0:
        return None
    by_pace_s = elapsed_s / done * max(0, total_trials(summary) - done)
    budget_s = SweepSpec.model_validate(summary.sweep.spec).budget.time
    return by_pace_s if budget_s is None else min(by_pace_s, max(0.0, budget_s - elapsed_s))


def show_status(name: str | None, home: Path, as_json: bool) -> None:
    """One line for the sweep `name`, or for each sweep under `home`. As JSON: an object, or a list without `name`.

    A damaged sweep among many is listed with what is wrong; alone it raises StateError.
    """
    output = Output(as_json)
    if name is not None:
        summary = read_summary(home, name)
        row = status_row(summary)
        output.document(row)
        _show_rows([row], output)
        for warning in summary.node_warnings:
            output.show(warning)
        return
    listed = [_listed_row(ledger) for ledger in list_sweeps(home)]
    documents: list[JsonValue] = [row.model_dump(mode="json") for row in listed]
    output.document(documents)
    if not listed:
        output.show(f"There is no sweep in {home}; `brimful init` writes a spec to begin with.")
    _show_rows([row for row in listed if isinstance(row, StatusRow)], output)
    for damaged in listed:
        if isinstance(damaged, DamagedRow):
            output.show(f"{damaged.name}: {damaged.state}, {damaged.reason}")


def _listed_row(ledger: Ledger) -> StatusRow | DamagedRow:
    try:
        return status_row(_summary(ledger))
    except StateError as error:
        return DamagedRow(name=ledger.name, reason=str(error))


def _show_rows(rows: list[StatusRow], output: Output) -> None:
    if output.stdout.is_terminal and rows:
        output.show(terminal_table(_status_table(rows)))
        return
    for row in rows:
        output.show(status_line(row))


def status_line(row: StatusRow) -> str:
    """`row` as one plain line."""
    parts = [f"{row.name}: {row.state}", f"{row.done}/{row.total} trials", f"{row.fit} fit"]
    parts += [f"{row.out_of_memory} out of memory"]
    parts += [f"{row.other} other"] if row.other else []
    parts += [f"{row.rejected} not launched"] if row.rejected else []
    parts += [f"{row.running} running"] if row.running else []
    parts += ["confirming the best"] if row.confirming else []
    parts += [row.waits_for] if row.waits_for else []
    if row.best_trial is not None:
        gain = f" ({row.baseline_speedup:.2f}x baseline)" if row.baseline_speedup is not None else ""
        parts.append(f"best {format_rate(row.best_tokens_per_second or 0)} tokens/s in trial {row.best_trial}{gain}")
    parts.append(f"{format_duration(row.elapsed_s)} so far" if row.state is SweepState.RUNNING else f"{row.reason}")
    if row.remaining_s is not None:
        parts.append(f"about {format_duration(row.remaining_s)} left")
    return ", ".join(part for part in parts if part)


def _status_table(rows: list[StatusRow]) -> Table:
    columns = ("sweep", "state", "trials", "fit", "out of memory", "other", "best tokens/s", "vs baseline", "left")
    cells = tuple(
        (
            row.name,
            row.state.value,
            f"{row.done}/{row.total}",
            str(row.fit),
            str(row.out_of_memory),
            str(row.other),
            format_rate(row.best_tokens_per_second) if row.best_tokens_per_second is not None else NOTHING,
            f"{row.baseline_speedup:.2f}x" if row.baseline_speedup is not None else NOTHING,
            format_duration(row.remaining_s) if row.remaining_s is not None else NOTHING,
        )
        for row in rows
    )
    return Table("", columns, cells, left=frozenset({"sweep", "state"}))


def show_trials(name: str, home: Path, as_json: bool) -> None:
    """Every trial, in order."""
    output = Output(as_json)
    summary = read_summary(home, name)
    output.document([row.model_dump(mode="json") for row in summary.rows])
    output.show(terminal_table(trials_table(summary)))


def trials_table(summary: Summary) -> Table:
    """All trials of a sweep in the order of their numbers."""
    columns = ("trial", "configuration", "state", "result", "tokens/s", "confirmed", "peak memory", "limit", "attempt")
    cells = tuple(
        (
            f"{row.trial} b" if row.is_baseline else str(row.trial),
            row.label,
            row.state,
            row.summary or NOTHING,
            format_rate(row.tokens_per_second) if row.tokens_per_second is not None else NOTHING,
            str(row.confirmation_runs) if row.confirmation_runs else NOTHING,
            format_bytes(row.peak_memory_bytes) if row.peak_memory_bytes is not None else NOTHING,
            format_bytes(row.limit_bytes) if row.limit_bytes is not None else NOTHING,
            str(row.attempt),
        )
        for row in summary.rows
    )
    return Table(
        f"{len(cells)} trials of {summary.sweep.name}", columns, cells, frozenset({"configuration", "result", "state"})
    )


def show_best(name: str, home: Path, as_json: bool) -> int:
    """The winner, and the exit code: 3 when nothing fits, with `null` as the JSON document."""
    output = Output(as_json)
    summary = read_summary(home, name)
    best = summary.best
    output.document(best if best is not None else None)
    if best is None:
        hint = f" `brimful report {name}` shows by how much they miss." if summary.ended else ""
        output.say(f"{summary.winner_text}{hint}")
        return EXIT_NOTHING_FITS
    output.show(summary.winner_text)
    for line in cost_headline(summary):
        output.show(line)
    output.show(_details(best))
    return EXIT_OK


def _details(row: TrialRow) -> RichTable:
    table = RichTable(box=None, pad_edge=False, show_header=False)
    ends = (row.tokens_per_second_low or 0, row.tokens_per_second_high or 0)
    knobs = {knob: value for knob, value in row.config.items() if value is not None}
    facts = {
        "tokens/s, 95 %": " to ".join(map(format_rate, ends)),
        "confirmed by": f"{row.confirmation_runs} runs" if row.confirmation_runs else "none: as the search found it",
        "peak memory": format_bytes(row.peak_memory_bytes or 0),
        "limit": format_bytes(row.limit_bytes) if row.limit_bytes is not None else "none",
        "ranks": str(row.world_size),
        "accumulation": str(row.gradient_accumulation),
    }
    for name, value in {**knobs, **facts}.items():
        table.add_row(
            Text(name, style="dim"), Text(",".join(map(str, value)) if isinstance(value, list) else str(value))
        )
    return table
