"""Every verb over a sweep that ran to its end."""

import json
import re
import shutil
from pathlib import Path

import pytest
from brimful_command import Workplace

from orchestrator.search.ranking import TIE

pytestmark = pytest.mark.trains


def test_trials_are_listed_with_what_a_program_needs(place: Workplace, finished: str) -> None:
    rows = place.json("trials", finished)
    assert isinstance(rows, list)
    assert [row["trial"] for row in rows] == [0, 1, 2, 3]
    assert {(row["config"]["method"], row["config"]["micro_batch"]) for row in rows} == {
        ("full", 1), ("full", 2), ("lora", 1), ("lora", 2)
    }  # fmt: skip
    for row in rows:
        assert row["outcome"]["kind"] == "ok"
        assert row["outcome"]["phase"] is None
        assert row["state"] == "done"
        assert row["attempt"] == 1
        assert 0 < row["peak_memory_bytes"] < row["limit_bytes"] == 512 * 2**20
        assert row["peak_resident_bytes"] > 0
        assert row["tokens_per_second"] > 0
        assert row["launch_overhead_s"] > 0
        assert 0 < row["mfu"] <= row["hfu"] < 1
    assert [row["trial"] for row in rows if row["is_baseline"]] == [0]


def test_best_is_the_fastest_and_says_its_gain(place: Workplace, finished: str) -> None:
    rows, best = place.json("trials", finished), place.json("best", finished)
    assert isinstance(rows, list)
    assert isinstance(best, dict)
    speeds = {row["trial"]: row["tokens_per_second"] for row in rows}
    assert best["tokens_per_second"] >= (1 - TIE) * max(speeds.values())
    assert best["baseline_speedup"] == pytest.approx(best["tokens_per_second"] / speeds[0])


def test_the_same_command_again_runs_nothing(place: Workplace, finished: str) -> None:
    before = place.json("trials", finished)
    again = place.run("run", place.spec(finished), "--pool", "local", "--no-tracking")
    assert again.returncode == 0
    assert "finished already" in again.stderr
    assert "4 of 4 trials fit" in again.stdout
    assert place.json("trials", finished) == before


def test_a_greater_budget_goes_on(place: Workplace, finished: str) -> None:
    run = place.run("run", place.spec(finished), "--trials", "9", "--pool", "local", "--no-tracking", "--json")
    assert run.returncode == 0
    document = json.loads(run.stdout)
    assert (document["done"], document["total"]) == (4, 4)
    assert "space exhausted" in document["reason"]


def test_a_changed_spec_is_refused_with_the_difference(place: Workplace, finished: str) -> None:
    run = place.run("run", place.spec(finished, limit="256MiB"), "--pool", "local")
    place.spec(finished)
    assert run.returncode == 2
    assert "limits.device_memory: 536870912 -> 268435456" in run.stderr
    assert "--extend" in run.stderr
    assert "--new" in run.stderr
    extended = place.run("run", place.spec(finished, limit="256MiB"), "--pool", "local", "--extend")
    place.spec(finished)
    assert extended.returncode == 2
    assert "--extend cannot change limits" in extended.stderr


def test_status_and_list(place: Workplace, finished: str) -> None:
    row, rows = place.json("status", finished), place.json("list")
    assert isinstance(row, dict)
    assert isinstance(rows, list)
    assert (row["state"], row["fit"], row["out_of_memory"]) == ("finished", 4, 0)
    assert row in rows
    line = place.run("status", finished).stdout
    assert re.search(r"^whole: finished, 4/\d trials, 4 fit, 0 out of memory, best .* tokens/s in trial \d", line)


def test_report_in_every_format(place: Workplace, finished: str, tmp_path: Path) -> None:
    assert "4 of 4 trials fit" in place.run("report", finished).stdout
    for name, sign in {"r.md": "# Sweep whole", "r.html": "plotly", "r.json": '"baseline_speedup"'}.items():
        run = place.run("report", finished, "-o", tmp_path / name)
        assert run.returncode == 0, run.stderr
        assert sign in (tmp_path / name).read_text()
    document = place.json("report", finished)
    assert isinstance(document, dict)
    assert len(document["trials"]) == 4


def test_export_of_the_best_and_of_a_named_trial(place: Workplace, finished: str, tmp_path: Path) -> None:
    document = place.json("export", finished, "--trial", "0", "-o", tmp_path / "out")
    assert isinstance(document, dict)
    assert document["trial"] == 0
    assert (tmp_path / "out" / "launch.sh").exists()
    assert json.loads((tmp_path / "out" / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == 1
    assert place.run("export", finished, "-o", tmp_path / "out").returncode == 2


def test_logs_of_a_trial(place: Workplace, finished: str) -> None:
    run = place.run("logs", finished, "0")
    assert run.returncode == 0
    assert "trial 0 (full" in run.stderr
    assert place.run("logs", finished, "17").returncode == 2


def test_new_archives_the_old_sweep_and_delete_says_what_it_frees(starved: Workplace) -> None:
    spec = starved.spec("again")
    arguments = ("--pool", "local", "--no-tracking", "--quiet")
    assert starved.run("run", spec, "--trials", "1", *arguments).returncode == 3
    assert starved.run("run", spec, "--trials", "1", "--new", *arguments).returncode == 3
    assert starved.json("trials", "again.1") != starved.json("trials", "again")
    refused = starved.run("delete", "again.1")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    document = starved.json("delete", "again.1", "--yes")
    assert isinstance(document, dict)
    assert document["freed_bytes"] > 1000
    assert starved.run("status", "again.1").returncode == 2


def test_a_sweep_whose_rows_are_gone_prepares_them_again(place: Workplace, finished: str) -> None:
    cache, away = place.folder / "home" / "cache", place.folder / "cache-away"
    cache.rename(away)
    try:
        again = place.run("resume", finished)
        assert again.returncode == 0, again.stderr
        assert "Export of the best" in again.stdout
        exported = place.run("export", finished, "-o", place.folder / "exported-again")
        assert exported.returncode == 0, exported.stderr
        assert (place.folder / "exported-again" / "data" / "tokens.bin").stat().st_size > 0
    finally:
        shutil.rmtree(cache)
        away.rename(cache)
