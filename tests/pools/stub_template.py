"""A template without training libraries: it speaks the line protocol and its ranks do what `behave.json` says.

`behave.json` in the attempt's folder maps a rank (as text) to a behaviour; the others do as DS_STUB_BEHAVES says, else
`ok`.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from orchestrator.contract.handoff import ATTEMPT_VARIABLE, AttemptFiles, write_atomic
from orchestrator.contract.outcome import Crashed, Infra, Measurement, Ok, OomDevice, Outcome, Phase, RankMemory
from orchestrator.contract.rank import (
    TEMPLATE_REQUEST,
    Event,
    KillRequest,
    RankExited,
    RankReady,
    RankReport,
    RankRequest,
    RankStarted,
    TemplateReply,
)

PR_SET_CHILD_SUBREAPER = 36
MEET_DEADLINE_S = 20.0


def measurement() -> Measurement:
    return Measurement(
        tokens_per_second=100.0, tokens_per_second_low=99.0, tokens_per_second_high=101.0, tokens=1000,
        padding_tokens=0, padding_fraction=0.0, sequences=10, sum_squared_lengths=1000, measured_steps=3,
        measured_s=10.0, step_s=(3.0, 3.0, 4.0), peak_memory_bytes=1000, peak_resident_bytes=900,
        ranks=(RankMemory(rank=0, peak_memory_bytes=1000, peak_resident_bytes=900),), probe_row_tokens=10,
        reaches_sequence_length=True, trainable_parameters=10, total_parameters=100, first_loss=2.0, last_loss=1.0,
        device="cpu", device_name="stub", threads_per_rank=1,
        resolved={
            "deepspeed": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}},
            "optimizer": {"class": "torch.optim.AdamW", "lr": 1e-3},
            "environment": {name: os.environ[name] for name in sorted(os.environ)},
        },
    )  # fmt: skip


def ok() -> Ok:
    return Ok(measurement=measurement())


class Rank:
    def __init__(self, request: RankRequest) -> None:
        self.request = request
        self.files = AttemptFiles(Path(request.directory))

    def event(self, phase: Phase, step: int | None = None, name: str = "phase") -> None:
        event = Event(event=name, time_s=time.time(), rank=self.request.rank, phase=phase, step=step)
        with self.files.events.open("a") as file:
            file.write(event.model_dump_json() + "\n")

    def report(self, outcome: Outcome, is_consequence: bool = False) -> None:
        rank = self.request.rank
        report = RankReport(rank=rank, time_s=time.time(), outcome=outcome, is_consequence=is_consequence)
        write_atomic(self.files.rank_report(rank), report.model_dump_json())

    def crash(self, error: str, is_consequence: bool = False) -> None:
        outcome = Crashed(phase=Phase.FORWARD, rank=self.request.rank, error=error)
        self.report(outcome, is_consequence)

    def meet(self) -> list[socket.socket]:
        """Rank 0 listens at the group's port, the others connect: a port used twice fails for real."""
        where = (self.request.master_addr, self.request.master_port)
        if self.request.rank == 0:
            listener = socket.create_server(where)
            listener.settimeout(MEET_DEADLINE_S)
            return [listener, *(listener.accept()[0] for _ in range(self.request.world_size - 1))]
        deadline_s = time.monotonic() + MEET_DEADLINE_S
        while True:
            try:
                return [socket.create_connection(where, timeout=1.0)]
            except ConnectionRefusedError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)

    def run(self, behaviour: str) -> int:
        self.event(Phase.LOAD)
        peers = self.meet()
        self.event(Phase.FORWARD, step=0, name="first_step")
        match behaviour.split(":"):
            case ["ok"]:
                self.report(ok())
            case ["sleep", seconds]:
                deadline_s = time.monotonic() + float(seconds)
                while time.monotonic() < deadline_s:
                    time.sleep(0.05)
                    self.event(Phase.FORWARD)
                self.report(ok())
            case ["signal", name]:
                os.kill(os.getpid(), signal.Signals[name])
            case ["hang"]:
                time.sleep(3600)
            case ["stubborn"]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(3600)
            case ["exit", code]:
                print("last words", flush=True)
                return int(code)
            case ["torn"]:
                self.files.rank_report(self.request.rank).write_text('{"rank": 0, "time_s": 1')
            case ["garbage", number]:
                self.report(ok())
                file = self.files.rank_report(self.request.rank)
                report = json.loads(file.read_text())
                report["outcome"]["measurement"]["tokens_per_second"] = "SPEED"
                file.write_text(json.dumps(report).replace('"SPEED"', number))
            case ["broken_device"]:
                cause = "the device reports a hardware error: uncorrectable ECC"
                self.report(Infra(cause=cause, blames="device"))
            case ["oom"]:
                self.report(OomDevice(phase=Phase.FORWARD, rank=self.request.rank, evidence="out of memory"))
            case ["peer_lost"]:
                peers[-1].settimeout(None)
                peers[-1].recv(1)
                self.crash("DistNetworkError: connection closed by peer", is_consequence=True)
                return 1
            case ["grandchildren"]:
                subprocess.Popen(["setsid", "sleep", "3601"])
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        time.sleep(3602)
                    os._exit(0)
                self.event(Phase.BACKWARD)
                time.sleep(3600)
            case ["children"]:
                for _ in range(4):
                    subprocess.Popen(["setsid", "sleep", "3600"])
                self.report(ok())
            case ["hog"]:
                held = []
                while len(held) < 80:
                    held.append(b"x" * 100 * 2**20)
                    self.event(Phase.BACKWARD)
                    time.sleep(0.05)
            case ["template_dies"]:
                os.kill(psutil.Process().parent().ppid(), signal.SIGKILL)
                time.sleep(3600)
            case _:
                raise ValueError(behaviour)
        return 0


