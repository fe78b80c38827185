"""The space is finite and distinct: one candidate a run, a reason for every point that cannot be run."""

import itertools

import pytest
from space_facts import facts, spec

from orchestrator.contract.errors import SpecError
from orchestrator.space.candidates import MAX_POINTS, Candidate, Illegal, Space, build_space


def _space(search: dict[str, object] | None, **rest: object) -> Space:
    return build_space(spec(search, **rest), facts())


def _balance(space: Space) -> int:
    listed = len([candidate for candidate in space.candidates if not candidate.is_baseline])
    return listed + space.duplicates + space.illegal.total()


def test_points_that_do_not_divide_are_illegal_with_the_arithmetic() -> None:
    space = _space({"micro_batch": (1, 2, 3, 4)}, devices=2)
    assert [candidate.config.knobs.micro_batch for candidate in space.candidates] == [1, 2, 4]
    assert space.illegal == {"global_batch 16 is not divisible by micro_batch 3 x 2 ranks = 6": 1}


@pytest.mark.parametrize(("devices", "global_batch"), [(1, 16), (2, 16), (4, 48), (3, 9)])
def test_accumulation_is_derived_from_the_real_world_size(devices: int, global_batch: int) -> None:
    space = _space({"micro_batch": (1, 2, 3, 4)}, devices=devices, global_batch=global_batch)
    for candidate in space.candidates:
        config = candidate.config
        assert config.world_size == devices
        assert config.knobs.micro_batch * config.gradient_accumulation * devices == global_batch
    assert _balance(space) == 4


def test_every_point_of_a_plain_grid_is_one_candidate() -> None:
    grid = {"lora_rank": (8, 16, 32), "gradient_checkpointing": ("none", "full"), "micro_batch": (1, 2)}
    space = _space(grid, fixed={"method": "lora"})
    assert space.raw_points == 12
    assert len({candidate.id for candidate in space.candidates}) == 12
    assert space.duplicates == 0


def test_points_that_mean_the_same_run_are_one_candidate() -> None:
    space = _space(
        {"method": ("lora", "full"), "lora_rank": (8, 16), "zero_stage": (0, 2), "offload_param": ("none", "cpu")}
    )
    assert space.raw_points == 16
    assert len(space.candidates) == 2 * 2 + 2
    assert space.duplicates == 10
    assert space.notes == ("offload_param has no effect in any candidate: it needs that zero_stage is 3",)


def test_identity_is_that_of_the_configuration() -> None:
    space = _space({"zero_stage": (0, 1, 2, 3), "micro_batch": (1, 2)}, baseline={"zero_stage": 2})
    assert all(candidate.id == candidate.config.candidate for candidate in space.candidates)
    again = _space({"micro_batch": (2, 1), "zero_stage": (3, 2, 1, 0)})
    assert {candidate.id for candidate in space.candidates} == {candidate.id for candidate in again.candidates}


def test_the_baseline_is_first_and_once() -> None:
    search = {"zero_stage": (0, 2), "micro_batch": (1, 2)}
    inside = _space(search, baseline={"zero_stage": 2})
    assert inside.candidates[0] is inside.baseline
    assert inside.candidates[0].config.knobs.zero_stage == 2
    assert inside.candidates[0].config.knobs.micro_batch == 1
    assert len(inside.candidates) == 4
    outside = _space(search, baseline={"micro_batch": 8})
    assert [candidate.is_baseline for candidate in outside.candidates] == [True, False, False, False, False]
    assert outside.choices_of(outside.candidates[0]) is None


def test_an_illegal_baseline_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        SpecError, match=r"search.baseline: cannot be run: global_batch 16 .* micro_batch 3 x 1 rank = 3"
    ):
        _space({"zero_stage": (0,)}, baseline={"micro_batch": 3})


def test_unknown_layers_are_illegal_and_the_models_own_are_listed() -> None:
    space = _space({"lora_targets": ("all-linear", ("query", "q_proj"))}, fixed={"method": "lora"})
    assert len(space.candidates) == 1
    layers = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert list(space.illegal) == [f"lora_targets query: the model's linear layers are {layers}"]


def test_an_odd_gathering_bucket_is_illegal_where_it_is_read() -> None:
    space = _space({"zero_stage": (0, 1, 3), "allgather_bucket_size": (7, 8)})
    assert sorted(candidate.config.knobs.zero_stage for candidate in space.candidates) == [0, 1, 3]
    assert list(space.illegal) == ["allgather_bucket_size 7 is odd, and DeepSpeed gathers pairs of elements"]
    assert _balance(space) == 6


def test_paired_values_change_together() -> None:
    pairs = ({"gradient_checkpointing": "none", "micro_batch": 1}, {"gradient_checkpointing": "full", "micro_batch": 4})
    space = _space({"zero_stage": (0, 2)}, paired=pairs)
    seen = {(c.config.knobs.gradient_checkpointing.value, c.config.knobs.micro_batch) for c in space.candidates}
    assert seen == {("none", 1), ("full", 4)}
    assert list(space.choices) == ["zero_stage", "gradient_checkpointing+micro_batch"]
    assert len(space.candidates) == 4


