"""A sweep that really ran, recorded as a landscape and searched again."""

import json
from pathlib import Path

import pytest
from brimful_command import Workplace

from benchmarks import record_landscape, replay
from benchmarks.landscapes.table import read_landscape

pytestmark = pytest.mark.trains


def test_a_finished_sweep_is_recorded_and_searched_again(
    place: Workplace, finished: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, cache = place.folder / "home" / "sweeps" / finished, str(place.folder / "home" / "cache")
    assert record_landscape.main([str(sweep), "--output", str(tmp_path), "--cache", cache]) == 0
    land = read_landscape(tmp_path / f"{finished}.csv")
    rows = place.json("trials", finished)
    assert isinstance(rows, list)
    assert land.tokens_per_s.tolist() == pytest.approx([row["tokens_per_second"] for row in rows], rel=1e-4)
    assert [(each["method"], each["micro_batch"]) for each in land.candidates] == [
        (row["config"]["method"], row["config"]["micro_batch"]) for row in rows
    ]
    assert all(land.prior["peak_gib"] > 0)
    assert all(land.prior["tokens_per_s"] > 0)
    capsys.readouterr()

    assert replay.main([str(sweep), "--strategy", "guided", "grid", "--seeds", "2", "--cache", cache, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["grid"]["searches"] == 2
    assert found["guided"]["launches_to_5_pct_median"] in range(1, 5)
    assert found["guided"]["oom_share"] == 0
