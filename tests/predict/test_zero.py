"""What engines add, against sums worked out by hand and published peaks."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.contract.profile import Parameter, Point
from orchestrator.predict.engine import engine_terms
from orchestrator.predict.gradients import gradient_timeline
from orchestrator.predict.job import Job
from orchestrator.predict.terms import add, total
from orchestrator.predict.weights import pinned_bytes, weights_of
from orchestrator.predict.zero import parts

GIB = 2**30
POINT = Point(1, 16)
MISTRAL_7B = 7_241_732_096
LLAMA_3_8B = 8_030_261_248
BAICHUAN2_13B = 13_900_000_000


def job(**settings: Any) -> Job:
    return Job(**{"point": POINT, **settings})


def weight(numel: int, **settings: Any) -> Parameter:
    return Parameter(
        **{"name": f"w{numel}", "numel_fixed": numel, "bytes_per_element": 2, "is_trained": True, **settings}
    )


def model(numel: int, layers: int = 32, bytes_per_element: float = 2) -> tuple[Parameter, ...]:
    """`layers` equal layers of four weights, and a root of the size of one of their weights."""
    share = numel // (4 * layers + 1)
    inner = [weight(share, layer=number // 4, bytes_per_element=bytes_per_element) for number in range(4 * layers)]
    return (weight(numel - 4 * layers * share, bytes_per_element=bytes_per_element), *inner)


def peak(parameters: tuple[Parameter, ...], run: Job, precision: Any = "bf16") -> int:
    terms = engine_terms(parameters, run, precision)
    return total(terms.resident) + total(terms.step)


def test_parts_of_the_flat_weights_start_on_four_bytes_and_keep_edges_whole() -> None:
    weights = weights_of([weight(5), weight(3), weight(2), weight(7, is_trained=False)], job(), "bf16")
    first, second = parts(weights, 2)
    assert (first.numel, first.pieces, first.whole_numel()) == (6, (5, 1), 8)
    assert (second.numel, second.pieces, second.whole_numel()) == (6, (2, 2), 5)


def test_zero_2_of_13b_on_four_cards_has_no_room_for_its_update() -> None:
    """The run failed at a request of 12.94 GiB beside 77.65 GiB: beside weights, masters, states, gradients and their
    flat copy (6 bytes a weight) the float32 copy of the gradients did not fit."""
    parameters = model(BAICHUAN2_13B)
    run = job(world_size=4, ranks_on_node=4, zero_stage=2)
    request = 4 * BAICHUAN2_13B / 4
    assert request / GIB == pytest.approx(12.94, rel=0.001)
    assert (peak(parameters, run) - request) / GIB == pytest.approx(77.65, rel=0.005)
    assert total(engine_terms(parameters, run, "bf16").init) < peak(parameters, run)


@pytest.mark.parametrize(
    ("numel", "settings", "published_gib"),
    [
        (MISTRAL_7B, {"engine": "torch", "master_dtype": None}, 67.460),
        (MISTRAL_7B, {"engine": "fsdp", "world_size": 2, "master_dtype": None}, 33.738),
        (LLAMA_3_8B, {"engine": "torch", "master_dtype": None}, 74.802),
        (LLAMA_3_8B, {"engine": "fsdp", "world_size": 2, "master_dtype": "fp32"}, 74.804),
    ],
    ids=["one card", "two cards", "one card, 8B", "two cards, mixed precision"],
)
def test_the_update_of_full_fine_tuning_is_the_peak(numel: int, settings: dict[str, Any], published_gib: float) -> None:
    run = job(**settings, optimizer_loop="foreach")
    assert peak(model(numel), run) / GIB == pytest.approx(published_gib, rel=0.001)


@pytest.mark.parametrize(("ranks", "published_gib"), [(2, 36.302), (4, 25.865), (8, 20.662)])
def test_fsdp_with_accumulation_keeps_whole_gradients_on_every_rank(ranks: int, published_gib: float) -> None:
    """Two micro-steps of two to eight rows: beside the floor lie only gathered units, activations and logits."""
    run = job(engine="fsdp", world_size=ranks, master_dtype=None, gradient_accumulation=2)
    terms = engine_terms(model(MISTRAL_7B), run, "bf16")
    floor_gib = total(add(terms.resident, terms.between)) / GIB
    assert terms.between["gradients"] == 2 * MISTRAL_7B
    assert 1.5 < published_gib - floor_gib < 3.0


def test_reduce_buckets_are_as_large_for_few_trained_weights() -> None:
    parameters = (weight(10_000, is_trained=False), weight(100))
    run = job(world_size=2, zero_stage=2, reduce_bucket_size=1_000)
    first = gradient_timeline(parameters, run, "bf16", [1])
    overlapping = gradient_timeline(parameters, replace(run, overlap_comm=True), "bf16", [1])
    assert first.live_bytes.tolist() == [2_000]
    assert overlapping.live_bytes.tolist() == [4_000]
    assert engine_terms(parameters, replace(run, zero_stage=3), "bf16").resident["reduce_buckets"] == 2_000


def test_a_bucket_of_stage_2_fills_and_flushes() -> None:
    parameters = tuple(weight(numel) for numel in (40, 40, 30, 10, 40))
    timeline = gradient_timeline(
        parameters, job(world_size=2, zero_stage=2, reduce_bucket_size=60), "bf16", [4, 3, 2, 1, 0]
    )
    bucket = 120
    # the parts hold 80 elements each; the second one keeps gradients 2, 3 and 4 (80), the first 0 and 1
    assert timeline.live_bytes.tolist() == [bucket, bucket, bucket + 160, bucket + 160, bucket + 160]
    assert timeline.peak_bytes.tolist() == [
        bucket + 80,
        bucket + 20,
        bucket + 60 + 160,
        bucket + 160 + 80,
        bucket + 160 + 80,
    ]
    assert timeline.kept_bytes == 160


def test_gradients_of_a_plain_loop_add_up_and_then_stay() -> None:
    parameters = (weight(40), weight(8))
    first = gradient_timeline(parameters, job(engine="torch"), "bf16", [1, 0], accumulates=False, is_last=False)
    second = gradient_timeline(parameters, job(engine="torch"), "bf16", [1, 0], accumulates=True)
    assert first.live_bytes.tolist() == [16, 96]
    assert (second.opening_bytes, second.peak_bytes.tolist()) == (96, [112, 176])


def test_fsdp_flattens_and_divides_the_gradients_of_a_whole_unit() -> None:
    parameters = (weight(40), weight(10, layer=0), weight(6, layer=0))
    run = job(engine="fsdp", world_size=2, master_dtype=None)
    timeline = gradient_timeline(parameters, run, "bf16", [2, 1, 0])
    assert timeline.live_bytes.tolist() == [12, 16, 16 + 40]
    assert timeline.peak_bytes.tolist() == [12, 32 + 32 + 16, 16 + 80 + 80 + 40]
    kept = gradient_timeline(parameters, run, "bf16", [2, 1, 0], is_last=False)
    assert kept.kept_bytes == 2 * 56
    last = gradient_timeline(parameters, run, "bf16", [2, 1, 0], accumulates=True)
    assert last.live_bytes.tolist() == [112 + 12, 112 - 32 + 16, 56]


def test_quantised_weights_are_sharded_without_their_scales() -> None:
    base = weight(64_000, is_trained=False, bytes_per_element=4.5 / 8)
    run = job(world_size=4, zero_stage=3, stage3_param_persistence_threshold=0)
    terms = engine_terms([base, weight(4)], run, "bf16")
    assert terms.resident["frozen_weights"] == 64_000 // 2 // 4 + 64_000 // 16


def test_deepspeed_casts_adapters_unless_the_model_was_built_in_shards() -> None:
    adapters = (weight(1_000, is_trained=False), weight(100, bytes_per_element=4))
    whole = engine_terms(adapters, job(world_size=2, zero_stage=2), "bf16")
    sharded = engine_terms(adapters, job(world_size=2, zero_stage=3, stage3_param_persistence_threshold=0), "bf16")
    plain = engine_terms(adapters, job(engine="torch", world_size=2, master_dtype=None), "bf16")
    assert whole.resident["trained_weights"] == 200
    assert sharded.resident["trained_weights"] == 200  # half of them, in float32
    assert plain.resident["trained_weights"] == 400
    assert plain.resident["reduce_buckets"] == 400


def test_an_offloaded_optimizer_lies_on_the_host_of_its_ranks() -> None:
    parameters = model(1_000_000)
    run = job(world_size=4, ranks_on_node=2, zero_stage=2, offload_optimizer="cpu", pin_memory=False)
    terms = engine_terms(parameters, run, "bf16")
    assert not {"master_weights", "optimizer_states"} & terms.resident.keys()
    assert terms.host["offloaded_optimizer"] == 2 * (16 * 250_000 + 4)
    pinned = engine_terms(parameters, replace(run, pin_memory=True), "bf16")
    padding = 2 * (2**20 - 1_000_000)
    assert pinned.host["pinned_buffers"] - terms.host["pinned_buffers"] >= 2 * padding


def test_pinned_host_memory_is_rounded_up_to_a_power_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 3 * GIB, 4 * GIB)] == [0, 1, 4 * GIB, 4 * GIB]


def test_every_rank_loads_a_copy_unless_the_model_is_built_in_shards() -> None:
    parameters = model(1_000_000)
    whole = engine_terms(parameters, job(world_size=8, ranks_on_node=8, zero_stage=3, loads_sharded=False), "bf16")
    sharded = engine_terms(parameters, job(world_size=8, ranks_on_node=8, zero_stage=3), "bf16")
    assert whole.host_load == {"load_copy": 8 * 2_000_000}
    assert sharded.host_load == {"load_copy": 2_000_000}


def test_nvme_takes_the_optimizer_from_host_to_disk() -> None:
    run = job(world_size=2, ranks_on_node=2, zero_stage=3, offload_optimizer="nvme", sub_group_size=100_000)
    terms = engine_terms(model(1_000_000), run, "bf16")
    assert "offloaded_optimizer" not in terms.host
    assert terms.disk_bytes == pytest.approx(16 * 1_000_000, rel=0.001)
