"""A summary on a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.report.summary import Summary
from orchestrator.report.tables import (
    DETAIL_COLUMNS,
    NOTHING,
    Table,
    fitting_table,
    headline,
    missing_table,
    notes,
    tables,
)

SHOWN_ROWS = 10
"""Rows of each table at the end of a run; `brimful report` shows all."""


def render_terminal(summary: Summary, full: bool = True) -> RenderableType:
    """Tables, headline and notes; not `full`: the best rows and the closest misses only."""
    shown = tables(summary) if full else (fitting_table(summary, SHOWN_ROWS), missing_table(summary, _misses(summary)))
    parts: list[RenderableType] = [terminal_table(table, full) for table in shown if table.rows]
    parts += [Text(line, style="bold" if index == 0 else "") for index, line in enumerate(headline(summary))]
    if full:
        parts += [Text(note, style="dim") for note in notes(summary)]
    return Group(*parts)


def _misses(summary: Summary) -> int:
    """With a winner at hand three near misses are enough."""
    return 3 if summary.best is not None else SHOWN_ROWS


def terminal_table(table: Table, full: bool = True) -> RenderableType:
    """`table` for rich. Columns without any value are left out, and without `full` those of detail."""
    rendered = RichTable(box=None, pad_edge=False, header_style="bold")
    filled = [
        index
        for index, column in enumerate(table.columns)
        if any(row[index] != NOTHING for row in table.rows) and (full or column not in DETAIL_COLUMNS)
    ]
    for index in filled:
        column = table.columns[index]
        is_text = column in table.left
        rendered.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in table.rows:
        rendered.add_row(*(Text(row[index]) for index in filled))
    return Group(Text(table.title, style="italic"), rendered) if table.title else rendered
