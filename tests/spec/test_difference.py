"""A changed spec is told by its digest, and in what it changed in words."""

import pytest
from spec_texts import Load

from orchestrator.spec.difference import describe_difference, spec_digest


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
