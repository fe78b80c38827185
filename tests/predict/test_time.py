"""The clock against figures worked out by hand, what must slow a step down, and orders that published runs show."""

from dataclasses import replace

import pytest

from orchestrator.contract.config import Precision
from orchestrator.contract.profile import LossPath, Point, Profile
from orchestrator.predict.constants import CPU_CLOCK, CUDA_CLOCK
from orchestrator.predict.job import Job
from orchestrator.predict.machine import Links, cpu_links, cpu_processor, device_links, processor
from orchestrator.predict.time import StepTime, step_time
from orchestrator.predict.work import step_work
from orchestrator.spec.hardware import BETWEEN_NODES, BY_KEY
from tests.predict.profiles import decoder

A100 = BY_KEY["a100-80"]
# Llama-2-7B without its embedding: 32 layers of 4 x 4096^2 + 3 x 4096 x 11008, and the head of 32000 x 4096
BODY, HEAD = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096


@pytest.fixture(scope="module")
def full() -> Profile:
    return decoder()


@pytest.fixture(scope="module")
def full_checkpointed() -> Profile:
    return decoder(checkpointing=True)


@pytest.fixture(scope="module")
def lora_checkpointed() -> Profile:
    return decoder(lora=True, checkpointing=True)


def _job(micro_batch: int = 4, sequence_tokens: int = 2048, lora_rank: int = 0, **more: object) -> Job:
    return Job(point=Point(micro_batch, sequence_tokens, lora_rank), **more)  # type: ignore[arg-type]


def _time(profile: Profile, job: Job, device: str = "a100-80", between: str | None = None, **more: float) -> StepTime:
    links = device_links(BY_KEY[device], BETWEEN_NODES[between] if between else None)
    return step_time(profile, job, processor(BY_KEY[device]), links, CUDA_CLOCK, **more)


def test_products_of_llama_2_7b_on_an_a100_by_hand(full: Profile) -> None:
    found = _time(full, _job())
    tokens = 4 * 2048
    # 271.2 TFLOP/s are the best product of an A100; nine tenths of it in a step
    rate = 271.2e12 * 0.9
    forward = {term.name: term.busy_s for term in found.terms if term.phase == "forward"}
    assert forward["linear"] == pytest.approx(2 * (BODY + HEAD) * tokens / rate)
    # 32 layers, two products of 4096 numbers for half of 2048^2 pairs a row
    assert forward["attention"] == pytest.approx(4 * 32 * 2 * 2 * 4096 * 2048**2 / 2 / (312e12 * 0.6))
    assert found.busy_s("compute", "backward") == pytest.approx(2 * forward["linear"] + 2.5 * forward["attention"])
    assert found.model_flops == pytest.approx(6 * (BODY + HEAD) * tokens + 3.5 * 4 * 32 * 2 * 4096 * 2048**2)
    assert found.mfu == pytest.approx(found.model_flops / found.step_s / 312e12)
    assert found.hfu == found.mfu
    assert found.binding.name == "linear"
    assert found.step_s == pytest.approx(sum(term.exposed_s for term in found.terms))


def test_optimizer_of_llama_2_7b_on_an_a100_by_hand(full: Profile) -> None:
    numel = BODY + 2 * HEAD + 65 * 4096
    fused = _time(full, _job()).busy_s("optimizer")
    # bf16 gradient to fp32 (6), its norm (4), AdamW over seven fp32 tensors (28), weights back to bf16 (6)
    assert fused == pytest.approx(numel * 44 / (2039e9 * 0.8))
    assert _time(full, _job(optimizer_loop="foreach")).busy_s("optimizer") == pytest.approx(numel * 96 / (2039e9 * 0.8))
    pure = _time(full, _job(engine="torch", master_dtype=None)).busy_s("optimizer")
    assert pure == pytest.approx(numel * 16 / (2039e9 * 0.8))


def test_ring_collectives_by_hand(full: Profile) -> None:
    numel = BODY + 2 * HEAD + 65 * 4096
    steps = _time(full, _job(world_size=8, ranks_on_node=8, zero_stage=2, reduce_bucket_size=10**12))
    reduced = next(term for term in steps.terms if term.name == "gradients")
    # seven eighths twice over 300 GB/s in each direction, of which 0.8 are reached; two rounds of seven hops;
    # and read from the gradients and written into the bucket once
    copied_s = 2 * 2 * numel / (2039e9 * 0.8)
    assert reduced.busy_s == pytest.approx(2 * (7 / 8 * 2 * numel / 240e9 + 7 * 3.6e-6) + copied_s)
    assert reduced.exposed_s == reduced.busy_s


