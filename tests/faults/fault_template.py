"""The real template, whose ranks suffer the fault that `fault.json` in the attempt's folder names.

Libraries are patched in the one fork; Brimful's own code runs as it is. The fault strikes in the second optimizer
step, before which `struck` is written with the time.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.contract.handoff import AttemptFiles
from orchestrator.trial.template import serve

STRIKES_IN_STEP = 2


def allocate_in_torch() -> None:
    import torch

    torch.empty(2**46, dtype=torch.uint8)


def empty_memory_error() -> None:
    raise MemoryError


def user_error() -> None:
    raise ValueError("injected failure")


def cuda_out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 1.20 GiB is"
        " free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but"
        " unallocated."
    )


def starve_gloo() -> None:
    """Fill the memory of rank 1 to its limit; then every rank opens another gloo group, which needs a thread."""
    import torch

    held = []
    if os.environ["RANK"] == "1":
        for size_bytes in (16 * 2**20, 2**20, 2**18):
            try:
                while True:
                    held.append(torch.empty(size_bytes, dtype=torch.uint8))
            except RuntimeError:
                continue
    torch.distributed.new_group(backend="gloo")


def leave_grandchildren() -> None:
    subprocess.Popen(["setsid", "sleep", "3601"])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3602)
        os._exit(0)


def tear_result() -> None:
    rank = int(os.environ["RANK"])
    AttemptFiles(Path(os.environ["FAULT_DIRECTORY"])).rank_report(rank).write_text('{"rank": 0, "time_s": 17')
    os._exit(0)


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": user_error,
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sigsegv": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "exit_0": lambda: os._exit(0),
    "exit_1": lambda: sys.exit(1),
    "torn_result": tear_result,
    "torch_allocator": allocate_in_torch,
    "empty_memory_error": empty_memory_error,
    "cuda_oom": cuda_out_of_memory,
    "starved_gloo": starve_gloo,
    "grandchildren": leave_grandchildren,
}


def patch_step(directory: Path, strike: Callable[[], Any]) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    original, calls = DeepSpeedEngine.step, 0

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == STRIKES_IN_STEP:
            (directory / "struck").write_text(str(time.time()))
            strike()
        return original(self, *arguments, **options)

    DeepSpeedEngine.step = step


def patch_loss(directory: Path) -> None:
    """The cross entropy of the second step is NaN."""
    import torch

    original, calls = torch.nn.functional.cross_entropy, 0

    def cross_entropy(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = original(*arguments, **options)
        if calls < STRIKES_IN_STEP:
            return loss
        (directory / "struck").write_text(str(time.time()))
        return loss * float("nan")

    torch.nn.functional.cross_entropy = cross_entropy


def run_rank(directory: Path) -> int:
    from orchestrator.trial import guard

    plan = directory / "fault.json"
    faults = json.loads(plan.read_text()) if plan.exists() else {}
    fault = faults.get(os.environ["RANK"])
    os.environ["FAULT_DIRECTORY"] = str(directory)
    if fault == "nan":
        patch_loss(directory)
    elif fault is not None:
        patch_step(directory, FAULTS[fault])
    return guard.run_rank(directory)


if __name__ == "__main__":
    serve(run_rank)
