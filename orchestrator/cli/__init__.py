"""The `brimful` command. Importing it loads none of the heavy libraries; each verb loads what it needs."""

import json
import os
import sys
import tempfile
import traceback
from typing import NoReturn, Protocol, runtime_checkable

from orchestrator.contract.errors import EXIT_FAILED, EXIT_USAGE, BrimfulError


@runtime_checkable
class _UsageFault(Protocol):
    """What typer raises for a command line that it cannot read."""

    def format_message(self) -> str:
        """What is wrong, in one line."""


def main() -> None:
    """Run the command line and exit with its code."""
    from orchestrator.cli.app import app

    try:
        app()
    except BrimfulError as error:
        _end(str(error), error.exit_code)
    except SystemExit as end:
        # typer has told people about a wrong command line; the fault is the context of its exit
        if isinstance(end.__context__, _UsageFault):
            _document(end.__context__.format_message(), EXIT_USAGE)
        raise
    except Exception as error:  # noqa: BLE001 - the last stop: whatever it is, the user gets one line and a log
        _end(_unexpected(error), EXIT_FAILED)


def _end(message: str, exit_code: int) -> NoReturn:
    """Leave with `message`; under --json it is the one document on standard output too."""
    print(message, file=sys.stderr)
    _document(message, exit_code)
    sys.exit(exit_code)


def _document(message: str, exit_code: int) -> None:
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": message, "exit_code": exit_code}))


def _unexpected(error: Exception) -> str:
    details = "".join(traceback.format_exception(error))
    text = str(error).strip().partition("\n")[0]
    line = f"brimful met an unexpected error: {type(error).__name__}: {text}"
    try:
        descriptor, log = tempfile.mkstemp(prefix="brimful-error-", suffix=".log", text=True)
        with os.fdopen(descriptor, "w") as file:
            file.write(details)
    except OSError as failure:
        return f"{details}{line} (no log could be written: {failure})"
    return f"{line}; the traceback is in {log}"
