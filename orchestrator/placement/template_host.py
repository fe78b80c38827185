"""One warm template process on one device, and the rank that runs in it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.rank import (
    TEMPLATE_REPLY,
    KillRequest,
    RankExited,
    RankReady,
    RankRequest,
    RankStarted,
    TemplateReply,
    TemplateRequest,
)
from orchestrator.placement.hosts import HostReply, RankBegan, RankEnded, RankFailed
from orchestrator.placement.oom_counter import OomCounter
from orchestrator.placement.processes import TEMPLATE_VARIABLE, end_marked

DEFAULT_TEMPLATE = "orchestrator.trial.template"
KILL_DEADLINE_S = 12.0
"""A template that has not ended its rank this long after it was told to is ended together with it."""
_READ_BYTES = 65536
_STDERR_TAIL_BYTES = 4000


class TemplateHost:
    """A `RankHost` in this process: it starts the template when it is first needed and again when it has ended.

    One thread calls it. `environment` is the template's whole environment.
    """

    def __init__(self, node: str, environment: Mapping[str, str], module: str = DEFAULT_TEMPLATE) -> None:
        self.node = node
        self.address = "127.0.0.1"
        self._environment = dict(environment)
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._marker = ""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the host; close() ends it)
        self._unread = b""
        self._token: str | None = None
        self._rank_pid: int | None = None
        self._kill_at: float | None = None
        self._oom: OomCounter | None = None
        self._ready: list[HostReply] = []

    @property
    def descriptor(self) -> int | None:
        """A file descriptor that becomes readable when there may be replies; None while no template runs."""
        if self._process is None or self._process.stdout is None:
            return None
        return self._process.stdout.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether a rank was submitted and has not ended."""
        return self._token is not None

    def start(self) -> None:
        """Start the template unless it runs; returns at once, the imports go on in the background."""
        if self._process is not None:
            return
        self._marker = uuid.uuid4().hex
        self._unread = b""
        self._stderr.seek(0)
        self._stderr.truncate()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment | {TEMPLATE_VARIABLE: self._marker},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._oom = OomCounter.of_process(self._process.pid)

    def submit(self, request: RankRequest) -> None:
        """See `RankHost`."""
        assert self._token is None, f"the rank of {self._token} still runs"
        folder = Path(request.directory)
        if not AttemptFiles(folder).config.exists():
            cause = f"{folder} is not visible on node {self.node}; put the home folder where every node sees it"
            self._ready.append(RankFailed(request.token, "infra", cause))
            return
        self._token, self._kill_at = request.token, None
        if self._process is not None and self._process.poll() is not None:
            self._forget_template()
        self.start()
        if self._oom is not None:
            self._oom.mark()
        self._send(request)

    def kill(self, token: str) -> None:
        """See `RankHost`."""
        if token != self._token or self._kill_at is not None:
            return
        self._kill_at = time.monotonic() + KILL_DEADLINE_S
        self._send(KillRequest(token=token))

    def dump_stacks(self, token: str) -> None:
        """See `RankHost`. The trial plane registers `faulthandler` for SIGUSR1."""
        if token == self._token and self._rank_pid is not None:
            try:
                os.kill(self._rank_pid, signal.SIGUSR1)
            except ProcessLookupError:
                return

    def replies(self) -> list[HostReply]:
        """See `RankHost`."""
        self._read()
        if self._process is not None and self._process.poll() is not None:
            self._read()
            self._template_ended()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._end_template_with_rank()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """End the template and all that came from it. Safe to call twice."""
        if self._process is not None:
            self._stop_template()
        self._token = None
        self._stderr.close()

    def _send(self, request: TemplateRequest) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.model_dump_json().encode() + b"\n")
        except BrokenPipeError:
            # it has just ended; replies() sees that and answers for the rank
            return

    def _read(self) -> None:
        while self._process is not None and self._process.stdout is not None:
            chunk = self._read_chunk(self._process.stdout.fileno())
            if not chunk:
                return
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            for line in lines:
                self._take(TEMPLATE_REPLY.validate_json(line))

    @staticmethod
    def _read_chunk(descriptor: int) -> bytes:
        try:
            return os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return b""

    def _take(self, reply: TemplateReply) -> None:
        match reply:
            case RankReady():
                return
            case RankStarted(token=token, pid=pid) if token == self._token:
                self._rank_pid = pid
                self._ready.append(RankBegan(token, pid))
            case RankExited(token=token, status=status, leftovers=leftovers) if token == self._token:
                self._rank_ended(token, status, leftovers)

    def _rank_ended(self, token: str, status: int, leftovers: int) -> None:
        assert self._process is not None
        try:
            strays = end_marked(TEMPLATE_VARIABLE, self._marker, spare=[self._process.pid])
        except TimeoutError as error:
            cause = f"what the trial left behind on node {self.node} cannot be ended: {error}"
            self._ready.append(RankFailed(token, "device", cause))
        else:
            evidence = self._oom.rise() if self._oom is not None else None
            self._ready.append(RankEnded(token, status, leftovers + len(strays), evidence))
        self._token = self._rank_pid = self._kill_at = None

    def _template_ended(self) -> None:
        assert self._process is not None
        status, last_words = self._process.returncode, self._last_words()
        evidence = self._oom.rise() if self._oom is not None else None
        self._forget_template()
        if self._token is None:
            return
        cause = f"the template process ended with status {status}"
        if evidence is not None and status == -signal.SIGKILL:
            self._ready.append(RankFailed(self._token, "host_memory", f"{cause}; {evidence}"))
        else:
            self._ready.append(RankFailed(self._token, "infra", f"{cause}: {last_words}".rstrip(": ")))
        self._token = self._rank_pid = self._kill_at = None

    def _end_template_with_rank(self) -> None:
        token = self._token
        self._stop_template()
        if token is not None:
            self._ready.append(RankEnded(token, -signal.SIGKILL))
        self._token = self._rank_pid = self._kill_at = None

    def _stop_template(self) -> None:
        """A template holds nothing that it would have to put away; the sweep by marker ends all that came from it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._forget_template()

    def _forget_template(self) -> None:
        process = self._process
        assert process is not None
        end_marked(TEMPLATE_VARIABLE, self._marker)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        self._process = None

    def _last_words(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        return os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, start).decode(errors="replace").strip()
