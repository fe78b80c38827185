"""Predictions in `plan` and `run`: what surely does not fit is shown beforehand and never launched."""

import subprocess

import pytest
from brimful_command import Workplace

from orchestrator.contract.units import MIB

pytestmark = pytest.mark.trains

LIMIT_MIB = 220
SPEC = f"""\
version: 1
name: foretold
model:
  config: {{model_type: llama, vocab_size: 2048, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 512}}
data: {{path: foretold.txt, sequence_length: 128, packing: true}}
train: {{global_batch: 32, learning_rate: 1e-3, zero_stage: 0}}
search:
  sampler: grid
  baseline: {{method: full, micro_batch: 1}}
  method: [full]
  micro_batch: [1, 32]
limits: {{device_memory: {LIMIT_MIB}MiB}}
measure: {{min_steps: 2, max_steps: 2}}
budget: {{trials: 4}}
"""


@pytest.fixture(scope="module")
def swept(place: Workplace) -> "subprocess.CompletedProcess[str]":
    """A sweep with one candidate that fits and one that needs about twice the limit."""
    (place.folder / "foretold.yaml").write_text(SPEC)
    lines = (f"line {number} of a text about {'many ' * (number % 7)}things\n" for number in range(600))
    (place.folder / "foretold.txt").write_text("".join(lines))
    return place.run("run", "foretold.yaml", "--pool", "local", "--no-tracking")


def test_a_candidate_that_surely_does_not_fit_is_recorded_but_not_launched(
    place: Workplace, swept: "subprocess.CompletedProcess[str]"
) -> None:
    assert swept.returncode == 0, swept.stderr
    rows = place.json("trials", "foretold")
    assert isinstance(rows, list)
    assert [(row["config"]["micro_batch"], row["outcome"]["kind"]) for row in rows] == [(1, "ok"), (32, "rejected")]
    rejected = rows[1]
    assert (rejected["state"], rejected["attempt"]) == ("done", 0)
    assert rejected["outcome"]["probability_fits"] < 0.05
    assert rejected["outcome"]["needed_bytes"] > rejected["outcome"]["capacity_bytes"] == LIMIT_MIB * MIB
    assert sum(rejected["outcome"]["bill"].values()) > LIMIT_MIB * MIB
    assert not list((place.folder / "home/sweeps/foretold/trials").glob("0001/attempt-*"))


def test_rejected_candidates_are_counted_apart(place: Workplace, swept: "subprocess.CompletedProcess[str]") -> None:
    assert "1 of 1 trials fit" in swept.stdout
    assert "1 candidate is predicted not to fit and not launched" in swept.stdout
    row = place.json("status", "foretold")
    assert isinstance(row, dict)
    assert (row["done"], row["total"], row["fit"], row["other"], row["rejected"]) == (1, 1, 1, 0, 1)
    assert "space exhausted" in row["reason"]


def test_plan_shows_the_same_predictions(place: Workplace, swept: "subprocess.CompletedProcess[str]") -> None:
    plan = place.json("plan", "foretold.yaml")
    assert isinstance(plan, dict)
    small, large = plan["candidates"]
    assert (small["is_baseline"], small["predicted"]["is_rejected"], large["predicted"]["is_rejected"]) == (
        True, False, True
    )  # fmt: skip
    assert small["predicted"]["probability_fits"] > 0.5
    assert small["predicted"]["needed_bytes"] < LIMIT_MIB * MIB < large["predicted"]["needed_bytes"]
    assert small["predicted"]["tokens_per_second"] > 0
    assert sum(plan["rejected"].values()) == 1
    assert plan["trials"] == plan["preview"]["trials"] == 1
    assert plan["preview"]["device_hours"] > 0


def test_plan_prices_the_sweep_and_the_whole_training(
    place: Workplace, swept: "subprocess.CompletedProcess[str]"
) -> None:
    words = ("train.planned_tokens=36e6", "resources.price_per_device_hour=2.5", "budget.money=1")
    plan = place.json("plan", "foretold.yaml", *words)
    assert isinstance(plan, dict)
    assert (plan["currency"], plan["planned_tokens"]) == ("USD", 36_000_000)
    assert plan["preview"]["money"] == pytest.approx(2.5 * plan["preview"]["device_hours"])
    small = plan["candidates"][0]["predicted"]
    assert small["training"]["training_s"] == pytest.approx(36e6 / small["tokens_per_second"])
    assert small["training"]["device_hours"] == pytest.approx(small["training"]["training_s"] / 3600)
    assert small["training"]["money"] == pytest.approx(2.5 * small["training"]["device_hours"])
    shown = place.run("plan", "foretold.yaml", *words).stdout
    assert "whole training: 36,000,000 tokens" in shown
    assert " trials or 1.00 USD. " in " ".join(shown.split()), "grid knows no gain"
    guided = place.run("plan", "foretold.yaml", *words, "search.sampler=guided").stdout
    assert " trials or 1.00 USD, earlier once no candidate is worth its trial. " in " ".join(guided.split())
    assert " USD." in next(line for line in shown.splitlines() if line.startswith("Predicted cost: at most 1 trials"))
