"""Optuna's storage is a copy: whatever becomes of it, the sweep goes on from its records and makes it again."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cli.brimful_command import Workplace

from faults import leaks
from faults.crash_session import TESTS, Sessions, Strike
from faults.sweeps import LOCAL, assert_kept, assert_whole, ended_files, new_place, session_at

Figure = Callable[[str, str], None]
ASKS = """
import sys
from pathlib import Path
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import RDBStorage
from orchestrator.backends.guided_sampler import GuidedSampler
optuna.logging.set_verbosity(optuna.logging.ERROR)
space = {"micro_batch": CategoricalDistribution([1, 2, 4])}
points = tuple({"micro_batch": size} for size in (1, 2, 4))
storage = RDBStorage(sys.argv[1], engine_kwargs={"connect_args": {"timeout": 60}})
study = optuna.load_study(study_name="asked", storage=storage, sampler=GuidedSampler(space, points))
for _ in range(20):
    print(study.ask(space).number)
"""


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    with closing(Sessions()) as sessions:
        yield sessions


def states(home: Path) -> list[str]:
    """The states of the study's trials, in order."""
    with closing(sqlite3.connect(home / "sweeps" / "sweep" / "study.db")) as study:
        return [state for (state,) in study.execute("SELECT state FROM trials ORDER BY number")]


def damage(file: Path, how: str) -> None:
    match how:
        case "page 3 flipped":
            content = bytearray(file.read_bytes())
            content[2 * 4096 : 3 * 4096] = bytes(255 - byte for byte in content[2 * 4096 : 3 * 4096])
            file.write_bytes(content)
        case "tables of Optuna 2":
            # the head revision of Optuna 2.4 (optuna/storages/_rdb/alembic/versions)
            with closing(sqlite3.connect(file)) as study, study:
                study.execute("UPDATE alembic_version SET version_num = 'v2.4.0.a'")
        case "half a file":
            file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.fault("E4", "E10")
@pytest.mark.parametrize("how", ["page 3 flipped", "tables of Optuna 2", "half a file"])
def test_a_damaged_study_is_made_again_from_the_records(sessions: Sessions, tmp_path: Path, how: str) -> None:
    """Nothing is asked of the user: no `optuna storage upgrade`, and every finished trial is back."""
    assert sessions.run(session_at(tmp_path, trials=6)) == [0]
    seen = ended_files(tmp_path)
    damage(tmp_path / "sweeps" / "sweep" / "study.db", how)
    assert sessions.run(session_at(tmp_path)) == [0]
    assert_kept(seen)
    assert_whole(tmp_path, 12)
    assert len(states(tmp_path)) == 12
    leaks.assert_home_clean(tmp_path)


@pytest.mark.fault("E2")
def test_a_frozen_process_that_locks_the_study_delays_nothing_for_long(
    sessions: Sessions, tmp_path: Path, figure: Figure
) -> None:
    """SQLite's lock is held from outside: the copy is given up for the session and made again by the next one."""
    assert sessions.run(session_at(tmp_path, trials=6)) == [0]
    with closing(sqlite3.connect(tmp_path / "sweeps" / "sweep" / "study.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert sessions.run(session_at(tmp_path)) == [0]
        assert_whole(tmp_path, 12)
        other.execute("ROLLBACK")
    assert len(states(tmp_path)) < 12
    assert sessions.run(session_at(tmp_path)) == [0]
    assert len(states(tmp_path)) == 12
    leaks.assert_home_clean(tmp_path)


@pytest.mark.fault("E7")
def test_no_trial_of_the_study_stays_running(sessions: Sessions, tmp_path: Path) -> None:
    assert sessions.run(session_at(tmp_path, strike=Strike("after_launch", 4))) == [-signal.SIGKILL]
    assert "RUNNING" in states(tmp_path)
    assert sessions.run(session_at(tmp_path)) == [0]
    assert "RUNNING" not in states(tmp_path)


@pytest.mark.fault("E8", "E9")
def test_another_spec_of_the_same_name_is_refused_with_the_difference(prepared: Workplace, tmp_path: Path) -> None:
    """A choice more; --extend goes on with it, and Optuna's own complaint about changed choices is never seen."""
    place = new_place(tmp_path / "work", prepared, "ok")
    assert place.run("run", place.spec("sweep"), *LOCAL).returncode == 0
    seen = ended_files(place.folder / "home")
    edited = place.spec("sweep", ranks="[2, 4]")
    refused = place.run("run", edited, *LOCAL)
    assert refused.returncode == 2
    assert "lora_rank" in refused.stderr
    assert "--extend" in refused.stderr
    assert "--new" in refused.stderr
    extended = place.run("run", edited, *LOCAL, "--extend")
    assert extended.returncode == 0, extended.stderr
    assert_kept(seen)
    assert_whole(place.folder / "home", 6)
    leaks.assert_home_clean(place.folder / "home")


@pytest.mark.slow
@pytest.mark.fault("E11")
def test_eight_processes_ask_one_study(tmp_path: Path, figure: Figure) -> None:
    """Our sampler in anyone's study, as Optuna tests its own."""
    import optuna

    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=url, study_name="asked", direction="maximize")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-c", ASKS, url]
    askers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(8)
    ]
    numbers = []
    for asker in askers:
        out, err = asker.communicate(timeout=200)
        assert asker.returncode == 0, err
        numbers += [int(line) for line in out.split()]
    assert sorted(numbers) == list(range(160))
    figure("unique numbers", f"{len(set(numbers))} of 160")


@pytest.mark.fault("E14")
def test_nothing_fits_is_told_with_what_came_closest(prepared: Workplace, tmp_path: Path) -> None:
    place = new_place(tmp_path / "work", prepared, "oom")
    run = place.run("run", place.spec("sweep"), *LOCAL, "--json")
    assert run.returncode == 3, run.stderr
    assert "Traceback" not in run.stderr
    assert json.loads(run.stdout)["best"] is None
    assert "0 of 4 fit" in place.run("report", "sweep").stdout
    leaks.assert_home_clean(place.folder / "home")
