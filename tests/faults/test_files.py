"""The disk fills up, refuses or breaks: one clear line, whole files, and the same command goes on afterwards."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from cli.brimful_command import Workplace, await_true

from faults import leaks
from faults.crash_session import Sessions, Strike
from faults.sweeps import LOCAL, TWELVE, assert_kept, assert_whole, ended_files, new_place, session_at
from orchestrator.contract.errors import UsageError
from orchestrator.sweep import disk


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    with closing(Sessions()) as sessions:
        yield sessions


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own at `folder`."""
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )
    if mount.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_bytes(file: Path) -> None:
    """Until nothing more goes in."""
    with file.open("wb", buffering=0) as stream:
        for size_bytes in (2**20, 2**12):
            try:
                while True:
                    stream.write(b"x" * size_bytes)
            except OSError:
                continue


@pytest.mark.fault("F1", "F4")
@pytest.mark.parametrize("full_of", ["bytes", "files"])
def test_a_disk_that_fills_up_ends_the_sweep_which_goes_on_when_there_is_room(
    prepared: Workplace, tmp_path: Path, full_of: str
) -> None:
    """24 MiB, since the report alone takes 5: a smaller disk is refused at the start."""
    with small_disk(tmp_path / "home", "size=24m,nr_inodes=400") as home:
        place = new_place(tmp_path / "work", prepared, "sleep:0.3", home=home)
        driver = place.start("run", place.spec("sweep", ranks=TWELVE), *LOCAL, "--trials", "12")
        await_true(lambda: len(ended_files(home)) >= 2, driver)
        filler = home / "filler"
        if full_of == "bytes":
            fill_bytes(filler)
        else:
            filler.mkdir()
            try:
                for number in range(1000):
                    (filler / str(number)).touch()
            except OSError:
                pass
        _, stderr = driver.communicate(timeout=120)
        assert driver.returncode == 1, stderr
        assert "Traceback" not in stderr
        assert "unexpected" not in stderr
        assert "/home/sweeps/sweep" in stderr
        assert "free some space" in stderr
        seen = ended_files(home)
        assert len(seen) >= 2
        subprocess.run(["rm", "-r", str(filler)], check=True)
        resumed = place.run("resume", "sweep")
        assert resumed.returncode == 0, resumed.stderr
        assert_kept(seen)
        assert len(assert_trials(home)) == 12
        leaks.assert_home_clean(home)


def assert_trials(home: Path) -> dict[Path, bytes]:
    """Every trial that ended; a full disk may have ended one attempt or another as infra, which is retried."""
    ends = ended_files(home)
    assert all(b'"kind": "ok"' in content for content in ends.values())
    return ends


def refuse_at_every_write(sessions: Sessions, folder: Path, how: str, step: int) -> int:
    """Refuse each `step`-th call that changes the disk and all after it, until a session meets none."""
    refusals = 0
    for count in range(1, 10_000, step):
        home = folder / f"{how}-{count}"
        strike = Strike("disk", count, how, calls=10_000)
        session = session_at(home, trials=3, strike=strike)
        (code,) = sessions.run(session)
        if code == 0:
            break
        assert code == 1
        refusals += 1
        assert "cannot be written" in session.said
        seen = ended_files(home)  # raises for a torn record
        assert sessions.run(session_at(home, trials=3)) == [0]
        assert_kept(seen)
        assert_whole(home, 3)
        leaks.assert_home_clean(home)
    assert refusals > 0
    return refusals


@pytest.mark.fault("F3")
def test_a_refused_write_leaves_the_old_file_or_the_new_one(sessions: Sessions, tmp_path: Path) -> None:
    refuse_at_every_write(sessions, tmp_path, "ENOSPC", step=17)


@pytest.mark.slow
@pytest.mark.fault("F3")
@pytest.mark.parametrize("how", ["ENOSPC", "EIO"])
def test_every_refused_write_leaves_the_old_file_or_the_new_one(sessions: Sessions, tmp_path: Path, how: str) -> None:
    refuse_at_every_write(sessions, tmp_path, how, step=1)


@pytest.mark.fault("F5")
def test_a_read_only_home_is_refused(prepared: Workplace, tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", "size=24m") as home:
        place = new_place(tmp_path / "work", prepared, "ok", home=home)
        subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        run = place.run("run", place.spec("sweep"), *LOCAL)
        assert run.returncode in (1, 2)
        assert "Traceback" not in run.stderr
        assert "unexpected" not in run.stderr
        assert str(place.folder / "home") in run.stderr


@pytest.mark.fault("F9")
def test_a_disk_that_cannot_hold_the_sweep_is_refused(prepared: Workplace, tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", "size=8m") as home:
        place = new_place(tmp_path / "work", prepared, "ok", home=home)
        run = place.run("run", place.spec("sweep"), *LOCAL)
        assert run.returncode == 2
        assert "the sweep writes about" in run.stderr
        assert not (home / "sweeps" / "sweep" / "sweep.json").exists()


@pytest.mark.fault("F9")
def test_room_is_asked_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    left = disk.free(tmp_path / "not" / "yet")
    assert left.disk_bytes == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.5)
    with pytest.raises(UsageError, match="free some space or choose another folder"):
        disk.require_room(tmp_path, disk.Room(2**62, None))
    assert disk.needed(10, 8, True).disk_bytes > disk.needed(10, 1, False).disk_bytes
