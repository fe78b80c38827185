"""A summary on a terminal."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
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
_MIN_TEXT = 14
"""Columns of the terminal that words keep at least."""
_UNBOUNDED = 10_000
_KEPT = 3
"""Columns of a table that stay on the narrowest terminal."""


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
    """`table` for rich. Columns without any value are left out, and without `full` those of detail.

    Where the terminal is narrow columns of detail go first, then the last ones, so that what is shown is whole.
    """
    filled = [index for index, _ in enumerate(table.columns) if any(row[index] != NOTHING for row in table.rows)]
    plain = [index for index in filled if table.columns[index] not in DETAIL_COLUMNS]
    narrow = tuple(_rich_table(table, plain[:end]) for end in range(len(plain), min(_KEPT, len(plain)) - 1, -1))
    rendered = _Fitting(_rich_table(table, filled if full else plain), narrow)
    return Group(Text(table.title, style="italic"), rendered) if table.title else rendered


@dataclass(frozen=True)
class _Fitting:
    """The wide table where it has room without folding, else the first narrow one whose numbers are whole."""

    wide: RichTable
    narrow: tuple[RichTable, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_UNBOUNDED)
        if Measurement.get(console, unbounded, self.wide).maximum <= options.max_width:
            yield self.wide
            return
        fitting = (
            each for each in self.narrow if Measurement.get(console, unbounded, each).minimum <= options.max_width
        )
        yield next(fitting, self.narrow[-1])


def _rich_table(table: Table, indices: list[int]) -> RichTable:
    rendered = RichTable(box=None, pad_edge=False, header_style="bold")
    for index in indices:
        column = table.columns[index]
        is_text = column in table.left
        longest = max(len(text) for text in (column, *(row[index] for row in table.rows)))
        rendered.add_column(
            column,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            overflow="fold",
            min_width=min(longest, _MIN_TEXT) if is_text else longest,
        )
    for row in table.rows:
        rendered.add_row(*(Text(row[index]) for index in indices))
    return rendered
