"""Trials of several sizes in one space: the global batch stays, accumulation follows, what cannot be is said."""

import pytest
from space_facts import facts, spec

from orchestrator.contract.config import Layout
from orchestrator.contract.errors import SpecError, UnplaceableError
from orchestrator.placement.layouts import refused_layouts
from orchestrator.placement.platform import sweep_platform
from orchestrator.space.candidates import Illegal, Space, build_space
from orchestrator.spec.sweep import SweepSpec


def layouts_of(resources: dict[str, object], **rest: object) -> SweepSpec:
    made = spec({"micro_batch": (1, 4)}, **rest)
    return SweepSpec.model_validate({**made.model_dump(), "resources": resources})


def space(resources: dict[str, object], **rest: object) -> Space:
    return build_space(layouts_of(resources, **rest), facts())


BOTH = {"devices_per_trial": [1, 2, 4], "nodes": [1, 2]}


def test_each_layout_keeps_the_global_batch() -> None:
    found = space(BOTH)
    seen = {
        (*each.config.layout, each.config.knobs.micro_batch, each.config.gradient_accumulation)
        for each in found.candidates
    }
    assert seen == {
        (1, 1, 1, 16), (1, 1, 4, 4),
        (2, 1, 1, 8), (2, 1, 4, 2), (2, 2, 1, 8), (2, 2, 4, 2),
        (4, 1, 1, 4), (4, 1, 4, 1), (4, 2, 1, 4), (4, 2, 4, 1),
    }  # fmt: skip
    assert found.illegal == {"devices_per_trial 1 is not divisible by nodes 2": 2}
    assert len({each.id for each in found.candidates}) == 10
    assert all(each.id == each.config.candidate for each in found.candidates)


def test_sizes_that_do_not_divide_the_batch_are_illegal_with_the_arithmetic() -> None:
    found = space({"devices_per_trial": [2, 8]})
    assert {each.config.layout for each in found.candidates} == {Layout(2), Layout(8)}
    assert found.illegal == {"global_batch 16 is not divisible by micro_batch 4 x 8 ranks = 32": 1}


def test_labels_name_what_is_searched() -> None:
    assert [each.label for each in space({"devices_per_trial": [1, 2]}).candidates][:2] == [
        "full z0 mb1 fp32 1dev",
        "full z0 mb1 fp32 2dev",
    ]
    assert space(BOTH).candidates[-1].label == "full z0 mb4 fp32 4dev 2nodes"
    assert space({"devices_per_trial": 2}).candidates[0].label == "full z0 mb1 fp32"


def test_size_and_nodes_are_dimensions_and_lead_back_to_the_candidate() -> None:
    found = space(BOTH)
    assert list(found.choices) == ["micro_batch", "devices_per_trial", "nodes"]
    for candidate in found.candidates:
        chosen = found.choices_of(candidate)
        assert chosen is not None
        assert found.resolve(chosen) == candidate


def test_a_baseline_may_say_its_layout_and_lie_outside_of_the_choices() -> None:
    found = space(BOTH, baseline={"devices_per_trial": 8, "nodes": 2, "micro_batch": 1})
    assert found.baseline is not None
    assert found.baseline.config.layout == Layout(8, 2)
    assert found.choices_of(found.baseline) is None
    assert space(BOTH, baseline={"micro_batch": 1}).candidates[0].config.layout == Layout(1, 1)
    with pytest.raises(SpecError, match="devices_per_trial 2 is not divisible by nodes 3"):
        space(BOTH, baseline={"devices_per_trial": 2, "nodes": 3})


def test_a_candidate_keeps_its_id_where_nobody_asks_for_nodes() -> None:
    config = space({"devices_per_trial": 2}).candidates[0].config
    assert "nodes" not in config.identity()
    assert config.model_copy(update={"nodes": 1}).candidate != config.candidate


def up_to_two(world_size: int, nodes: int | None) -> None:
    if world_size > 2:
        raise UnplaceableError(f"needs {world_size}, has 2")


def test_what_the_cluster_cannot_place_is_illegal_and_the_rest_is_searched() -> None:
    found = space(BOTH)
    refused = refused_layouts(layouts_of(BOTH).resources.layouts, up_to_two)
    kept = found.refusing(refused)
    assert {each.config.world_size for each in kept.candidates} == {1, 2}
    assert kept.illegal["needs 4, has 2"] == 4
    assert kept.resolve({"micro_batch": 1, "devices_per_trial": 4, "nodes": 1}) == Illegal("needs 4, has 2")


def test_nothing_that_can_be_placed_is_refused_with_the_smallest() -> None:
    with pytest.raises(UnplaceableError, match="needs 4"):
        refused_layouts([Layout(8), Layout(4)], up_to_two)


def test_ranks_that_share_a_node_follow_from_the_layout() -> None:
    made = layouts_of({"devices_per_trial": [2, 8], "nodes": [1, 2]})

    def on_node(layout: Layout, devices_on_node: int | None = None) -> int:
        return sweep_platform(made, facts(), 1, layout, devices_on_node).ranks_on_node

    assert [on_node(layout) for layout in made.resources.layouts] == [2, 1, 8, 4]
    assert on_node(Layout(8)) == 8
    assert on_node(Layout(8), devices_on_node=4) == 4
