"""A summary as Markdown, for pull requests and notes."""

from orchestrator.report.summary import Summary
from orchestrator.report.tables import Table, headline, notes, tables


def render_markdown(summary: Summary) -> str:
    """The whole report as one Markdown document."""
    parts = [f"# Sweep {summary.sweep.name}", *headline(summary)]
    for table in tables(summary):
        parts += [f"## {table.title}", markdown_table(table)]
    parts += ["## What the numbers mean", "\n".join(f"- {note}" for note in notes(summary))]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """`table` as a GitHub table; bars in cells are escaped."""
    rule = ("---" if column in table.left else "---:" for column in table.columns)
    lines = [table.columns, tuple(rule), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
