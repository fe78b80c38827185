"""A failed allocation is read by its size (field cases A14, A8)."""

from collections.abc import Mapping

import pytest

from field.pricing import GIB, deep, numel, zero
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Point, Profile
from orchestrator.predict.explain import which_term

Profiles = Mapping[str, Profile]
STEP = Point(1, 1536)


@pytest.mark.structures("llada_8b_full")
def test_a14_an_offload_that_is_not_in_force_is_seen_in_the_request(profiles: Profiles) -> None:
    weights = deep(profiles["llada_8b_full"], 32)
    assert numel(weights) == pytest.approx(8.0e9, rel=0.01)
    job = zero(2, 2, STEP, offload_optimizer="cpu")
    reading = which_term(weights, job, round(14.93 * GIB), Phase.OPTIMIZER_STEP)
    assert reading is not None
    assert reading.terms == ("master_weights",)
    assert "offload appears not applied" in reading.note
    without = which_term(weights, zero(2, 2, STEP), round(14.93 * GIB), Phase.OPTIMIZER_STEP)
    assert without is not None
    assert "offload appears" not in without.note


@pytest.mark.structures("llada_8b_full")
def test_a14_two_ranks_make_flat_weights_as_large_as_masters(profiles: Profiles) -> None:
    weights = deep(profiles["llada_8b_full"], 32)
    reading = which_term(weights, zero(2, 2, STEP), round(14.93 * GIB), Phase.INIT)
    assert reading is not None
    assert reading.terms == ("master_weights", "trained_weights")


@pytest.mark.structures("baichuan2_13b_full")
def test_a8_the_request_of_baichuan2_is_the_fp32_shard(profiles: Profiles) -> None:
    profile = profiles["baichuan2_13b_full"]
    reading = which_term(profile, zero(2, 4, STEP), round(12.94 * GIB), Phase.INIT)
    assert reading is not None
    assert reading.terms[0] == "master_weights"
    assert "smaller micro_batch does not change it" in reading.note


@pytest.mark.structures("baichuan2_13b_full")
def test_a_request_for_logits_is_named(profiles: Profiles) -> None:
    profile = profiles["baichuan2_13b_full"]
    one_copy_bytes = 4 * 1536 * 125_696
    reading = which_term(profile, zero(2, 4, STEP), one_copy_bytes, Phase.FORWARD)
    assert reading is not None
    assert "logits" in reading.terms


@pytest.mark.structures("baichuan2_13b_full")
def test_a_size_that_no_tensor_has_is_not_explained(profiles: Profiles) -> None:
    assert which_term(profiles["baichuan2_13b_full"], zero(2, 4, STEP), round(9.87 * GIB)) is None
    assert which_term(profiles["baichuan2_13b_full"], zero(2, 4, STEP), 1000) is None