def test_gradients_hide_behind_the_backward_pass_where_the_engine_overlaps_them(full: Profile) -> None:
    job = _job(world_size=8, ranks_on_node=8, zero_stage=2)
    waits = _time(full, job)
    overlaps = _time(full, replace(job, overlap_comm=True))
    assert waits.exposed_s("collective", "backward") == waits.busy_s("collective", "backward") > 0.07
    assert overlaps.busy_s("collective") == waits.busy_s("collective")
    # at most half of what crosses links hides; copies into buckets do not
    assert 0.5 < overlaps.exposed_s("collective", "backward") / overlaps.busy_s("collective", "backward") < 0.6
    # nothing to hide behind: three tokens are computed sooner than gradients meet
    short = _time(full, replace(job, overlap_comm=True, point=Point(1, 3)), "h100-pcie")
    assert short.exposed_s("collective", "backward") > 0.6 * short.busy_s("collective", "backward")


def test_published_shares_of_an_a100_come_out(full_checkpointed: Profile, lora_checkpointed: Profile) -> None:
    """Mistral-7B at 4096 tokens, micro-batch 4, recomputed, with transformers' kernels: 60 % HFU full, 50 % LoRA r16
    (fms-acceleration, one A100-80). Llama-2-7B has the same hidden size and nearly as many weights."""
    pure = {"engine": "torch", "master_dtype": None, "optimizer_loop": "foreach"}
    full = _time(full_checkpointed, _job(4, 4096, **pure))
    lora = _time(lora_checkpointed, _job(4, 4096, 16, **pure))
    assert full.hfu == pytest.approx(0.60, abs=0.04)
    assert lora.hfu == pytest.approx(0.50, abs=0.05)
    assert lora.mfu < full.mfu - 0.05
    assert lora.tokens_per_second > full.tokens_per_second


def test_recomputing_costs_a_quarter_to_a_third(full: Profile, full_checkpointed: Profile) -> None:
    kept, recomputed = _time(full, _job()), _time(full_checkpointed, _job())
    assert 1.25 < recomputed.step_s / kept.step_s < 1.36
    assert recomputed.model_flops == kept.model_flops
    assert recomputed.hfu > recomputed.mfu


def test_3090s_without_nvlink_pay_for_gathering_weights(lora_checkpointed: Profile) -> None:
    """fsdp_qlora's benchmarks, 7B on two 3090: FSDP at micro-batch 1 is far behind at 6, DDP ahead of both."""

    def share(engine: str, micro_batch: int) -> float:
        job = _job(micro_batch, 512, 8, world_size=2, ranks_on_node=2, engine=engine)
        return _time(lora_checkpointed, job, "rtx3090").mfu

    assert share("fsdp", 1) < 0.7 * share("fsdp", 6) < 0.7 * share("torch", 6) * 1.01


def test_stage_3_is_slower_than_stage_2_over_a_slow_link_and_hides_behind_a_fast_one(full: Profile) -> None:
    """In each micro-step stage 2 moves twice the weights' bytes, an all-reduce; stage 3 three times, in part hidden."""

    def stage(zero_stage: int, between: str) -> float:
        job = _job(4, 2048, world_size=16, ranks_on_node=8, zero_stage=zero_stage, gradient_accumulation=8)
        return _time(full, job, between=between).step_s

    assert stage(3, "ethernet-25g") > 1.15 * stage(2, "ethernet-25g")
    assert stage(3, "infiniband-8x400g") < 1.05 * stage(2, "infiniband-8x400g")


def test_stage_3_costs_lora_most_since_frozen_weights_are_gathered_too(lora_checkpointed: Profile) -> None:
    def stage(zero_stage: int) -> float:
        job = _job(4, 2048, 8, world_size=16, ranks_on_node=8, zero_stage=zero_stage)
        return _time(lora_checkpointed, job, between="ethernet-25g").step_s

    assert stage(3) > 3 * stage(2)


def test_accumulation_spares_stage_1_and_not_stage_2_the_gradients(full: Profile) -> None:
    def gradients(stage: int, accumulation: int) -> float:
        job = _job(world_size=8, ranks_on_node=8, zero_stage=stage, gradient_accumulation=accumulation)
        return next(t.busy_s for t in _time(full, job).terms if t.name == "gradients")

    assert gradients(1, 4) == gradients(1, 1)
    assert gradients(2, 4) == pytest.approx(4 * gradients(2, 1))
    assert gradients(3, 4) == pytest.approx(4 * gradients(3, 1))


