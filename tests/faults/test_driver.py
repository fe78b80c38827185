"""The driver dies, is stopped, starves or meets another one: what was finished stays, what was running runs again."""

import dataclasses
import json
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from cli.brimful_command import Workplace, await_true, end

from faults import leaks
from faults.crash_session import PLACES, Sessions, Strike
from faults.sweeps import LOCAL, TWELVE, assert_kept, assert_whole, ended_files, new_place, records, session_at
from orchestrator.contract.record import SweepState
from orchestrator.sweep.ledger import Ledger

Figure = Callable[[str, str], None]
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
GONE_WITHIN_S = 60.0
"""Four times what is promised of orphans (15 s): a loaded machine must not fail the test."""


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    with closing(Sessions()) as sessions:
        yield sessions


def await_ended(place: Workplace, name: str, ended: int, driver: "subprocess.Popen[str]") -> None:
    await_true(lambda: len(ended_files(place.folder / "home", name)) >= ended, driver)


def seconds_until_gone(begun_s: float) -> float:
    leaks.await_gone(leaks.ranks)
    return time.monotonic() - begun_s


@pytest.mark.fault("A1", "E7")
def test_a_killed_driver_runs_again_only_what_was_running(prepared: Workplace, tmp_path: Path, figure: Figure) -> None:
    place = new_place(tmp_path / "work", prepared, "sleep:0.3")
    home = place.folder / "home"
    command = ("run", place.spec("sweep", ranks=TWELVE), *LOCAL, "--trials", "12")
    driver = place.start(*command)
    await_ended(place, "sweep", 4, driver)
    driver.kill()
    killed_s = time.monotonic()
    driver.communicate()
    figure("orphans gone", f"{seconds_until_gone(killed_s):.1f} s")
    assert time.monotonic() - killed_s < GONE_WITHIN_S
    seen, running = ended_files(home), [each.trial for each in records(home) if each.running is not None]
    resumed_s = time.time()
    resumed = place.run("resume", "sweep")
    assert resumed.returncode == 0, resumed.stderr
    assert_kept(seen)
    trials = assert_whole(home, 12)
    again = [each.trial for each in trials if len(each.attempts) > 1]
    assert again == running
    assert len(again) <= 2
    first_s = min(a.dispatched_s for each in trials for a in each.attempts if a.dispatched_s > resumed_s)
    figure("trials run again", f"{len(again)}")
    figure("resume to its first trial", f"{first_s - resumed_s:.1f} s")
    leaks.assert_home_clean(home)


@pytest.mark.fault("A2")
@pytest.mark.parametrize("place", PLACES)
def test_every_crash_point_keeps_one_result_a_trial(
    sessions: Sessions, tmp_path: Path, figure: Figure, place: str
) -> None:
    """Ten places in the loop; the crash strikes in the middle of twelve trials, or at the sweep's only such place."""
    strike = Strike(place, 1 if "last_log" in place else 5)
    assert sessions.run(session_at(tmp_path, strike=strike)) == [-signal.SIGKILL]
    seen = ended_files(tmp_path)
    assert sessions.run(session_at(tmp_path)) == [0]
    assert_kept(seen)
    trials = assert_whole(tmp_path, 12)
    again = sum(len(each.attempts) > 1 for each in trials)
    assert again <= 2
    if place in ("after_end_record", "before_tell", "after_tell", "before_last_log", "after_last_log"):
        assert len(seen) >= 5 if "last_log" not in place else len(seen) == 12
    figure("trials run again", str(again))
    leaks.assert_home_clean(tmp_path)


