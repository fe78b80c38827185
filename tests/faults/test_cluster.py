"""What a sweep on several Ray nodes makes of nodes, heads and networks that go away; no rank trains."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from pools.conformance import STUB, Home, begun, config, processes_of, run, until
from pools.rig import RayRig

from faults import leaks
from faults.small_sweep import ends, run_small
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import LostNode, Ok, OomHost
from orchestrator.contract.record import SweepState, TrialRecord
from orchestrator.contract.units import GIB
from orchestrator.sweep.ledger import Ledger

pytestmark = pytest.mark.ray
Figure = Callable[[str, str], None]


@pytest.fixture(scope="module")
def rig(ray_token: None, tests_importable: None) -> Iterator[RayRig]:
    """A head with two slots, to which tests add nodes that they lose again."""
    rig = RayRig()
    try:
        rig.head(cpus=2)
        yield rig
        leaks.assert_ray_clean(rig.address)
    finally:
        rig.close()


def attempt_on(ledger: Ledger, raylet: psutil.Process) -> tuple[int, AttemptFiles] | None:
    """The trial that trains below `raylet`, and the files of its attempt; None before it does."""
    for record in ledger.read_trials():
        last = record.running
        if last is not None:
            files = ledger.attempt(record.trial, last.attempt)
            if files.events.exists() and any(writes_in(each, files) for each in raylet.children(recursive=True)):
                return record.trial, files
    return None


def writes_in(process: psutil.Process, files: AttemptFiles) -> bool:
    """Whether `process` is a rank of this attempt: its output goes to the attempt's folder."""
    try:
        return any(Path(file.path).parent == files.directory for file in process.open_files())
    except psutil.Error:
        return False


def lost_and_repeated(records: list[TrialRecord], lost: int) -> TrialRecord:
    """All trials went well at once, but the one that was lost, which did the second time."""
    for record in records:
        assert ends(record) == (["lost_node", "ok"] if record.trial == lost else ["ok"]), record.trial
    return records[lost]


@pytest.mark.fault("C1", "B14")
def test_a_trial_of_a_killed_node_is_repeated_elsewhere_and_the_others_go_on(
    rig: RayRig, tmp_path: Path, figure: Figure
) -> None:
    node = rig.node(cpus=1)
    raylet, ledger = rig.raylet(node), Ledger(tmp_path, "sweep")
    struck: list[tuple[int, float]] = []

    def strike() -> None:
        found = attempt_on(ledger, raylet) if not struck else None
        if found is not None:
            rig.kill_node(node)
            struck.append((found[0], time.time()))

    plan = {f"{trial:04d}/attempt-1": "sleep:4" for trial in range(3)}
    sweep, _ = run_small(rig.address, tmp_path, 5, plan, strike)
    ((trial, killed_s),) = struck
    assert (sweep.state, sweep.exit_code) == (SweepState.FINISHED, 0)
    record = lost_and_repeated(ledger.read_trials(), trial)
    first, second = record.attempts
    assert isinstance(first.outcome, LostNode)
    assert first.ended_s is not None
    assert first.node != second.node
    figure("killed to detected", f"{first.ended_s - killed_s:.1f} s")
    figure("killed to launched again", f"{second.dispatched_s - killed_s:.1f} s")
    assert second.dispatched_s - killed_s < 60.0
    leaks.assert_home_clean(tmp_path)


@pytest.mark.fault("C2")
def test_a_frozen_node_is_given_up_and_gives_no_second_result_when_it_thaws(
    rig: RayRig, tmp_path: Path, figure: Figure
) -> None:
    node = rig.node(cpus=1)
    raylet, ledger = rig.raylet(node), Ledger(tmp_path, "sweep")
    struck: list[tuple[int, float, AttemptFiles]] = []

    def strike() -> None:
        found = attempt_on(ledger, raylet) if not struck else None
        if found is not None:
            raylet.suspend()
            struck.append((found[0], time.time(), found[1]))

    plan = {f"{trial:04d}/attempt-1": "sleep:8" for trial in range(3)}
    try:
        run_small(rig.address, tmp_path, 3, plan, strike)
        ((trial, frozen_s, files),) = struck
        # its rank, which nobody could reach, goes on and reports
        until(lambda: files.read_report(0) is not None)
        late = files.read_report(0)
    finally:
        raylet.resume()
    assert late is not None
    assert isinstance(late.outcome, Ok)
    record = lost_and_repeated(ledger.read_trials(), trial)
    first, second = record.attempts
    assert isinstance(first.outcome, LostNode)
    assert first.ended_s is not None
    assert first.ended_s < late.time_s
    assert AttemptFiles(files.directory).read_outcome() == first.outcome
    assert first.token != second.token
    figure("frozen to given up, fast health checks", f"{first.ended_s - frozen_s:.1f} s")
    until(lambda: not raylet.is_running(), deadline_s=60.0)
    before = ledger.read_trials()
    run_small(rig.address, tmp_path, 3, plan)
    assert ledger.read_trials() == before
    leaks.assert_home_clean(tmp_path)


