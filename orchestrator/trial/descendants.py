"""The processes that came from this one, and ending them all."""

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.005


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own, also of one that left its session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Let the kernel send this process `number` when its parent ends; exit at once if `parent_pid` has ended."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)


def _prctl(option: int, argument: int) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def descendants(pid: int) -> list[int]:
    """Living processes that come from `pid`, itself left out, parents before children. Zombies do not count."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            state, parent = _state_and_parent(entry)
            children.setdefault(parent, []).append(int(entry.name))
            if state in "ZX":
                zombies.add(int(entry.name))
    found, pending = [], [pid]
    while pending:
        for child in children.get(pending.pop(0), []):
            found.append(child)
            pending.append(child)
    return [each for each in found if each not in zombies]


def _state_and_parent(entry: Path) -> tuple[str, int]:
    try:
        # the command's name may hold blanks and brackets; the fields of interest follow its last bracket
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0], int(fields[1])


def end_descendants(deadline_s: float) -> int:
    """Kill and reap everything that came from this process, for at most `deadline_s` seconds.

    Returns how many processes had to be killed. This process has to have adopted orphans.
    """
    killed: set[int] = set()
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        reap()
        alive = descendants(os.getpid())
        if not alive:
            break
        for pid in alive:
            killed.add(pid)
            _kill(pid)
        time.sleep(_POLL_S)
    reap()
    return len(killed)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def reap() -> None:
    """Take the exit status of every child that has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            continue
    except ChildProcessError:
        return