def test_frozen_weights_are_gathered_but_have_no_gradients_to_meet(lora_checkpointed: Profile) -> None:
    work = step_work(lora_checkpointed, _job(lora_rank=8, world_size=8, ranks_on_node=8, zero_stage=3))
    payload = {item.name: item.payload_bytes for item in work.collectives}
    assert payload["weights_forward"] == pytest.approx(2 * (BODY + 2 * HEAD), rel=1e-6)
    assert payload["gradients"] == 2 * 32 * 4 * 8 * 8192


def test_a_model_within_the_reuse_distance_is_gathered_once() -> None:
    small = decoder(hidden=896, layers=24, intermediate=4864, vocabulary=32000)
    work = step_work(small, _job(world_size=8, ranks_on_node=8, zero_stage=3))
    assert "weights_backward" not in {item.name for item in work.collectives}
    eager = replace(_job(world_size=8, ranks_on_node=8, zero_stage=3), stage3_max_reuse_distance=0)
    assert "weights_backward" in {item.name for item in step_work(small, eager).collectives}


def test_offloading_the_optimizer_moves_it_to_the_host_and_its_tensors_over_pcie(full: Profile) -> None:
    job = _job(world_size=8, ranks_on_node=8, zero_stage=2, offload_optimizer="cpu")
    found = _time(full, job)
    numel = BODY + 2 * HEAD + 65 * 4096
    # seven fp32 tensors, scaled (8) and rounded (6): 42 bytes a weight at half of 409.6 GB/s, all ranks together
    assert found.exposed_s("host_optimizer") == pytest.approx(42 * numel / 204.8e9)
    back = next(term for term in found.terms if term.name == "weights_from_host")
    assert back.exposed_s == pytest.approx(2 * numel / 8 / 25.6e9)
    assert found.exposed_s("optimizer") == 0
    assert found.binding.name == "host_update"
    assert _time(full, replace(job, pin_memory=False)).step_s > found.step_s
    assert _time(full, replace(job, offload_optimizer="nvme")).step_s > found.step_s


def test_offloaded_weights_cross_pcie_in_every_pass(full: Profile) -> None:
    job = _job(1, 512, zero_stage=3, world_size=2, ranks_on_node=2)
    offloaded = _time(full, replace(job, offload_param="cpu", stage3_prefetch_bucket_size=0))
    kept = _time(full, replace(job, stage3_prefetch_bucket_size=0))
    assert offloaded.exposed_s("transfer", "forward") == pytest.approx((BODY + 2 * HEAD) / 25.6e9, rel=1e-3)
    assert offloaded.step_s > kept.step_s


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_ranks_give_more_tokens_and_less_than_as_many_times_more(full: Profile, stage: int) -> None:
    def tokens(ranks: int) -> float:
        job = _job(world_size=ranks, ranks_on_node=min(ranks, 8), zero_stage=stage)
        return _time(full, job, between="infiniband-8x200g").tokens_per_second

    one, eight, sixteen = tokens(1), tokens(8), tokens(16)
    assert one < eight < sixteen
    # sharing the optimizer's work gives back what the exchange takes, in part
    assert sixteen < 2.02 * eight


