"""Who did what to the sweeps of a home, and when: one line of JSON an act in HOME/audit.jsonl, never rewritten."""

import getpass
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.contract.handoff import storage

AUDIT_FILE = "audit.jsonl"
SUBMITTER_VARIABLE = "BRIMFUL_SUBMITTED_BY"
"""Who asked for the command from outside of the cluster; the command itself runs as the cluster's user."""


def audit(home: Path, act: str, name: str) -> None:
    """Note `act` (a verb of the command line) on the sweep `name`. Raises StorageError when it cannot be written."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "who": f"{getpass.getuser()}@{socket.gethostname()}",
        "for": os.environ.get(SUBMITTER_VARIABLE),
        "what": act,
        "sweep": name,
        "pid": os.getpid(),
    }
    with storage(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(home / AUDIT_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())  # one write: lines of two commands never mix
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
