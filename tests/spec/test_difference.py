"""A changed spec is told by its digest, and in what it changed in words."""

import pytest
from spec_texts import Load

from orchestrator.spec.difference import describe_difference, ends_alike, spec_digest


def test_a_changed_choice_is_told(load: Load) -> None:
    old = load("zero_stage: [0, 2]", "offload_optimizer: [none, cpu]").spec
    new = load("[none, cpu]", "[cpu]", ("train.global_batch=32", "train.zero_stage=2")).spec
    assert spec_digest(old) != spec_digest(new)
    assert describe_difference(old, new) == [
        "search.offload_optimizer: [none, cpu] -> [cpu]",
        "train.global_batch: 16 -> 32",
        "train.zero_stage: nothing -> 2",
    ]


@pytest.mark.parametrize("override", ["name=other", "description=why", "budget.trials=7", "tracking.enabled=false"])
def test_name_budget_and_tracking_may_change(load: Load, override: str) -> None:
    old, new = load().spec, load(overrides=(override,)).spec
    assert old != new
    assert spec_digest(old) == spec_digest(new)
    assert describe_difference(old, new) == []


@pytest.mark.parametrize(
    "override",
    ["train.planned_tokens=2e9", "train.planned_epochs=3", "search.stop_below_gain=0", "resources.currency=EUR"],
)
def test_what_a_gain_is_worth_may_change_and_decides_when_the_sweep_ends(load: Load, override: str) -> None:
    old, new = load().spec, load(overrides=(override,)).spec
    assert spec_digest(old) == spec_digest(new)
    assert describe_difference(old, new) == []
    assert not ends_alike(old, new)


def test_a_name_does_not_decide_when_the_sweep_ends(load: Load) -> None:
    assert ends_alike(load().spec, load(overrides=("name=other",)).spec)
    assert not ends_alike(load().spec, load(overrides=("budget.trials=7",)).spec)
