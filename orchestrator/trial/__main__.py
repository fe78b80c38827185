"""`python -m orchestrator.trial DIR` runs the trial in a folder by hand, alone or under torchrun."""

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from orchestrator.contract.errors import EXIT_FAILED, EXIT_USAGE, StateError
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Ok, Outcome, OverLimit
from orchestrator.contract.units import format_bytes
from orchestrator.trial.preload import preload, restart_with_environment


def main() -> int:
    """Run this process's rank, then say what became of the trial. Exit codes: 0 ran, 1 did not run, 2 usage."""
    directory = _arguments().directory.absolute()
    files = AttemptFiles(directory)
    try:
        config = files.read_config()
    except StateError as error:
        return _refuse(str(error))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.world_size:
        return _refuse(
            f"the trial in {directory} has {config.world_size} ranks, this launch has {world_size};"
            f" run: torchrun --nproc-per-node {config.world_size} -m orchestrator.trial {directory}"
        )
    restart_with_environment()
    rank = int(os.environ.get("RANK", "0"))
    _forget_last_run(files, rank)
    status = _run_fork(directory)
    if status < 0:
        print(f"rank {rank} was ended by {signal.Signals(-status).name}", file=sys.stderr)
        return EXIT_FAILED
    outcome = _settle(files, rank)
    if outcome is not None:
        print(summary(outcome))
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.trial",
        description="Run the trial that DIR/config.json describes and write DIR/outcome.json. A trial of several ranks"
        " runs under torchrun.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the attempt's folder")
    return parser.parse_args()


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _forget_last_run(files: AttemptFiles, rank: int) -> None:
    files.rank_report(rank).unlink(missing_ok=True)
    if rank == 0:
        files.events.unlink(missing_ok=True)
        files.outcome.unlink(missing_ok=True)


def _run_fork(directory: Path) -> int:
    """Run the rank in a fork, as a pool does, so that memory is counted from the same start."""
    preload()
    guard = importlib.import_module("orchestrator.trial.guard")
    descendants = importlib.import_module("orchestrator.trial.descendants")
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = EXIT_FAILED
        try:
            descendants.die_with_parent(parent_pid, signal.SIGKILL)
            status = guard.run_rank(directory)
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _settle(files: AttemptFiles, rank: int) -> Outcome | None:
    """Store the outcome where this rank decides it: rank 0 for a trial that ran, the first cause for a failed one."""
    report = files.read_report(rank)
    if report is None:
        return None
    if isinstance(report.outcome, Ok | OverLimit):
        if rank == 0:
            files.write_outcome(report.outcome)
        return report.outcome if rank == 0 else None
    if not report.is_consequence or files.read_outcome() is None:
        files.write_outcome(report.outcome)
    return report.outcome


def summary(outcome: Outcome) -> str:
    """What became of the trial, for a reader."""
    if isinstance(outcome, Ok | OverLimit):
        measured = outcome.measurement
        limit = f" of {format_bytes(measured.limit_bytes)}" if measured.limit_bytes else ""
        return (
            f"{outcome.kind}: {measured.tokens_per_second:.0f} tokens/s"
            f" (95 % between {measured.tokens_per_second_low:.0f} and {measured.tokens_per_second_high:.0f},"
            f" {measured.measured_steps} steps), peak {format_bytes(measured.peak_memory_bytes)}{limit},"
            f" resident {format_bytes(measured.peak_resident_bytes)}, padding {measured.padding_fraction:.0%}"
        )
    fields = outcome.model_dump(mode="json", exclude={"kind", "evidence"}, exclude_none=True)
    return f"{outcome.kind}: " + ", ".join(f"{name} {value}" for name, value in fields.items())


if __name__ == "__main__":
    sys.exit(main())
