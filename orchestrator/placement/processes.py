"""Finding and ending every process that came from a template, whatever session or parent it has moved to."""

import time
from collections.abc import Iterable
from pathlib import Path

import psutil

TEMPLATE_VARIABLE = "BRIMFUL_TEMPLATE"
"""Set to a unique id in a template's environment. Forks and children inherit it, so that a process which left its
session and its parent is still found by `/proc/PID/environ`."""

_GONE_DEADLINE_S = 5.0


def find_marked(variable: str, value: str) -> list[psutil.Process]:
    """All living processes of this machine whose initial environment holds `variable=value`."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _environment(entry):
            try:
                process = psutil.Process(int(entry.name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
    return found


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # gone in the meantime, or another user's: neither is ours
        return []


def end_marked(variable: str, value: str, spare: Iterable[int] = ()) -> list[int]:
    """Kill all processes with `variable=value` but those in `spare`, until none is left.

    Returns the process ids that were found. Raises TimeoutError when one cannot be ended (it hangs in the kernel).
    """
    spared = frozenset(spare)
    seen: dict[int, None] = {}
    deadline = time.monotonic() + _GONE_DEADLINE_S
    while True:
        # scanned again after each round: a process that was forking while it was killed leaves a child
        found = [process for process in find_marked(variable, value) if process.pid not in spared]
        if not found:
            return list(seen)
        seen.update(dict.fromkeys(process.pid for process in found))
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=0.5)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in found]} do not end after SIGKILL")
