"""The tables and notes of a report as plain text cells, for any renderer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from orchestrator.contract.facts import Facts
from orchestrator.contract.record import SweepState
from orchestrator.contract.units import format_bytes, format_duration
from orchestrator.report.confirmed import (
    CONFIRM_COLUMNS,
    confirm_cells,
    confirm_headline,
    confirm_notes,
    has_confirmations,
)
from orchestrator.report.cost import cost_headline, cost_notes
from orchestrator.report.quality import EVAL_COLUMNS, has_losses, loss_cell, loss_headline, loss_note
from orchestrator.report.rows import TrialRow, odds
from orchestrator.report.summary import OOM_KINDS, Summary

NOTHING = "-"
FITTING_COLUMNS = (
    "trial",
    "configuration",
    "tokens/s",
    "95 %",
    "vs baseline",
    "peak memory",
    "headroom",
    "MFU",
    "HFU",
    "padding",
    "resident",
)
DETAIL_COLUMNS = frozenset({"HFU", "padding", "resident", *CONFIRM_COLUMNS})
"""Columns that a narrow rendering may leave out."""


@dataclass(frozen=True)
class Table:
    """Text cells under named columns; `left` names the columns that are words, all others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str] = frozenset({"configuration", "result", "cannot win"})


def fitting_table(summary: Summary, limit: int | None = None) -> Table:
    """Trials that fit, best first, at most `limit` of them."""
    shown = summary.ranked[:limit]
    title = f"{summary.fit} of {len(summary.ended)} trials fit"
    if len(shown) < summary.fit:
        title += f"; the best {len(shown)}"
    columns: tuple[str, ...] = FITTING_COLUMNS
    cells = [_fitting_row(row, summary) for row in shown]
    if has_confirmations(summary):
        columns = (*columns, *CONFIRM_COLUMNS)
        again = ((each or NOTHING for each in confirm_cells(row)) for row in shown)
        cells = [(*cell, *more) for cell, more in zip(cells, again, strict=True)]
    if has_losses(summary):
        columns = (*columns, *EVAL_COLUMNS)
        lost = ((loss_cell(row) or NOTHING, row.cannot_win or NOTHING) for row in shown)
        cells = [(*cell, *more) for cell, more in zip(cells, lost, strict=True)]
    return Table(title, columns, tuple(cells))


def _fitting_row(row: TrialRow, summary: Summary) -> tuple[str, ...]:
    return (
        trial_name(row, summary),
        row.label,
        _number(row.tokens_per_second),
        _interval(row),
        _against_baseline(row, summary.baseline),
        _bytes(row.peak_memory_bytes),
        _headroom(row),
        _percent(row.mfu),
        _percent(row.hfu),
        _percent(row.padding_fraction),
        _bytes(row.peak_resident_bytes),
    )


def missing_table(summary: Summary, limit: int | None = None) -> Table:
    """Trials that needed more memory than they may have: those nearest to fitting first, unknown misses last."""
    closest = summary.closest
    known = {row.trial for row in closest}
    rest = [row for row in summary.ended if _kind(row) in OOM_KINDS and row.trial not in known]
    rows = [*closest, *rest][:limit]
    title = f"{summary.out_of_memory} of {len(summary.ended)} trials need more memory"
    if len(rows) < summary.out_of_memory:
        title += f"; the closest {len(rows)}"
    columns = ("trial", "configuration", "result", "needs at least", "limit", "short by")
    cells = tuple(
        (
            trial_name(row, summary),
            row.label,
            row.summary,
            _bytes(row.needed_bytes or row.peak_memory_bytes),
            _bytes(row.limit_bytes),
            _bytes(row.shortfall_bytes) if row.trial in known else NOTHING,
        )
        for row in rows
    )
    return Table(title, columns, cells)


def other_table(summary: Summary) -> Table:
    """Trials that ended in any other way."""
    rows = [row for row in summary.ended if _kind(row) != "ok" and _kind(row) not in OOM_KINDS]
    cells = tuple((trial_name(row, summary), row.label, row.summary) for row in rows)
    return Table(
        f"{len(rows)} of {len(summary.ended)} trials ended otherwise", ("trial", "configuration", "result"), cells
    )


def rejected_table(summary: Summary) -> Table:
    """Candidates that were never launched, those that would need least first."""
    columns = ("trial", "configuration", "probability that it fits", "would need", "of")
    cells = sorted(
        (
            _whole(row.outcome, "needed_bytes"),
            (
                trial_name(row, summary),
                row.label,
                odds(_share(row.outcome, "probability_fits")),
                _bytes(_whole(row.outcome, "needed_bytes") or None),
                _bytes(_whole(row.outcome, "capacity_bytes") or None),
            ),
        )
        for row in summary.rejected
    )
    nearest = f"; the nearest {len(cells)}" if len(cells) < summary.not_launched else ""
    return Table(
        f"{summary.not_launched} candidates are predicted not to fit and were not launched{nearest}",
        columns,
        tuple(cell for _, cell in cells),
    )