def rank_process(request: RankRequest) -> int:
    """Fork the rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(AttemptFiles(Path(request.directory)).rank_log(request.rank), os.O_WRONLY | os.O_CREAT, 0o600)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(request.environment)
        os.environ[ATTEMPT_VARIABLE] = request.token
        path = Path(request.directory, "behave.json")
        behaviours = json.loads(path.read_text()) if path.exists() else {}
        status = Rank(request).run(behaviours.get(str(request.rank), os.environ.get("DS_STUB_BEHAVES", "ok")))
    finally:
        sys.stdout.flush()
        os._exit(status)


def keeper(request: RankRequest, replies: int) -> int:
    """Fork a keeper, which adopts what its rank leaves and ends it all with the rank, on SIGTERM and when the template
    is gone (Ray kills the children of a worker that ends). Returns the keeper's process id."""
    template = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        rank = rank_process(request)
        say(replies, RankStarted(token=request.token, pid=rank))
        ended, status = os.waitpid(rank, os.WNOHANG)
        while not ended and not told and os.getppid() == template:
            time.sleep(0.01)
            ended, status = os.waitpid(rank, os.WNOHANG)
        end_children()
        if not ended:
            _, status = os.waitpid(rank, 0)
        if os.getppid() == template:
            say(replies, RankExited(token=request.token, status=os.waitstatus_to_exitcode(status)))
    finally:
        os._exit(0)


def end_children() -> None:
    """Kill what came from this process until nothing is left."""
    while living := [each for each in psutil.Process().children(recursive=True) if each.status() != "zombie"]:
        for process in living:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def say(replies: int, reply: TemplateReply) -> None:
    os.write(replies, reply.model_dump_json().encode() + b"\n")


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.environ.get("DS_STUB_FAILS"):
        raise ImportError("no module named stub")
    say(1, RankReady(pid=os.getpid(), imported_s=0.0))
    keepers: dict[str, int] = {}
    for line in sys.stdin:
        request = TEMPLATE_REQUEST.validate_json(line)
        if isinstance(request, KillRequest):
            if psutil.pid_exists(keepers[request.token]):
                os.kill(keepers[request.token], signal.SIGTERM)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keepers[request.token] = keeper(request, 1)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # the keepers end all the rest when they see that this process is gone


if __name__ == "__main__":
    main()
