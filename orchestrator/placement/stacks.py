"""Which rank of a silent group is to blame, told by the stacks that the ranks wrote to their logs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLLECTIVE = "torch/distributed/distributed_c10d.py"
"""A rank with this file on its stack waits for its peers in a collective."""


class LogMark:
    """The end of a log at one moment, to read what is written after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read_on(self) -> str:
        """What was written since."""
        if not self._path.exists():
            return ""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            return log.read().decode(errors="replace")


def blame(quietest_first: Sequence[int], stacks: Mapping[int, str]) -> int:
    """The quietest rank that does not wait in a collective, else the quietest of all.

    Ranks reach a collective within milliseconds of each other, so the times of their last events alone do not tell. A
    rank that is stopped writes no stack, and is to blame before those that wait.
    """
    return next((rank for rank in quietest_first if _COLLECTIVE not in stacks[rank]), quietest_first[0])
