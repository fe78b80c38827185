"""The end of a run: results, files and what to do next."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from orchestrator.cli.ending import home_option
from orchestrator.cli.output import Output
from orchestrator.cli.reading import read_summary, status_row
from orchestrator.cli.reporting import BRIMFUL_VERSION, write_reports
from orchestrator.contract.errors import EXIT_FAILED, EXIT_NOTHING_FITS
from orchestrator.contract.record import SweepState
from orchestrator.report.export.folder import write_export
from orchestrator.report.export.launch import LAUNCH_FILE
from orchestrator.report.export.measured import measured_trial
from orchestrator.report.summary import Summary
from orchestrator.report.terminal import render_terminal
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger

EXPORT_FOLDER = "export"


@dataclass(frozen=True)
class ResultFiles:
    """What a sweep leaves for its reader. `export` is None when nothing fits."""

    report: Path
    export: Path | None

    @property
    def attachments(self) -> list[tuple[Path, str | None]]:
        """Files worth keeping beside the tracked runs, with their folder there; the training rows are not."""
        files: list[tuple[Path, str | None]] = [(self.report, None), (self.report.with_suffix(".md"), None)]
        if self.export is not None:
            files += [(file, EXPORT_FOLDER) for file in sorted(self.export.iterdir()) if file.is_file()]
        return files


def write_results(ledger: Ledger) -> ResultFiles:
    """Write the report of the sweep and the export of its best into its folder."""
    summary = read_summary(ledger.home, ledger.name)
    return ResultFiles(report=write_reports(summary, ledger.folder), export=_export(ledger, summary))


def conclude(ledger: Ledger, files: ResultFiles, output: Output) -> int:
    """Show the results of a sweep that has ended and return its exit code."""
    summary = read_summary(ledger.home, ledger.name)
    sweep = summary.sweep
    exit_code = sweep.exit_code if sweep.exit_code is not None else EXIT_FAILED
    document: dict[str, JsonValue] = {
        **status_row(summary).model_dump(mode="json"),
        "exit_code": exit_code,
        "best": summary.best.model_dump(mode="json") if summary.best else None,
        "cost": summary.cost.model_dump(mode="json"),
        "report": str(files.report),
        "export": str(files.export) if files.export else None,
    }
    output.document(document)
    output.show(render_terminal(summary, full=False))
    output.show(f"Report: {files.report}")
    if files.export is not None:
        launch = shlex.quote(str(files.export / LAUNCH_FILE))
        output.show(f"Export of the best: {files.export} (train with it: bash {launch})")
    following = f"Next: {_next_command(summary, ledger, exit_code)}"
    if output.as_json:
        output.say(following)
    output.show(following)
    return exit_code


def _export(ledger: Ledger, summary: Summary) -> Path | None:
    if summary.best is None:
        return None
    record = ledger.read_trial(summary.best.trial)
    trial = measured_trial(summary.sweep, record, ledger.read_trials(), summary.facts, BRIMFUL_VERSION)
    folder = ledger.folder / EXPORT_FOLDER
    write_export(trial, folder, force=True)
    return folder


def _next_command(summary: Summary, ledger: Ledger, exit_code: int) -> str:
    name, option = ledger.name, home_option(ledger.home)
    if summary.sweep.state is SweepState.STOPPED:
        return f"brimful resume {name}{option}"
    if exit_code == EXIT_NOTHING_FITS and not summary.out_of_memory and not summary.not_launched:
        return f"brimful trials {name}{option} shows what became of each trial; no memory was short"
    if exit_code == EXIT_NOTHING_FITS:
        return f"brimful report {name}{option} shows all misses; raise limits.device_memory or widen search, then --new"
    if summary.sweep.state is SweepState.FAILED:
        return f"brimful logs {name}{option}"
    tracking = SweepSpec.model_validate(summary.sweep.spec).tracking
    return f"brimful ui{option}" if tracking.enabled and tracking.uri is None else f"brimful report {name}{option}"
