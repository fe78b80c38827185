"""The shipped experiment on quality, run for real at one point of each rank: the smallest does not win by being so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ONE_POINT_A_RANK = (
    "search.sampler=grid",
    "search.zero_stage=[0]",
    "search.gradient_checkpointing=[none]",
    "search.micro_batch=[2]",
    "search.baseline={lora_rank: 64, zero_stage: 0, micro_batch: 2}",
    "measure.confirm.top=0",
    "measure.racing=false",
)


def brimful(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.cli", *arguments, "--home", str(home)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False)


@pytest.mark.slow
@pytest.mark.trains
def test_rank_four_cannot_win_whatever_its_speed(tmp_path: Path) -> None:
    run = brimful(
        tmp_path, "run", "experiments/quality.yaml", *ONE_POINT_A_RANK, "--pool", "local", "--no-tracking", "--json"
    )
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(brimful(tmp_path, "report", "quality", "--json").stdout)
    by_rank = {row["config"]["lora_rank"]: row for row in report["trials"]}
    assert set(by_rank) == {4, 16, 64}
    assert {row["outcome"]["kind"] for row in by_rank.values()} == {"ok"}
    losses = {rank: row["eval_loss"] for rank, row in by_rank.items()}
    assert losses[64] < losses[16] < losses[4]
    assert by_rank[4]["eval_loss_excess"] > 0.01
    assert by_rank[4]["cannot_win"].startswith("eval loss 1.")
    assert by_rank[16]["cannot_win"] == ""
    assert report["best"]["config"]["lora_rank"] in (16, 64)
    assert len({row["trained_tokens"] for row in by_rank.values()}) == 1
    shown = brimful(tmp_path, "report", "quality", "--format", "markdown").stdout
    assert "limits.eval_loss_within allows 1 % above the baseline's eval loss" in shown