def test_a_define_by_run_walk_reaches_every_candidate() -> None:
    pairs = ({"gradient_checkpointing": "none", "micro_batch": 1}, {"gradient_checkpointing": "full", "micro_batch": 3})
    search = {
        "method": ("lora", "full"),
        "lora_rank": (8, 16),
        "lora_targets": ("all-linear", ("k_proj", "q_proj")),
        "zero_stage": (0, 2, 3),
        "offload_optimizer": ("none", "cpu"),
        "offload_param": ("none", "cpu"),
    }
    space = _space(search, paired=pairs)
    reached, refused = set(), 0
    for combination in itertools.product(*space.choices.values()):
        chosen: dict[str, object] = {}
        for name, choice in zip(space.choices, combination, strict=True):
            if space.is_active(name, chosen):
                chosen[name] = choice
        found = space.resolve(chosen)
        if isinstance(found, Illegal):
            refused += 1
        else:
            reached.add(found.id)
    assert reached == {candidate.id for candidate in space.candidates}
    assert refused > 0


def test_choices_lead_back_to_their_candidate() -> None:
    space = _space(
        {"method": ("lora", "full"), "lora_targets": ("all-linear", ("q_proj",)), "zero_stage": (0, 3)},
        paired=({"overlap_comm": True, "micro_batch": 1}, {"overlap_comm": False, "micro_batch": 2}),
    )
    for candidate in space.candidates:
        chosen = space.choices_of(candidate)
        assert chosen is not None
        assert space.resolve(chosen) is candidate


def test_without_a_search_a_default_space_suits_the_devices() -> None:
    single = build_space(spec(None, global_batch=12), facts())
    assert single.is_default
    assert single.choices["zero_stage"] == (0, 2, 3)
    assert single.choices["micro_batch"] == (1, 2, 4)
    several = build_space(spec(None, {"method": "lora", "lora_rank": 8}, devices=4), facts())
    assert several.choices["zero_stage"] == (0, 1, 2, 3)
    assert several.choices["micro_batch"] == (1, 2, 4)
    assert "method" not in several.choices
    assert not several.illegal


def test_a_method_that_is_named_nowhere_follows_from_the_knobs() -> None:
    assert _space({"lora_rank": (8, 16)}).candidates[0].config.knobs.method == "lora"
    assert _space({"zero_stage": (0, 1)}).candidates[0].config.knobs.method == "full"


def test_labels_are_short_and_tell_candidates_apart() -> None:
    space = _space(
        {
            "lora_rank": (8, 16),
            "lora_targets": ("all-linear", ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj")),
            "zero_stage": (2, 3),
            "offload_optimizer": ("none", "cpu"),
            "gradient_checkpointing": ("none", "full"),
            "reduce_bucket_size": (500_000_000, 4096, 123_000),
            "overlap_comm": (True, False),
        }
    )
    labels = [candidate.label for candidate in space.candidates]
    assert len(set(labels)) == len(labels) == 192
    assert max(map(len, labels)) <= 60
    assert labels[0] == "lora r8 all-linear z2 mb1 fp32 rb5e8 overlap-on"
    plain = _space({"zero_stage": (2,)}, fixed={"method": "lora", "offload_optimizer": "cpu", "micro_batch": 4})
    assert plain.candidates[0].label == "lora r16 z2 off-opt mb4 fp32"


def test_a_space_too_large_to_list_is_drawn_the_same_each_time() -> None:
    search = {
        "lora_rank": tuple(range(1, 401)),
        "micro_batch": (1, 2, 4),
        "zero_stage": (3,),
        "sub_group_size": tuple(range(1000, 1200)),
    }
    one, other = _space(search), _space(search)
    assert one.is_sampled
    assert one.raw_points == 240_000 > MAX_POINTS
    assert [candidate.id for candidate in one.candidates[:50]] == [candidate.id for candidate in other.candidates[:50]]
    assert "240000 points are too many to list" in one.notes[0]


def test_conditional_points_are_counted_without_being_walked() -> None:
    search = {
        "zero_stage": (0,),
        "stage3_max_live_parameters": tuple(range(1000)),
        "stage3_prefetch_bucket_size": tuple(range(1000)),
        "micro_batch": (1, 3),
    }
    space = _space(search)
    assert not space.is_sampled
    assert space.raw_points == 2_000_000
    assert len(space.candidates) == 1
    assert space.illegal.total() == 1
    assert space.duplicates == 1_999_998


def test_the_limits_and_the_device_reach_every_trial() -> None:
    asked = spec({"zero_stage": (0, 2)})
    asked = asked.model_copy(update={"limits": asked.limits.model_copy(update={"device_memory": 2**30, "headroom": 5})})
    space = build_space(asked, facts(on_cuda=True), threads_per_rank=3)
    first = space.candidates[0]
    assert isinstance(first, Candidate)
    assert first.config.limits.device_memory_bytes == 2**30
    assert first.config.limits.headroom_bytes == 5
    assert first.config.device == "cuda"
    assert first.config.knobs.precision == "bf16"
    assert first.config.threads_per_rank == 3
    assert first.config.data.directory == "/prepared"
