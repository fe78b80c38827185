"""Each end of a run has its exit code, and standard output stays clean."""

import json
import signal
from pathlib import Path

import pytest
from brimful_command import Workplace, await_true, end

LOCAL = ("--pool", "local", "--no-tracking")


@pytest.mark.trains
def test_nothing_fits(place: Workplace) -> None:
    run = place.run("run", place.spec("narrow", limit="1MiB"), *LOCAL)
    assert run.returncode == 3, run.stderr
    assert "0 of 4 fit" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr
    best = place.run("best", "narrow", "--json")
    assert (best.returncode, json.loads(best.stdout)) == (3, None)


@pytest.mark.trains
def test_every_trial_fails_alike(place: Workplace) -> None:
    run = place.run("run", place.spec("broken", dropout=2.0, ranks="[1, 2, 3, 4, 5, 6]"), *LOCAL, "--json")
    assert run.returncode == 1, run.stderr
    document = json.loads(run.stdout)
    assert document["state"] == "failed"
    assert "every trial failed alike" in document["reason"]
    assert document["done"] < document["total"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_cleanly_and_resume_goes_on(endless: Workplace, number: signal.Signals, code: int) -> None:
    name = f"signal-{code}"
    process = endless.start("run", endless.spec(name), *LOCAL)
    await_true(lambda: endless.trains(name), process)
    exit_code, _, stderr = end(process, number)
    assert exit_code == code, stderr
    row = endless.json("status", name)
    assert isinstance(row, dict)
    assert (row["state"], row["running"]) == ("stopped", 0)


def test_stop_and_resume(endless: Workplace) -> None:
    process = endless.start("run", endless.spec("halted"), *LOCAL)
    await_true(lambda: endless.trains("halted"), process)
    locked = endless.run("run", endless.spec("halted"), *LOCAL)
    assert locked.returncode == 2
    assert f"process {process.pid}" in locked.stderr
    stopped = endless.run("stop", "halted")
    assert stopped.returncode == 0, stopped.stderr
    exit_code, stdout, _ = end(process)
    assert exit_code == 4
    assert "brimful resume halted" in stdout
    resumed = endless.start("resume", "halted")
    await_true(lambda: endless.trains("halted", attempt=2), resumed)
    rows = endless.json("trials", "halted")
    assert isinstance(rows, list)
    assert max(row["attempt"] for row in rows) == 2
    assert endless.run("stop", "halted").returncode == 0
    assert end(resumed)[0] == 4


def test_a_killed_driver_is_told_and_its_trial_runs_again(endless: Workplace) -> None:
    process = endless.start("run", endless.spec("killed"), *LOCAL)
    await_true(lambda: endless.trains("killed"), process)
    end(process, signal.SIGKILL)
    row = endless.json("status", "killed")
    assert isinstance(row, dict)
    assert row["state"] == "interrupted"
    again = endless.start("run", endless.spec("killed"), *LOCAL)
    await_true(lambda: endless.trains("killed", attempt=2), again)
    assert endless.run("stop", "killed").returncode == 0
    assert end(again)[0] == 4


def test_a_wrong_spec_names_the_place(place: Workplace) -> None:
    file = place.spec("wrong")
    file.write_text(file.read_text().replace("sampler: grid", "sampler: gird"))
    run = place.run("run", file, *LOCAL, "--json")
    assert run.returncode == 2
    assert "wrong.yaml:9:12" in run.stderr
    assert json.loads(run.stdout)["exit_code"] == 2


def test_no_cluster_at_the_address(place: Workplace) -> None:
    run = place.run("run", place.spec("whole"), "--new", "--address", "127.0.0.1:1", "--no-tracking")
    assert run.returncode == 5, run.stderr
    assert "cannot be reached" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "no-such.yaml"],
        ["status", "no-such"],
        ["trials", "../etc"],
        ["nonsense"],
        ["run", "whole.yaml", "--pool", "slurm"],
        ["run", "whole.yaml", "--new", "--extend"],
    ],
)
def test_wrong_usage(place: Workplace, arguments: list[str]) -> None:
    place.spec("whole")
    run = place.run(*arguments)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr


def test_plan_writes_no_file(place: Workplace, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run = place.run("plan", place.spec("planned"), "micro_batch=3", "--home", home, "--json")
    assert run.returncode == 2
    plan = place.run("plan", place.spec("planned"), "--home", home, "--no-predictions", "--json")
    assert plan.returncode == 0, plan.stderr
    document = json.loads(plan.stdout)
    assert [candidate["is_baseline"] for candidate in document["candidates"]] == [True, False, False, False]
    assert (document["points"], document["illegal"], document["rejected"]) == (4, {}, {})
    assert {candidate["predicted"] for candidate in document["candidates"]} == {None}
    assert not home.exists()


def test_init_writes_a_spec_that_is_valid(place: Workplace, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    assert place.run("init", file).returncode == 0
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n')
    assert place.run("validate", file).returncode == 0
    again = place.run("init", file)
    assert again.returncode == 2
    assert "--force" in again.stderr
