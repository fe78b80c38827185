"""Ctrl-C and SIGTERM while a sweep runs: the first stops cleanly, the second ends at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from orchestrator.contract.errors import EXIT_TERMINATED
from orchestrator.sweep.loop import Interrupt
from orchestrator.sweep.messages import StopCause

_CAUSES = {signal.SIGINT: StopCause.INTERRUPT, signal.SIGTERM: StopCause.TERMINATE}


@contextmanager
def catching(interrupt: Interrupt, remark: Callable[[str], None]) -> Iterator[None]:
    """While inside, the first signal asks `interrupt` to stop and says so through `remark`; a second one raises
    KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.cause is not None:
            raise KeyboardInterrupt
        interrupt.cause = _CAUSES[signal.Signals(number)]
        remark("Stopping: running trials are cancelled and run again on resume. Ctrl-C once more ends at once.")

    before = {number: signal.signal(number, handle) for number in _CAUSES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """While inside, SIGTERM leaves as Ctrl-C does, so that whatever was started is put away."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
