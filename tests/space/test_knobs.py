"""Canonical form: a knob without an effect is None, an unset one has its documented value."""

import pytest
from space_facts import facts

from orchestrator.contract.config import Knobs
from orchestrator.space.knobs import BY_NAME, KNOBS, Setting, as_knobs, complete
from orchestrator.spec.model import shape_of

SMALL = Setting(facts().model, on_cuda=False)
STAGE3 = (
    "offload_param",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)


def test_each_knob_of_the_contract_is_declared_once() -> None:
    assert [knob.name for knob in KNOBS] == list(Knobs.model_fields)


@pytest.mark.parametrize(
    ("stage", "active"),
    [
        (0, set()),
        (1, {"offload_optimizer", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm"}),
        (2, {"offload_optimizer", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm"}),
        (3, {"offload_optimizer", "reduce_bucket_size", "overlap_comm", *STAGE3}),
    ],
)
def test_a_stage_decides_which_engine_knobs_have_an_effect(stage: int, active: set[str]) -> None:
    every = {name: 4 for name in Knobs.model_fields if "size" in name or name.startswith("stage3_")}
    given = {"method": "full", "zero_stage": stage, "offload_optimizer": "cpu", "offload_param": "cpu", **every}
    canonical = complete({**given, "overlap_comm": True}, SMALL)
    conditional = {knob.name for knob in KNOBS if "zero_stage is" in knob.condition}
    assert {name for name in conditional if canonical[name] is not None} == active


def test_adapters_exist_with_lora_only() -> None:
    full = complete({"method": "full", "lora_rank": 8, "lora_targets": ("q_proj",)}, SMALL)
    assert full["lora_rank"] is full["lora_targets"] is None
    lora = complete({"method": "lora"}, SMALL)
    assert (lora["lora_rank"], lora["lora_targets"]) == (16, "all-linear")


def test_naming_every_linear_layer_is_all_linear() -> None:
    layers = ("v_proj", "q_proj", "k_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
    assert complete({"method": "lora", "lora_targets": layers}, SMALL)["lora_targets"] == "all-linear"
    assert complete({"method": "lora", "lora_targets": ("v_proj", "q_proj")}, SMALL)["lora_targets"] == (
        "q_proj",
        "v_proj",
    )


def test_bucket_sizes_follow_the_model() -> None:
    small = as_knobs(complete({"method": "full", "zero_stage": 3}, SMALL))
    assert small.reduce_bucket_size == 64 * 64
    assert small.stage3_prefetch_bucket_size == 3686
    assert small.stage3_param_persistence_threshold == 640
    assert small.stage3_max_live_parameters == small.stage3_max_reuse_distance == small.sub_group_size
    assert small.sub_group_size == SMALL.model.total_parameters
    assert small.overlap_comm is True


def test_a_large_model_keeps_deepspeeds_defaults() -> None:
    shape = shape_of(
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        }
    )
    large = as_knobs(complete({"method": "full", "zero_stage": 3}, Setting(shape, on_cuda=True)))
    assert large.stage3_max_live_parameters == large.sub_group_size == 1_000_000_000
    assert large.reduce_bucket_size == 8192**2
    assert large.precision == "bf16"


def test_gathering_buckets_are_even() -> None:
    odd = Setting(facts().model.model_copy(update={"hidden_size": 63}), on_cuda=False)
    stage1 = complete({"method": "full", "zero_stage": 1}, odd)
    assert stage1["reduce_bucket_size"] == 3969
    assert stage1["allgather_bucket_size"] == 3968
    assert stage1["overlap_comm"] is False


def test_a_condition_reads_only_knobs_declared_before() -> None:
    names = [knob.name for knob in KNOBS]
    assert names.index("method") < names.index("lora_rank")
    assert names.index("zero_stage") < min(names.index(name) for name in ("offload_optimizer", *STAGE3))
    assert all(BY_NAME[name].is_active({"zero_stage": 3}) for name in STAGE3)
