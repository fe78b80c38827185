"""`report` and `export`."""

import shlex
from importlib.metadata import version
from pathlib import Path

from orchestrator.cli.output import Output
from orchestrator.cli.reading import StatusRow, read_summary, status_row
from orchestrator.contract.config import Frozen
from orchestrator.contract.errors import UsageError
from orchestrator.contract.facts import Facts
from orchestrator.contract.handoff import write_atomic
from orchestrator.report.export.folder import write_export
from orchestrator.report.export.launch import LAUNCH_FILE
from orchestrator.report.export.measured import measured_trial
from orchestrator.report.html import render_html
from orchestrator.report.markdown import render_markdown
from orchestrator.report.rows import TrialRow
from orchestrator.report.summary import BestRow, Summary
from orchestrator.report.tables import notes
from orchestrator.report.terminal import render_terminal
from orchestrator.search.cost import SweepCost
from orchestrator.sweep.ledger import Ledger

BRIMFUL_VERSION = version("brimful")
_FORMATS = {".md": "markdown", ".html": "html", ".json": "json", ".txt": "terminal"}


class ReportDocument(Frozen):
    """The report as JSON."""

    sweep: StatusRow
    best: BestRow | None
    baseline: TrialRow | None
    pareto: tuple[int, ...]
    counts: dict[str, int]
    cost: SweepCost
    trials: tuple[TrialRow, ...]
    facts: Facts | None
    notes: tuple[str, ...]


def report_document(summary: Summary) -> ReportDocument:
    """`summary` for programs."""
    return ReportDocument(
        sweep=status_row(summary),
        best=summary.best,
        baseline=summary.baseline,
        pareto=summary.pareto,
        counts=dict(summary.counts),
        cost=summary.cost,
        trials=summary.rows,
        facts=summary.facts,
        notes=notes(summary),
    )


def write_reports(summary: Summary, folder: Path) -> Path:
    """Write the report to `folder` as report.md, report.json and report.html, and return the last."""
    write_atomic(folder / "report.md", render_markdown(summary))
    write_atomic(folder / "report.json", report_document(summary).model_dump_json(indent=1))
    write_atomic(folder / "report.html", render_html(summary))
    return folder / "report.html"


def show_report(name: str, home: Path, file: Path | None, format: str | None, as_json: bool) -> None:
    """Print the report of `name`, or write it to `file`; with `as_json` standard output carries it as JSON beside that.

    Raises UsageError for an unknown format or ending, or a folder that is not there.
    """
    if as_json and file is None:
        format = "json"
    summary = read_summary(home, name)
    chosen = format or (_format_of(file) if file is not None else "terminal")
    output = Output(as_json)
    match chosen:
        case "terminal" if file is None:
            output.show(render_terminal(summary))
            return
        case "json":
            text = report_document(summary).model_dump_json(indent=1) + "\n"
        case "markdown" | "terminal":
            text = render_markdown(summary)
        case "html":
            text = render_html(summary)
        case _:
            raise UsageError(f"--format {chosen}: there is no such format; choose terminal, markdown, html or json")
    if file is None:
        print(text, end="")
        return
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent} to write {file.name} to; make it or choose another")
    write_atomic(file, text)
    output.document(report_document(summary))
    output.say(f"Wrote {file}")


def _format_of(file: Path) -> str:
    if file.suffix not in _FORMATS:
        raise UsageError(
            f"{file}: no format has the ending {file.suffix!r}; use {', '.join(_FORMATS)}, or say --format"
        )
    return _FORMATS[file.suffix]


def export_trial(name: str, home: Path, trial: int | None, folder: Path | None, force: bool, as_json: bool) -> None:
    """Write the export of `trial`, or of the best. Raises UsageError when nothing fits or it has no numbers."""
    output = Output(as_json)
    ledger = Ledger(home, name)
    summary = read_summary(home, name)
    if trial is None:
        if summary.best is None:
            raise UsageError(
                f"no trial of {name} fits; name one that ran with --trial, `brimful trials {name}` lists them"
            )
        trial = summary.best.trial
    record, records = ledger.read_trial(trial), ledger.read_trials()
    measured = measured_trial(summary.sweep, record, records, summary.facts, BRIMFUL_VERSION)
    target = folder if folder is not None else Path(f"{name}-trial-{trial}")
    files = write_export(measured, target, force)
    output.document({"trial": trial, "folder": str(target), "files": [str(file) for file in files]})
    for line in measured.header():
        output.show(line)
    output.show("\n".join(str(file) for file in files))
    output.show(f"Train with it: bash {shlex.quote(str(target / LAUNCH_FILE))}")
