"""The keeper of one rank: a fork of the template that forks the rank, keeps its log and ends all that it leaves.

Each rank has a keeper of its own, which adopts orphans. So whatever comes from the rank is a descendant of its
keeper, also a grandchild that called `setsid` and lost its parent, and ranks of one template are never mixed up.
"""

import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrator.contract.handoff import ATTEMPT_VARIABLE, AttemptFiles
from orchestrator.contract.rank import RankRequest
from orchestrator.trial.descendants import adopt_orphans, die_with_parent, end_descendants
from orchestrator.trial.ranklog import CappedLog

RunRank = Callable[[Path], int]
"""Runs the rank that the environment names, of the trial in a folder; returns the exit code."""

END_DEADLINE_S = 8.0
_READ_BYTES = 2**16


def keep_rank(request: RankRequest, run_rank: RunRank, control: int, reply: int) -> None:
    """Run the rank of `request` in a fork and return when it and all that came from it are gone.

    Reading the end of file on `control` means: end the rank. Two JSON lines go to `reply`: the rank's `pid`, and at
    the end its `status` and the number of `leftovers`.
    """
    # a signal to the template's group must not take the keeper away before it has cleared up
    os.setsid()
    adopt_orphans()
    output_end, output = os.pipe()
    keeper_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(request, run_rank, output, close=(control, reply, output_end), keeper_pid=keeper_pid)
    os.close(output)
    _say(reply, {"pid": pid})
    log = CappedLog(AttemptFiles(Path(request.directory)).rank_log(request.rank))
    os.set_blocking(output_end, False)
    ended = _watch(pid, control, output_end, log)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, wait_status = os.waitpid(pid, 0)
    leftovers = end_descendants(END_DEADLINE_S)
    _drain(output_end, log)
    log.close()
    _say(reply, {"status": os.waitstatus_to_exitcode(wait_status), "leftovers": leftovers})


def _watch(pid: int, control: int, output: int, log: CappedLog) -> bool:
    """Copy the rank's output until it ends (True) or has to be ended (False)."""
    ended = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector:
        for descriptor in (ended, control, output):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if output in ready and not _drain(output, log):
                selector.unregister(output)
            if control in ready or ended in ready:
                os.close(ended)
                return ended in ready


def _drain(output: int, log: CappedLog) -> bool:
    """Copy what can be read now. False at the end of the output."""
    while True:
        try:
            content = os.read(output, _READ_BYTES)
        except BlockingIOError:
            return True
        if not content:
            return False
        log.write(content)


def _say(descriptor: int, message: dict[str, int]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def _become_rank(request: RankRequest, run_rank: RunRank, output: int, close: Iterable[int], keeper_pid: int) -> None:
    """Turn this fresh fork into the rank; never returns."""
    status = 1
    try:
        os.setsid()
        die_with_parent(keeper_pid, signal.SIGKILL)
        for descriptor in close:
            os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(rank_environment(request))
        status = run_rank(Path(request.directory))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # no exit handler of a library that the template imported may run here
        os._exit(status)


def rank_environment(request: RankRequest) -> dict[str, str]:
    """torchrun's variables, the attempt's marker and what the request adds."""
    return {
        "RANK": str(request.rank),
        "LOCAL_RANK": str(request.local_rank),
        "WORLD_SIZE": str(request.world_size),
        "MASTER_ADDR": request.master_addr,
        "MASTER_PORT": str(request.master_port),
        ATTEMPT_VARIABLE: request.token,
        **request.environment,
    }