@pytest.mark.fault("C6")
def test_killing_the_driver_gives_everything_back(
    rig: RayRig, tmp_path: Path, tests_importable: None, figure: Figure
) -> None:
    launch = Home(tmp_path).attempt({"0": "grandchildren"}, config(2))
    arguments = [rig.address, STUB, launch.token, str(launch.directory)]
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, *arguments])
    try:
        until(lambda: begun(launch))
        assert len(processes_of(launch)) >= 2
    finally:
        driver.kill()
        driver.wait()
    killed_s = time.monotonic()
    until(lambda: processes_of(launch) == [], deadline_s=20.0)
    leaks.assert_ray_clean(rig.address)
    figure("killed to devices and placement groups back", f"{time.monotonic() - killed_s:.1f} s")
    with closing(RayPool(rig.address, template_module=STUB)) as pool:
        assert isinstance(run(pool, Home(tmp_path).attempt(of=config(2))), Ok)


_DRIVER = """
import sys
from pathlib import Path
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.sweep.ports import Launch
pool = RayPool(sys.argv[1], template_module=sys.argv[2])
directory = Path(sys.argv[4])
pool.launch(Launch(sys.argv[3], directory, AttemptFiles(directory).read_config()))
pool.wait(600)
"""


@pytest.mark.fault("B3")
def test_rays_memory_monitor_is_an_out_of_memory_of_the_host_and_not_tried_again(
    ray_token: None, tests_importable: None, tmp_path: Path
) -> None:
    """Ray itself would try a task for ever that it ended for memory, unless told not to."""
    memory = psutil.virtual_memory()
    threshold = (memory.total - memory.available + 1.5 * GIB) / memory.total
    rig = RayRig({"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "250"})
    try:
        rig.head(cpus=1)
        _, ledger = run_small(rig.address, tmp_path, 2, {"0000/attempt-1": "hog"})
    finally:
        rig.close()
    hog, other = ledger.read_trials()
    assert [ends(hog), ends(other)] == [["oom_host"], ["ok"]]
    assert isinstance(hog.outcome, OomHost)
    assert "memory monitor" in hog.outcome.evidence
    assert hog.outcome.phase == "backward"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.fault("C12")
def test_ranks_that_are_killed_at_random_never_stop_a_sweep(rig: RayRig, tmp_path: Path, figure: Figure) -> None:
    """A kill every 5 s, some of them twice on one trial: 40 trials of 4 s on two slots take a minute and a half."""
    ledger, dice = Ledger(tmp_path, "sweep"), random.Random(0)
    killed: list[int] = []
    next_s = time.monotonic() + 5.0

    def strike() -> None:
        nonlocal next_s
        if time.monotonic() < next_s:
            return
        running = [
            ledger.attempt(record.trial, record.running.attempt) for record in ledger.read_trials() if record.running
        ]
        ranks = [each for each in psutil.process_iter() for files in running if writes_in(each, files)]
        if ranks:
            victim = dice.choice(ranks)
            victim.kill()
            killed.append(victim.pid)
            next_s = time.monotonic() + 5.0

    sweep, _ = run_small(rig.address, tmp_path, 40, {"*": "sleep:4"}, strike)
    records = ledger.read_trials()
    assert sweep.state is SweepState.FINISHED
    assert [record.trial for record in records] == list(range(40))
    told = [ends(record) for record in records]
    assert all(each in (["ok"], ["crashed", "ok"], ["crashed", "crashed"]) for each in told), told
    assert len(killed) >= 10
    figure("ranks killed", str(len(killed)))
    figure("trials with a result", f"{sum(each[-1] == 'ok' for each in told)} of 40")
    leaks.assert_home_clean(tmp_path)
