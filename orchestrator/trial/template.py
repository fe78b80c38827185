"""The warm process: it has imported everything and forks a rank whenever it is asked for one.

`python -m orchestrator.trial.template` speaks the line protocol of `orchestrator.contract.rank`. Its own output goes to
standard error. It ends, with all that came from it, when its standard input closes.

`serve` takes the function that a rank runs. A test that wants a fault inside a real trial calls `serve` in a module
of its own with a function that patches a library and then calls `orchestrator.trial.guard.run_rank`; the patch lives
in that one fork. Such a module imports nothing heavy itself and calls `restart_with_environment` first.
"""

import importlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from orchestrator.contract.rank import TEMPLATE_REQUEST, KillRequest, RankExited, RankReady, RankRequest, RankStarted
from orchestrator.trial.descendants import adopt_orphans, descendants, end_descendants
from orchestrator.trial.preload import preload, restart_with_environment
from orchestrator.trial.reaper import RunRank, keep_rank

_READ_BYTES = 2**16
_CLOSE_DEADLINE_S = 2.5
_THREADS_ALLOWED = ("jemalloc_bg_thd",)
"""pyarrow's allocator runs it; it holds no lock of ours."""


@dataclass
class Keeper:
    """A keeper process (see `orchestrator.trial.reaper`) as the template sees it."""

    token: str
    pid: int
    control: int
    """Closing it ends the rank."""
    reply: int
    unread: bytes = b""
    status: int = -signal.SIGKILL
    leftovers: int = 0


class Template:
    """Reads requests from descriptor 0 and writes replies to `replies`, until its input closes."""

    def __init__(self, run_rank: RunRank, replies: int) -> None:
        self._run_rank = run_rank
        self._replies = replies
        self._keepers: dict[str, Keeper] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._unread = b""

    def loop(self) -> None:
        """Serve requests; returns when the input has closed, or SIGTERM has come, and everything has ended."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            self._serve()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._close()

    def _serve(self) -> None:
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            for keeper in [each for each in self._keepers.values() if each.reply in ready]:
                self._hear(keeper)
            if 0 in ready and not self._read_requests():
                return

    def _close(self) -> None:
        for keeper in self._keepers.values():
            self._stop(keeper)
        end_s = time.monotonic() + _CLOSE_DEADLINE_S
        while descendants(os.getpid()) and time.monotonic() < end_s:
            time.sleep(0.01)
        end_descendants(_CLOSE_DEADLINE_S)

    def _read_requests(self) -> bool:
        content = os.read(0, _READ_BYTES)
        *lines, self._unread = (self._unread + content).split(b"\n")
        for line in lines:
            request = TEMPLATE_REQUEST.validate_json(line)
            if isinstance(request, KillRequest):
                keeper = self._keepers.get(request.token)
                if keeper is not None:
                    self._stop(keeper)
            else:
                self._start(request)
        return bool(content)

    def _start(self, request: RankRequest) -> None:
        check_forkable()
        control_end, control = os.pipe()
        reply, reply_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_keeper(request, control_end, reply_end, close=(control, reply))
        os.close(control_end)
        os.close(reply_end)
        self._keepers[request.token] = Keeper(request.token, pid, control, reply)
        self._selector.register(reply, selectors.EVENT_READ)

    def _become_keeper(self, request: RankRequest, control: int, reply: int, close: tuple[int, ...]) -> None:
        status = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            others = [descriptor for each in self._keepers.values() for descriptor in (each.control, each.reply)]
            # a keeper that held another one's control pipe open would keep its end from being seen
            for descriptor in (self._replies, *close, *others):
                if descriptor >= 0:
                    os.close(descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            keep_rank(request, self._run_rank, control, reply)
            status = 0
        finally:
            os._exit(status)

    def _hear(self, keeper: Keeper) -> None:
        content = os.read(keeper.reply, _READ_BYTES)
        *lines, keeper.unread = (keeper.unread + content).split(b"\n")
        for message in map(json.loads, lines):
            if "pid" in message:
                self._reply(RankStarted(token=keeper.token, pid=message["pid"]))
            else:
                keeper.status, keeper.leftovers = message["status"], message["leftovers"]
        if not content:
            self._forget(keeper)

    def _forget(self, keeper: Keeper) -> None:
        self._selector.unregister(keeper.reply)
        os.close(keeper.reply)
        self._stop(keeper)
        os.waitpid(keeper.pid, 0)
        del self._keepers[keeper.token]
        self._reply(RankExited(token=keeper.token, status=keeper.status, leftovers=keeper.leftovers))

    @staticmethod
    def _stop(keeper: Keeper) -> None:
        if keeper.control >= 0:
            os.close(keeper.control)
            keeper.control = -1

    def _reply(self, reply: BaseModel) -> None:
        os.write(self._replies, reply.model_dump_json().encode() + b"\n")


def check_forkable() -> None:
    """Raise AssertionError when a fork of this process would be broken: a device in use, or a thread running."""
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "the template has touched the GPU"
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    extra = [name for name in names[1:] if name not in _THREADS_ALLOWED]
    assert not extra, f"the template runs threads: {extra}"


def serve(run_rank: RunRank, load: Callable[[], None] = preload) -> None:
    """Import everything by `load`, say that the template is ready, and serve requests until standard input closes."""
    start_s = time.monotonic()
    replies = os.dup(1)
    os.dup2(2, 1)
    adopt_orphans()
    load()
    template = Template(run_rank, replies)
    ready = RankReady(pid=os.getpid(), imported_s=time.monotonic() - start_s)
    os.write(replies, ready.model_dump_json().encode() + b"\n")
    template.loop()


def run_rank(directory: Path) -> int:
    """`orchestrator.trial.guard.run_rank`, imported only where `serve` has kept the imports' output off the replies."""
    exit_code: int = importlib.import_module("orchestrator.trial.guard").run_rank(directory)
    return exit_code


if __name__ == "__main__":
    restart_with_environment()
    serve(run_rank)
