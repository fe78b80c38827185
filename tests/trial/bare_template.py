"""A template that imports no training library, for ranks that only start processes or write."""

import os
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.trial.template import serve


def leave_grandchild(directory: Path) -> None:
    """A grandchild in a session of its own that outlives its parent."""
    script = (
        "import subprocess as s;"
        "print(s.Popen(['sleep', '600'], start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    )
    printed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout
    (directory / "grandchild").write_bytes(printed)


def leave_forks(directory: Path) -> None:
    """Two forks that never became another program and left the session."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)


def sleep_for_ever(directory: Path) -> None:
    leave_grandchild(directory)
    time.sleep(600)


def flood_log(directory: Path) -> None:
    line = b"x" * 1023 + b"\n"
    os.write(2, b"first line\n")
    for _ in range(15_000):
        os.write(2, line)
    os.write(2, b"last line\n")


def flood_half_a_gigabyte(directory: Path) -> None:
    piece = b"z" * 99_999 + b"\n"
    for _ in range(5000):
        os.write(2, piece)
    os.write(2, b"last line\n")


def exit_with_three(directory: Path) -> None:
    os._exit(3)


BEHAVIOURS = {
    each.__name__: each
    for each in (
        exit_with_three,
        flood_half_a_gigabyte,
        flood_log,
        leave_forks,
        leave_grandchild,
        sleep_for_ever,
    )
}


def run_rank(directory: Path) -> int:
    BEHAVIOURS[(directory / "fault").read_text()](directory)
    return 0


if __name__ == "__main__":
    serve(run_rank, load=lambda: None)