def _share(outcome: Mapping[str, JsonValue] | None, name: str) -> float:
    value = (outcome or {}).get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _whole(outcome: Mapping[str, JsonValue] | None, name: str) -> int:
    return int(_share(outcome, name))


def tables(summary: Summary) -> tuple[Table, ...]:
    """Every table that has rows."""
    every = (fitting_table(summary), missing_table(summary), other_table(summary), rejected_table(summary))
    return tuple(table for table in every if table.rows)


def trial_name(row: TrialRow, summary: Summary) -> str:
    """The trial's number, marked: the baseline (b), tied with the best (=), on the Pareto front (*), thrashing (!)."""
    marks = "b" if row.is_baseline else ""
    if summary.best is not None and row.trial in summary.best.not_distinguishable:
        marks += "="
    if row.trial in summary.pareto:
        marks += "*"
    if row.is_thrashing:
        marks += "!"
    return f"{row.trial} {marks}".strip()


def headline(summary: Summary) -> tuple[str, ...]:
    """The result in a few sentences."""
    lines = [summary.winner_text]
    lines += confirm_headline(summary)
    if summary.best is not None and summary.best.reaches_sequence_length is False:
        lines.append("No row of the data is as long as sequence_length, so rows of that length were not tried.")
    lines += loss_headline(summary)
    if summary.not_launched:
        lines.append(_rejected_line(summary.not_launched))
    lines += cost_headline(summary)
    lines += summary.node_warnings
    if summary.sweep.reason and summary.sweep.state is not SweepState.RUNNING:
        lines.append(f"The sweep is {summary.sweep.state}: {summary.sweep.reason}.")
    return tuple(lines)


def _rejected_line(count: int) -> str:
    those = "1 candidate is" if count == 1 else f"{count} candidates are"
    return f"{those} predicted not to fit and not launched; limits.reject_probability says how sure that has to be."


def notes(summary: Summary) -> tuple[str, ...]:
    """What the numbers mean and where they come from."""
    marks = ["b: the baseline"]
    if summary.best is not None and summary.best.not_distinguishable:
        marks.append("=: not distinguishable from the best, the 95 % intervals of tokens/s overlap")
    if summary.pareto:
        marks.append("*: no other trial is better in every objective")
    if any(row.is_thrashing for row in summary.rows):
        marks.append("!: thrashing, an allocation of a step found memory only after all cached blocks were given back")
    lines = [
        "tokens/s: tokens without padding, all ranks together, per second of measured steps; "
        "95 % is the half width of its confidence interval; padding is the share of padding in all computed tokens.",
    ]
    if summary.baseline is not None or len(marks) > 1:
        lines.insert(0, "Marks: " + "; ".join(marks if summary.baseline is not None else marks[1:]) + ".")
    lines += confirm_notes(summary)
    lines += loss_note(summary)
    lines += cost_notes(summary)
    if summary.facts is not None:
        lines += _machine_notes(summary.facts)
    lines.append(f"Driver time {format_duration(summary.sweep.elapsed_s)}, {summary.sweep.candidates} candidates.")
    return tuple(lines)


def _machine_notes(facts: Facts) -> Iterable[str]:
    if facts.device == "cpu":
        yield (
            "peak memory: growth of the address space (VmPeak) of the largest rank over a fresh process, which is what "
            "the limit limits; resident: growth of its resident memory (VmHWM)."
        )
    else:
        yield (
            "peak memory: bytes reserved by PyTorch's allocator on the fullest device (max_memory_reserved); "
            "resident: growth of the rank's host memory (VmHWM)."
        )
    yield f"MFU and HFU: against {facts.peak_source}."
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
    yield f"Measured on {facts.device_name} ({facts.device}) with {versions}."
    data = facts.data
    yield (
        f"Data: {data.rows} rows ({data.format}), {data.mean_row_tokens:.0f} tokens a row on average, "
        f"{data.longest_row_tokens} in the longest; tokenizer {data.tokenizer}."
    )


def _kind(row: TrialRow) -> str:
    return str(row.outcome["kind"]) if row.outcome is not None else ""


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _interval(row: TrialRow) -> str:
    """Half the 95 % interval as a share of the value."""
    if row.tokens_per_second is None or row.tokens_per_second_low is None or row.tokens_per_second_high is None:
        return NOTHING
    half = (row.tokens_per_second_high - row.tokens_per_second_low) / 2
    return f"+-{half / row.tokens_per_second * 100:.1f} %"


def _percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{fraction * 100:.1f} %"


def _bytes(count_bytes: int | None) -> str:
    return NOTHING if count_bytes is None else format_bytes(count_bytes)


def _headroom(row: TrialRow) -> str:
    if row.limit_bytes is None or row.peak_memory_bytes is None:
        return NOTHING
    return format_bytes(row.limit_bytes - row.peak_memory_bytes)


def _against_baseline(row: TrialRow, baseline: TrialRow | None) -> str:
    if baseline is None or baseline.tokens_per_second is None or row.tokens_per_second is None:
        return NOTHING
    if row.trial == baseline.trial:
        return "1.00x"
    return f"{row.tokens_per_second / baseline.tokens_per_second:.2f}x"