@pytest.mark.parametrize("name", ["device_bytes_per_s", "host_link_bytes_per_s", "host_memory_bytes_per_s"])
def test_a_slower_link_never_makes_a_step_faster(full: Profile, name: str) -> None:
    job = _job(world_size=8, ranks_on_node=8, zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    links: Links = device_links(A100)
    slower = replace(links, **{name: getattr(links, name) / 10})
    times = [step_time(full, job, processor(A100), item, CUDA_CLOCK).step_s for item in (links, slower)]
    assert times[0] < times[1]


def test_small_batches_wait_for_launches_and_large_ones_do_not(lora_checkpointed: Profile) -> None:
    small, large = (_time(lora_checkpointed, _job(batch, 128, 8)) for batch in (1, 64))
    assert small.exposed_s("launch") > 0 == large.exposed_s("launch")
    assert large.mfu > 2 * small.mfu


def test_padding_is_work_that_counts_for_nothing(full: Profile) -> None:
    packed, padded = _time(full, _job()), _time(full, _job(), padding_fraction=0.25)
    assert padded.step_s == packed.step_s
    assert padded.hardware_flops == packed.hardware_flops
    assert padded.tokens_per_second == pytest.approx(0.75 * packed.tokens_per_second)
    assert padded.mfu < packed.mfu


def test_accumulation_changes_no_share_at_equal_tokens(full: Profile) -> None:
    """The step's own cost is paid once: four micro-steps are a little better than one."""
    once, four_times = _time(full, _job()), _time(full, _job(gradient_accumulation=4))
    assert four_times.model_flops == 4 * once.model_flops
    assert 1.0 < four_times.mfu / once.mfu < 1.10


def test_only_a_kernel_without_a_mask_leaves_out_the_pairs_that_a_causal_model_does_not_need(full: Profile) -> None:
    masked = replace(full, request=full.request.model_copy(update={"is_padded": True}))
    kernel, mask, eager = (step_work(profile, _job()) for profile in (full, masked, decoder(attention="eager")))
    assert kernel.model_flops == pytest.approx(mask.model_flops)
    assert kernel.model_flops == pytest.approx(eager.model_flops)
    pairs_flops = kernel.model_flops[1]
    assert kernel.hardware_flops == pytest.approx(sum(kernel.model_flops))
    for work in (mask, eager):
        assert work.hardware_flops == pytest.approx(kernel.hardware_flops + pairs_flops)


def test_eager_attention_is_slower_and_more_so_on_longer_rows() -> None:
    eager, fused = decoder(attention="eager"), decoder()
    slowdown = [_time(eager, _job(1, n)).step_s / _time(fused, _job(1, n)).step_s for n in (512, 8192)]
    assert 1.0 < slowdown[0] < slowdown[1]


def test_ranks_on_cpu_cores_use_the_same_laws() -> None:
    tiny = decoder(hidden=256, layers=4, intermediate=688, vocabulary=8192, dtype="fp32", device="cpu")
    cpu, links = cpu_processor({Precision.FP32: 100e9}), cpu_links(2)
    once, twice = (
        step_time(tiny, _job(batch, 128, world_size=2, ranks_on_node=2, zero_stage=2), cpu, links, CPU_CLOCK)
        for batch in (1, 2)
    )
    assert once.tokens_per_second < twice.tokens_per_second
    assert twice.step_s < 2 * once.step_s
    assert once.exposed_s("launch") == once.busy_s("launch") > 0
    assert 0 < twice.mfu < 1


def test_ranks_on_several_nodes_need_a_link_between_them(full: Profile) -> None:
    with pytest.raises(ValueError, match="16 ranks with 8 on a node need a link between nodes"):
        _time(full, _job(world_size=16, ranks_on_node=8))


def test_blocks_that_are_mapped_anew_and_gradients_in_buckets_take_time_on_a_core() -> None:
    """Logits of 2,048 tokens and 4,096 words are 32 MiB; a quarter of them is not."""
    tiny = decoder(hidden=64, layers=2, intermediate=128, vocabulary=4096, dtype="fp32", device="cpu")
    cpu, links = cpu_processor({Precision.FP32: 1e11}), cpu_links(1)

    def terms(batch: int, stage: int) -> dict[str, float]:
        job = _job(batch, 128, gradient_accumulation=16 // batch, zero_stage=stage)
        return {term.name: term.busy_s for term in step_time(tiny, job, cpu, links, CPU_CLOCK).terms}

    assert terms(16, 0)["fresh_memory"] > 0
    assert "fresh_memory" not in terms(4, 0)
    assert "gradient_buckets" not in terms(4, 0)
    # stage 1 copies once a step, stage 2 in each of four micro-steps
    assert terms(4, 2)["gradient_buckets"] == pytest.approx(4 * terms(4, 1)["gradient_buckets"])


def test_a_loss_fused_with_the_head_still_multiplies_by_it() -> None:
    """Forward, and backward to the input alone where the head is frozen: twice 2 FLOPs a token and weight."""
    frozen = decoder(hidden=64, layers=2, intermediate=128, vocabulary=4096, lora=True)
    fused = replace(frozen, request=frozen.request.model_copy(update={"loss": LossPath.FUSED_LINEAR}))
    more = step_work(fused, _job(2, 128)).hardware_flops - step_work(frozen, _job(2, 128)).hardware_flops
    assert more == pytest.approx(2 * 2 * 2 * 128 * 4096 * 64)
