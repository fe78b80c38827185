"""A rank's log file that cannot fill the disk."""

import os
from pathlib import Path

HEAD_BYTES = 5 * 10**6
TAIL_BYTES = 5 * 10**6


class CappedLog:
    """Writes the first `HEAD_BYTES` at once and keeps the last `TAIL_BYTES` in memory until it is closed.

    What the disk does not take is lost: whoever keeps a log has more to do than that.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _opened(path)
        self._head_room_bytes = HEAD_BYTES
        self._tail = bytearray()
        self._left_out_bytes = 0

    def write(self, content: bytes) -> None:
        """Take the next piece of output."""
        head, rest = content[: self._head_room_bytes], content[self._head_room_bytes :]
        if head:
            _write_all(self._descriptor, head)
            self._head_room_bytes -= len(head)
        if rest:
            self._tail += rest
            self._trim(2 * TAIL_BYTES)

    def close(self) -> None:
        """Write what was kept, with a line that says how much lies between."""
        self._trim(TAIL_BYTES)
        if self._left_out_bytes:
            _write_all(self._descriptor, f"\n[... {self._left_out_bytes} bytes left out ...]\n".encode())
        _write_all(self._descriptor, bytes(self._tail))
        os.close(self._descriptor)

    def _trim(self, above_bytes: int) -> None:
        if len(self._tail) > above_bytes:
            excess_bytes = len(self._tail) - TAIL_BYTES
            del self._tail[:excess_bytes]
            self._left_out_bytes += excess_bytes


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except OSError:
        return os.open(os.devnull, flags)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return
