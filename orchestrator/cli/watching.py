"""`status --watch`: the state of a sweep of this home, told whenever it changes, until the sweep is over."""

import time
from pathlib import Path

from orchestrator.cli.output import Output
from orchestrator.cli.reading import read_summary, status_line, status_row
from orchestrator.sweep.ledger import Ledger

EVERY_S = 1.0


def watch_status(name: str, home: Path) -> None:
    """Print the state line of `name` whenever it is another one; ends when no driver is left."""
    output = Output()
    told = ""
    while True:
        is_driven = Ledger(home, name).is_driven()
        line = status_line(status_row(read_summary(home, name)))
        if line != told:
            output.show(line)
            told = line
        if not is_driven:
            return
        time.sleep(EVERY_S)
