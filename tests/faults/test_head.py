"""The head of a Ray cluster goes away, and comes back or does not; no rank trains."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pools.conformance import until
from pools.rig import NODE_VARIABLE, RayRig

from faults import leaks
from faults.small_sweep import Plan, ends
from orchestrator.contract.errors import ClusterUnreachableError
from orchestrator.placement.processes import find_marked
from orchestrator.sweep.ledger import Ledger

pytestmark = [pytest.mark.ray, pytest.mark.slow]
Figure = Callable[[str, str], None]


def start(address: str, home: Path, trials: int, plan: Plan) -> "subprocess.Popen[str]":
    """A driver in a process of its own: Ray's client ends the process that has lost its head for a minute."""
    command = [sys.executable, "-m", "faults.small_sweep", address, str(home), str(trials), json.dumps(plan)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def kill_head(head: str) -> None:
    """`kill -9` the head's server and raylet."""
    for process in find_marked(NODE_VARIABLE, head):
        if process.name() in ("gcs_server", "raylet"):
            process.kill()


def runs(ledger: Ledger, trial: int) -> bool:
    """Whether the trial's ranks are in their forward pass."""
    records = {record.trial: record for record in ledger.read_trials()} if ledger.exists() else {}
    record = records.get(trial)
    if record is None or record.running is None:
        return False
    events = ledger.attempt(trial, record.running.attempt).read_events()
    return any(event.phase == "forward" for event in events)


@pytest.mark.fault("C8")
def test_a_head_that_is_gone_ends_the_driver_and_another_cluster_goes_on(
    ray_token: None, tests_importable: None, tmp_path: Path, figure: Figure
) -> None:
    ledger = Ledger(tmp_path, "sweep")
    rig = RayRig()
    try:
        head = rig.head(cpus=1)
        rig.node(cpus=1)
        driver = start(rig.address, tmp_path, 12, {"0005/attempt-1": "sleep:600", "0006/attempt-1": "sleep:600"})
        until(lambda: runs(ledger, 5) and runs(ledger, 6))
        ended = {record.trial: record for record in ledger.read_trials() if record.outcome is not None}
        kill_head(head)
        killed_s = time.monotonic()
        _, said = driver.communicate(timeout=120)
        figure("head killed to the driver's end", f"{time.monotonic() - killed_s:.1f} s")
    finally:
        rig.close()
    assert driver.returncode == ClusterUnreachableError.exit_code, said
    assert f"the Ray cluster at {rig.address} has not answered for" in said
    assert "resume" in said

    other = RayRig()
    try:
        other.head(cpus=2)
        again = start(other.address, tmp_path, 12, {})
        _, said = again.communicate(timeout=120)
        assert again.returncode == 0, said
        leaks.assert_ray_clean(other.address)
    finally:
        other.close()
    records = ledger.read_trials()
    assert [record.trial for record in records] == list(range(12))
    for record in records:
        assert record.outcome is not None
        assert record.outcome.kind == "ok"
        assert record == ended.get(record.trial, record)
    assert ends(records[5]) == ends(records[6]) == ["cancelled", "ok"]
    leaks.assert_home_clean(tmp_path)


@pytest.mark.fault("C7")
def test_a_head_that_comes_back_with_its_state_costs_nothing(
    ray_token: None, tests_importable: None, tmp_path: Path, figure: Figure
) -> None:
    """Ray's fault tolerance of the head without Redis (RocksDB) is an alpha.

    `ray start --head` refuses a host on which other nodes of the cluster run, so the head's server is started again by
    the command line that it had.
    """
    ledger = Ledger(tmp_path, "sweep")
    store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "gcs")}
    rig = RayRig(store, health_checks={})
    driver = again = None
    try:
        head = rig.head(cpus=0)
        rig.node(cpus=1)
        rig.node(cpus=1)
        driver = start(rig.address, tmp_path, 6, {"0001/attempt-1": "sleep:8", "0002/attempt-1": "sleep:25"})
        until(lambda: runs(ledger, 1) and runs(ledger, 2))
        (server,) = [each for each in find_marked(NODE_VARIABLE, head) if each.name() == "gcs_server"]
        command, environment = server.cmdline(), server.environ()
        server.kill()
        killed_s = time.time()
        # trial 1 ends while there is no head
        until(lambda: ledger.attempt(1, 1).outcome.exists())
        assert driver.poll() is None
        quiet = subprocess.DEVNULL
        again = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
        back_s = time.time()
        figure("without a head", f"{back_s - killed_s:.1f} s")
        _, said = driver.communicate(timeout=150)
        assert driver.returncode == 0, said
        assert [ends(record) for record in ledger.read_trials()] == [["ok"]] * 6
        launched_s = [each.dispatched_s for record in ledger.read_trials() for each in record.attempts]
        figure("head back to the next launch", f"{min(t for t in launched_s if t > killed_s) - back_s:.1f} s")
    finally:
        rig.close()
        for process in (driver, again):
            if process is not None:
                process.kill()
                process.wait()
    leaks.assert_home_clean(tmp_path)
