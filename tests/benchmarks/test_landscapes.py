"""Landscapes: their files; and of simulated ones what they share with the prediction, and what they do not."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from predict.profiles import decoder

from benchmarks.landscapes.clusters import CLUSTERS, Cluster, configurations
from benchmarks.landscapes.priors import Priced, price_one
from benchmarks.landscapes.simulate import simulate
from benchmarks.landscapes.table import landscape, read_landscape, write_landscape
from benchmarks.landscapes.truth import MEMORY_BIAS, THRASH_FROM, Truth
from orchestrator.spec.catalog import known
from orchestrator.spec.hardware import BETWEEN_NODES

CLUSTER = Cluster("tiny_4x3090", "meta-llama/Llama-2-7b-hf", "rtx3090", 1, 4, 2048, 64, 128, ("lora",), limit_gib=18.0)


@pytest.fixture(scope="module")
def priced() -> list[Priced]:
    """The cluster's configurations, of a decoder whose laws are written by hand."""
    profiles = {kind: decoder(lora=True, checkpointing=kind == "full") for kind in ("none", "full")}
    chosen = [each for each in configurations(CLUSTER) if each.lora_rank == 16]
    return [price_one(CLUSTER, each, profiles[each.gradient_checkpointing]) for each in chosen]


def test_every_cluster_can_be_built() -> None:
    assert len(CLUSTERS) >= 8
    assert len({cluster.name for cluster in CLUSTERS}) == len(CLUSTERS)
    for cluster in CLUSTERS:
        assert known(cluster.model) is not None
        assert cluster.link in BETWEEN_NODES
        assert cluster.global_sequences % cluster.ranks == 0
        assert cluster.device.memory_bytes > 0


def test_configurations_are_distinct_legal_and_keep_the_global_batch() -> None:
    found = list(configurations(CLUSTER))
    assert len(set(found)) == len(found)
    for each in found:
        assert CLUSTER.global_sequences % (each.micro_batch * CLUSTER.ranks) == 0
        assert each.zero_stage > 0 or each.offload_optimizer == "none"
        assert each.zero_stage == 3 or each.offload_param == "none"


def test_equal_seeds_give_equal_tables_and_others_share_the_prediction_alone(priced: list[Priced]) -> None:
    facts, rows = simulate(CLUSTER, 1, priced, 6.7e9)
    assert simulate(CLUSTER, 1, priced, 6.7e9) == (facts, rows)
    _, others = simulate(CLUSTER, 2, priced, 6.7e9)
    shared = {name for name in rows[0] if [row[name] for row in rows] == [row[name] for row in others]}
    assert shared == {*asdict(priced[0].configuration), "prior_tokens_per_s", "prior_peak_gib", "prior_host_gib"}
    assert facts["kind"] == "simulated"
    assert 0.01 <= facts["noise"] <= 0.03


def test_outcomes_follow_from_the_true_need_and_the_limits(priced: list[Priced]) -> None:
    facts, rows = simulate(CLUSTER, 1, priced, 6.7e9)
    land = landscape(facts, rows)
    assert 0 < land.feasible.mean() < 1
    over = land.peak_gib > land.limits["peak_gib"]
    assert np.array_equal(land.feasible, ~over & (land.host_gib <= land.limits["host_gib"]))
    assert {kind for kind, is_over in zip(land.oom_kinds, over, strict=True) if is_over} == {"gpu"}


def test_the_prediction_is_of_use_and_not_right(priced: list[Priced]) -> None:
    for seed in range(1, 4):
        facts, rows = simulate(CLUSTER, seed, priced, 6.7e9)
        land = landscape(facts, rows)
        speed = np.log(land.tokens_per_s / land.prior["tokens_per_s"])
        need = np.log(land.peak_gib / land.prior["peak_gib"])
        assert 0.02 < speed.std() < 0.5
        assert 0.01 < need.std() < 0.15
        assert MEMORY_BIAS[0] - 0.15 < need.mean() < MEMORY_BIAS[1] + 0.15


def test_memory_near_the_limit_costs_speed(priced: list[Priced]) -> None:
    truth = Truth(CLUSTER, 3, priced, limit_gib=24.0)
    roomy = np.full(len(priced), 24.0 * THRASH_FROM - 0.1)
    full = np.full(len(priced), 24.0)
    slowdown = truth.thrash(full) / truth.thrash(roomy)
    assert np.allclose(slowdown, 1 - truth.rates.thrash)


def test_a_trap_is_two_settings_of_the_predictions_favourite(priced: list[Priced]) -> None:
    trapped = replace(CLUSTER, has_trap=True)
    truth = Truth(trapped, 1, priced, limit_gib=24.0)
    assert truth.trap is not None
    (first, value, second, other), loss = truth.trap
    assert 0.25 <= loss <= 0.5
    fitting = [each for each in priced if each.device_gib < 24.0]
    favourite = asdict(max(fitting, key=lambda each: each.tokens_per_s).configuration)
    assert (favourite[first], favourite[second]) == (value, other)
    caught = truth.trapped() < 1
    assert 0 < caught.sum() < len(priced)
    assert all(
        (asdict(each.configuration)[first], asdict(each.configuration)[second]) == (value, other)
        for each, is_caught in zip(priced, caught, strict=True)
        if is_caught
    )


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    rows = [
        {"micro_batch": size, "offload": "none", "feasible": int(size < 3), "oom_kind": "" if size < 3 else "gpu",
         "tokens_per_s": 10.0 * size if size < 3 else None, "peak_gib": 1.0 if size < 3 else None, "host_gib": None,
         "prior_tokens_per_s": 9.0, "prior_peak_gib": 2.0, "prior_host_gib": 3.0}
        for size in (1, 2, 4)
    ]  # fmt: skip
    facts = {"name": "t", "knobs": ["micro_batch", "offload"], "mem_limit_gib": 2, "host_limit_gib": 4, "noise": 0.01}
    found = read_landscape(write_landscape(tmp_path, facts, rows))
    assert found.candidates[2] == {"micro_batch": 4, "offload": "none"}
    assert found.best == 20.0
    assert np.isnan(found.peak_gib[2])
    assert found.oom_kinds == ("", "", "gpu")
