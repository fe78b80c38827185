"""`stop` and `delete`."""

import shlex
import time
from pathlib import Path

import typer

from orchestrator.cli.options import DEFAULT_HOME
from orchestrator.cli.output import Output
from orchestrator.cli.reading import read_summary, status_line, status_row
from orchestrator.contract.errors import StateError, UsageError
from orchestrator.contract.units import format_bytes
from orchestrator.sweep.audit import audit
from orchestrator.sweep.ledger import Ledger

POLL_S = 0.2
STOP_PATIENCE_S = 120.0
"""How long `stop` waits for a driver that has been asked: longer than any group takes to end."""


def stop_sweep(name: str, home: Path, wait: bool, as_json: bool) -> None:
    """Ask the driver to stop and wait until it has. Raises UsageError when none runs."""
    output = Output(as_json)
    ledger = Ledger(home, name)
    sweep = ledger.read_sweep()
    if not ledger.is_driven():
        raise UsageError(
            f"sweep {name} is not running (it is {ledger.observed_state(sweep)}); there is nothing to stop"
        )
    audit(home, "stop", name)
    ledger.request_stop()
    output.say(f"Asked the driver of {name} to stop.")
    if wait:
        _wait(ledger)
    row = status_row(read_summary(home, name))
    output.document(row)
    output.show(status_line(row))
    output.say(f"To go on: brimful resume {name}{home_option(home)}")


def _wait(ledger: Ledger) -> None:
    deadline_s = time.monotonic() + STOP_PATIENCE_S
    while ledger.is_driven():
        if time.monotonic() > deadline_s:
            holder = ledger.holder()
            where = f"process {holder.pid} on {holder.host}" if holder else "the driver"
            raise StateError(f"{where} has not stopped within {STOP_PATIENCE_S:.0f} s; it was asked, see its terminal")
        time.sleep(POLL_S)


def delete_sweep(name: str, home: Path, yes: bool, as_json: bool) -> None:
    """Remove the sweep's folder after a question, and say what that freed."""
    output = Output(as_json)
    ledger = Ledger(home, name)
    ledger.read_sweep()
    trials = len(ledger.read_trials())
    size = format_bytes(ledger.size_bytes())
    if not yes:
        question = f"Delete sweep {name}: {trials} trials, {size} in {ledger.folder}?"
        if not output.stdout.is_terminal or as_json:
            raise UsageError(f"{question} Say --yes to do so")
        if not typer.confirm(question):
            raise typer.Exit(1)
    audit(home, "delete", name)
    freed_bytes = ledger.delete()
    output.document({"name": name, "trials": trials, "freed_bytes": freed_bytes})
    output.show(
        f"Deleted sweep {name}: {trials} trials, {format_bytes(freed_bytes)} freed. "
        "Its MLflow runs and the prepared data in the cache stay."
    )


def home_option(home: Path) -> str:
    """What a printed command needs to reach the same home."""
    return "" if home == DEFAULT_HOME else f" --home {shlex.quote(str(home))}"
