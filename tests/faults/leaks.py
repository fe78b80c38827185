"""What must be left after a fault: nothing. A session's processes are told by their TMPDIR, which reaches ranks."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from orchestrator.contract.record import SweepState
from orchestrator.placement.processes import TEMPLATE_VARIABLE, find_marked
from orchestrator.sweep.ledger import list_sweeps

SESSION_VARIABLE = "TMPDIR"
GONE_DEADLINE_S = 20.0

_RAY_LEFT = """
import json, sys
import ray
from ray.util import placement_group_table
ray.init(address=sys.argv[1], namespace="brimful", log_to_driver=False, configure_logging=False)
groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
total, free = ray.cluster_resources(), ray.available_resources()
held = {k: v - free.get(k, 0.0) for k, v in total.items() if k in ("CPU", "GPU") and v != free.get(k, 0.0)}
print(json.dumps({"placement groups": len(groups), "held": held}))
"""


def session_processes() -> list[psutil.Process]:
    """Every process that came from this test session, the session itself left out."""
    found = find_marked(SESSION_VARIABLE, os.environ[SESSION_VARIABLE])
    return [process for process in found if process.pid != os.getpid()]


def ranks() -> list[psutil.Process]:
    """Every process of a trial of this test session."""
    return ranks_among(session_processes())


def ranks_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that came from a template: all that carry its mark but itself, the oldest of them; the youngest last.

    Ranks are forks, so that `/proc` shows the environment that their template began with, not their attempt's.
    """
    by_template: dict[str, list[psutil.Process]] = {}
    for process in processes:
        if (mark := _environment(process).get(TEMPLATE_VARIABLE)) is not None:
            by_template.setdefault(mark, []).append(process)
    forks = [each for same in by_template.values() for each in sorted(same, key=_age)[1:]]
    return sorted(forks, key=_age)


def await_gone(processes: Callable[[], list[psutil.Process]]) -> None:
    """Wait for `processes` to be empty; fail with their command lines when they stay."""
    deadline_s = time.monotonic() + GONE_DEADLINE_S
    while left := processes():
        assert time.monotonic() < deadline_s, f"still there: {[_words(process) for process in left]}"
        time.sleep(0.1)


def assert_home_clean(home: Path) -> None:
    """No driver, no lock, no trial, MLflow run or Optuna trial of `home` is still running."""
    for ledger in list_sweeps(home):
        assert not ledger.is_driven(), f"{ledger.name} is still driven"
        if ledger.read_sweep().state is SweepState.RUNNING:
            continue  # its driver was killed: what it left is for the resume to clean up
        running = [record.trial for record in ledger.read_trials() if record.running is not None]
        assert running == [], f"trials {running} of {ledger.name} have no end"
        study = ledger.folder / "study.db"
        if study.exists():
            assert _count(study, "SELECT COUNT(*) FROM trials WHERE state = 'RUNNING'") == 0
    store = home / "mlflow.db"
    if store.exists():
        assert _count(store, "SELECT COUNT(*) FROM runs WHERE status = 'RUNNING'") == 0


def assert_ray_clean(address: str) -> None:
    """The cluster at `address` holds no placement group and all of its devices are free."""
    deadline_s = time.monotonic() + GONE_DEADLINE_S
    clean = {"placement groups": 0, "held": {}}
    while (left := _ray_left(address)) != clean:
        assert time.monotonic() < deadline_s, f"the cluster still holds {left}"


def _ray_left(address: str) -> dict[str, object]:
    run = subprocess.run(
        [sys.executable, "-c", _RAY_LEFT, address], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    # Ray may say something of its own, such as that a node has died
    line = next(line for line in run.stdout.splitlines() if line.startswith('{"placement groups"'))
    left: dict[str, object] = json.loads(line)
    return left


def _count(database: Path, query: str) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        (count,) = connection.execute(query).fetchone()
    return int(count)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _age(process: psutil.Process) -> tuple[float, int]:
    """Clock ticks are coarse: of equals the larger number is taken to be the younger."""
    return process.create_time(), process.pid


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid} (gone)"