def kill_at_every_write(sessions: Sessions, folder: Path, step: int, top: int) -> int:
    """Kill at each `step`-th call that changes the disk, until a session comes through; how many crashes there were."""
    crashes = 0
    for count in range(1, 10_000, step):
        home = folder / str(count)
        (code,) = sessions.run(session_at(home, trials=3, top=top, strike=Strike("disk", count)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        crashes += 1
        seen = ended_files(home)
        assert sessions.run(session_at(home, trials=3, top=top)) == [0]
        assert_kept_results(seen, home)
        assert_whole(home, 3)
        leaks.assert_home_clean(home)
    return crashes


def assert_kept_results(seen: dict[Path, bytes], home: Path) -> None:
    """Every attempt that had ended is among the attempts of now; a confirmation adds some."""
    after = {attempt.token: attempt for each in records(home) for attempt in each.attempts}
    for content in seen.values():
        for attempt in json.loads(content)["attempts"]:
            if attempt["outcome"] is not None:
                assert after[attempt["token"]].model_dump(mode="json") == attempt


@pytest.mark.fault("A2")
def test_a_crash_at_a_write(sessions: Sessions, tmp_path: Path, figure: Figure) -> None:
    figure("crashes at writes", str(kill_at_every_write(sessions, tmp_path, step=11, top=0)))


@pytest.mark.slow
@pytest.mark.fault("A2")
def test_a_crash_at_every_write(sessions: Sessions, tmp_path: Path, figure: Figure) -> None:
    figure("crashes at writes", str(kill_at_every_write(sessions, tmp_path, step=1, top=2)))


@pytest.mark.fault("A3")
def test_resume_may_be_killed_again_and_again(sessions: Sessions, tmp_path: Path, figure: Figure) -> None:
    seen: dict[Path, bytes] = {}
    for count in (40, 25, 30):
        assert sessions.run(session_at(tmp_path, strike=Strike("disk", count))) == [-signal.SIGKILL]
        assert_kept(seen)
        seen = ended_files(tmp_path)
    assert sessions.run(session_at(tmp_path)) == [0]
    assert_kept(seen)
    figure("trials after three kills", f"{len(assert_whole(tmp_path, 12))} of 12")
    assert sessions.run(session_at(tmp_path)) == [0]
    assert_whole(tmp_path, 12)
    leaks.assert_home_clean(tmp_path)


@pytest.mark.slow
@pytest.mark.fault("A3")
def test_a_resume_that_is_killed_twice_after_a_second(prepared: Workplace, tmp_path: Path) -> None:
    place = new_place(tmp_path / "work", prepared, "sleep:0.3")
    home = place.folder / "home"
    driver = place.start("run", place.spec("sweep", ranks=TWELVE), *LOCAL, "--trials", "12")
    await_ended(place, "sweep", 2, driver)
    end(driver, signal.SIGKILL)
    for more in (1, 2):
        seen = ended_files(home)
        driver = place.start("resume", "sweep")
        await_ended(place, "sweep", len(seen) + more, driver)
        end(driver, signal.SIGKILL)
        assert_kept(seen)
    assert place.run("resume", "sweep").returncode == 0
    assert_whole(home, 12)
    leaks.assert_home_clean(home)


@pytest.mark.fault("A4")
def test_sigterm_ends_in_time_and_the_same_command_goes_on(prepared: Workplace, tmp_path: Path, figure: Figure) -> None:
    """The rank that ignores SIGTERM is killed; 25 s is what Kubernetes' grace of 30 s leaves."""
    place = new_place(tmp_path / "work", prepared, "stubborn")
    command = ("run", place.spec("sweep"), *LOCAL)
    driver = place.start(*command)
    await_true(lambda: place.trains("sweep"), driver)
    asked_s = time.monotonic()
    code, stdout, stderr = end(driver, signal.SIGTERM)
    took_s = time.monotonic() - asked_s
    figure("SIGTERM to exit", f"{took_s:.1f} s")
    assert code == 143, stderr
    assert took_s < 25.0 * 3
    assert "Stopping" in stderr
    assert "brimful resume sweep" in stdout
    leaks.assert_home_clean(place.folder / "home")
    cancelled = [each for each in records(place.folder / "home") if each.outcome and each.outcome.kind == "cancelled"]
    assert cancelled
    finishing = dataclasses.replace(place, behaviour="ok").run(*command)
    assert finishing.returncode == 0, finishing.stderr
    assert_whole(place.folder / "home", 4)


@pytest.mark.fault("A4")
def test_sigterm_before_the_first_trial(prepared: Workplace, tmp_path: Path, figure: Figure) -> None:
    """While the model is looked at: nothing of that stays behind either."""
    place = new_place(tmp_path / "work", prepared, "ok")
    file = place.spec("sweep")
    file.write_text(file.read_text().replace("vocab_size: 320", "vocab_size: 321"))  # the prepared one does not hold
    driver = place.start("run", file, *LOCAL)
    await_true(lambda: bool(psutil.Process(driver.pid).children()), driver)
    asked_s = time.monotonic()
    code, _, stderr = end(driver, signal.SIGTERM)
    figure("SIGTERM to exit", f"{time.monotonic() - asked_s:.1f} s")
    assert code == 143, stderr
    assert "Traceback" not in stderr
    leaks.await_gone(lambda: [each for each in leaks.session_processes() if each.ppid() == 1])


@pytest.mark.fault("A5")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_at_once(
    prepared: Workplace, tmp_path: Path, figure: Figure, number: signal.Signals, code: int
) -> None:
    """The templates are frozen, so that the first signal waits for them. None of the MLflow runs is left RUNNING."""
    place = new_place(tmp_path / "work", prepared, "sleep:600")
    driver = place.start("run", place.spec("sweep"), "--pool", "local")
    await_true(lambda: place.trains("sweep") and tracked_runs(place) > 1, driver)
    for process in psutil.Process(driver.pid).children():
        process.suspend()
    driver.send_signal(number)
    assert driver.stderr is not None
    while "Stopping" not in driver.stderr.readline():
        pass
    asked_s = time.monotonic()
    code_found, _, stderr = end(driver, number)
    took_s = time.monotonic() - asked_s
    figure(f"second {number.name} to exit", f"{took_s:.1f} s")
    assert code_found == code, stderr
    assert took_s < 5.0 * 4
    assert "Traceback" not in stderr
    home = place.folder / "home"
    assert Ledger(home, "sweep").read_sweep().state is SweepState.STOPPED
    leaks.assert_home_clean(home)
    finishing = dataclasses.replace(place, behaviour="ok").run("resume", "sweep")
    assert finishing.returncode == 0, finishing.stderr
    assert_whole(home, 4)
    leaks.assert_home_clean(home)


def tracked_runs(place: Workplace) -> int:
    journal = place.folder / "home" / "sweeps" / "sweep" / "mlflow.jsonl"
    return journal.read_text().count('"run_id"') if journal.exists() else 0


def race(sessions: Sessions, home: Path, offset_s: float) -> str:
    """Two drivers of one sweep, one later by `offset_s`; returns what the one without the lock said."""
    pair = [
        session_at(home, trials=2, trial_s=1.5, mark=mark, delay_s=delay_s)
        for mark, delay_s in (("first", 0.0), ("second", offset_s))
    ]
    codes = sessions.run(*pair)
    assert sorted(codes) == [0, 2], codes
    assert_whole(home, 2)
    assert all(len(each.attempts) == 1 for each in records(home))
    return pair[codes.index(2)].said


@pytest.mark.fault("A8", "E2")
def test_of_two_drivers_one_wins(sessions: Sessions, tmp_path: Path) -> None:
    said = race(sessions, tmp_path, offset_s=0.05)
    holder = Ledger(tmp_path, "sweep").holder()
    assert holder is not None
    assert f"process {holder.pid} on {holder.host}" in said


@pytest.mark.slow
@pytest.mark.fault("A8")
def test_of_two_drivers_one_wins_twenty_times(sessions: Sessions, tmp_path: Path, figure: Figure) -> None:
    dice = random.Random(8)
    for number in range(20):
        said = race(sessions, tmp_path / str(number), dice.uniform(0.0, 0.2))
        holder = Ledger(tmp_path / str(number), "sweep").holder()
        assert holder is not None
        assert f"process {holder.pid} on" in said
    figure("races with one winner and no trial twice", "20 of 20")


@pytest.mark.fault("A8", "E2")
def test_the_lock_of_a_dead_driver_is_free(sessions: Sessions, tmp_path: Path, figure: Figure) -> None:
    """E2: it is the kernel's lock, not a file's age: nobody waits for it to grow stale."""
    assert sessions.run(session_at(tmp_path, strike=Strike("after_launch", 2))) == [-signal.SIGKILL]
    begun_s = time.monotonic()
    with Ledger(tmp_path, "sweep").lock():
        figure("killed holder to next holder", f"{time.monotonic() - begun_s:.2f} s")
    assert sessions.run(session_at(tmp_path)) == [0]
    assert_whole(tmp_path, 12)


def driven_with_a_gap(prepared: Workplace, folder: Path, downtime_s: float) -> float:
    """Kill the driver in the midst of 4 trials of a second and start it again; returns the wall time, in seconds."""
    place = new_place(folder, prepared, "sleep:1")
    command = ("run", place.spec("sweep"), *LOCAL)
    begun_s = time.monotonic()
    driver = place.start(*command)
    await_true(lambda: place.trains("sweep"), driver)
    end(driver, signal.SIGKILL)
    time.sleep(downtime_s)  # the fault itself
    again = place.run(*command)
    assert again.returncode == 0, again.stderr
    took_s = time.monotonic() - begun_s
    assert_whole(place.folder / "home", 4)
    leaks.assert_home_clean(place.folder / "home")
    return took_s


@pytest.mark.slow
@pytest.mark.fault("A9")
def test_a_drivers_downtime_costs_itself_and_the_trials_that_ran(
    prepared: Workplace, tmp_path: Path, figure: Figure
) -> None:
    """Determined's 0, 20 and 60 s, scaled down: trials are run again, never waited for."""
    place = new_place(tmp_path / "baseline", prepared, "sleep:1")
    begun_s = time.monotonic()
    assert place.run("run", place.spec("sweep"), *LOCAL).returncode == 0
    baseline_s = time.monotonic() - begun_s
    for downtime_s in (0.0, 3.0, 9.0):
        took_s = driven_with_a_gap(prepared, tmp_path / f"down-{downtime_s:.0f}", downtime_s)
        over_s = took_s - baseline_s - downtime_s
        figure(f"over baseline after {downtime_s:.0f} s away", f"{over_s:.1f} s")
        assert over_s < 30.0 + baseline_s


@pytest.mark.slow
@pytest.mark.fault("A10")
def test_a_driver_without_memory_leaves_a_readable_state(prepared: Workplace, tmp_path: Path) -> None:
    """RLIMIT_AS falls below what the driver has while a trial runs; the next allocation of any size fails."""
    place = new_place(tmp_path / "work", prepared, "sleep:0.3")
    home = place.folder / "home"
    driver = place.start("run", place.spec("sweep", ranks=TWELVE), *LOCAL, "--trials", "12")
    await_ended(place, "sweep", 2, driver)
    resource.prlimit(driver.pid, resource.RLIMIT_AS, (2**20, resource.RLIM_INFINITY))
    driver.communicate(timeout=120)
    assert driver.returncode != 0
    seen = ended_files(home)
    assert len(seen) >= 2
    resumed = place.run("resume", "sweep")
    assert resumed.returncode == 0, resumed.stderr
    assert_kept(seen)
    assert_whole(home, 12)
    leaks.assert_home_clean(home)


@pytest.mark.slow
@pytest.mark.fault("A10")
@pytest.mark.skipif(not MEMORY_CGROUP.is_dir(), reason="needs the memory controller of cgroup v1, and root")
def test_a_driver_in_a_small_cgroup(prepared: Workplace, tmp_path: Path, figure: Figure) -> None:
    """The kernel kills the driver at 60 MiB: fewer than it needs, so that it happens whatever the version of Python."""
    group = MEMORY_CGROUP / f"brimful-test-{tmp_path.name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(60 * 2**20))
        place = new_place(tmp_path / "work", prepared, "sleep:0.3")
        home = place.folder / "home"
        driver = place.start("run", place.spec("sweep", ranks=TWELVE), *LOCAL, "--trials", "12")
        await_ended(place, "sweep", 2, driver)
        (group / "memory.move_charge_at_immigrate").write_text("3")
        (group / "cgroup.procs").write_text(str(driver.pid))
        driver.communicate(timeout=120)
        figure("driver ended by", f"signal {-driver.returncode}" if driver.returncode < 0 else f"{driver.returncode}")
        assert driver.returncode != 0
    finally:
        leaks.await_gone(leaks.ranks)
        group.rmdir()
    seen = ended_files(home)
    assert place.run("resume", "sweep").returncode == 0
    assert_kept(seen)
    assert_whole(home, 12)
    leaks.assert_home_clean(home)
