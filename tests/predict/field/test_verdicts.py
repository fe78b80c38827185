"""Whether a run fits, and what binds (field cases A8, A23, A24, B6)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from field.pricing import GB, GIB, plain, price, usable_bytes, zero
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Point, Profile
from orchestrator.predict.memory import bill
from orchestrator.predict.overhead import CUDA

Profiles = Mapping[str, Profile]


@dataclass(frozen=True)
class OutOfMemory:
    """A full fine-tuning run with ZeRO-2 that its user expected to fit by the textbook's formula."""

    thread: str
    structure: str
    tokens: int
    ranks: int
    device: str
    textbook_gib: float


RAN_OUT = (
    OutOfMemory("LlamaFactory 1158", "baichuan2_13b_full", 1536, 4, "a100-80", 71.2),
    OutOfMemory("LlamaFactory 6752", "qwen25_3b_full", 512, 4, "rtx3090", 15.8),
)


@pytest.mark.parametrize("case", RAN_OUT, ids=lambda case: case.thread)
@pytest.mark.structures(*(case.structure for case in RAN_OUT))
def test_a8_what_the_textbook_lets_pass_does_not_fit(profiles: Profiles, case: OutOfMemory) -> None:
    # examples/deepspeed/ds_z2_config.json of LlamaFactory: overlap_comm, and no optimizer, so that it is PyTorch's
    job = zero(2, case.ranks, Point(1, case.tokens), overlap_comm=True, optimizer_loop="foreach")
    verdict = price(profiles[case.structure], job, usable_bytes(case.device))
    assert case.textbook_gib * GIB < usable_bytes(case.device)
    assert verdict.fits is False
    assert verdict.bill.binding_phase in (Phase.INIT, Phase.OPTIMIZER_STEP)


@pytest.mark.structures("qwen15_7b_full")
def test_a8_a_run_that_ran_out_is_on_the_edge(profiles: Profiles) -> None:
    """LlamaFactory 4133: its user expected 26 GB. LlamaFactory makes trained weights float32 on the device before the
    engine halves them, whose freed blocks may be too cut up for the flat copy; the bill begins with 16-bit weights."""
    card = usable_bytes("a100-40")
    verdict = price(profiles["qwen15_7b_full"], zero(2, 8, Point(1, 512), overlap_comm=True), card)
    assert verdict.needed_bytes > 0.95 * card > 26 * GB
    assert verdict.probability_fits is not None
    assert verdict.probability_fits < 0.9
    assert verdict.bill.binding_phase is Phase.OPTIMIZER_STEP


@pytest.mark.structures("qwen_14B_full")
def test_a8_qwen_14b_on_32_cards_needs_far_more_than_the_textbook_says(profiles: Profiles) -> None:
    verdict = price(profiles["qwen_14B_full"], zero(2, 32, Point(1, 2048), overlap_comm=True))
    textbook_gib = 32.2
    assert verdict.needed_bytes > 55 * GB > textbook_gib * GIB
    # the flat copy of all weights beside the weights themselves
    assert verdict.bill.binding_phase is Phase.INIT


@pytest.mark.structures("llama_7b_lora", "llama_7b_lora_fp32_base", "llama_7b_lora_kept")
def test_a23_lora_on_7b_fits_or_not_by_dtype_and_checkpointing(profiles: Profiles) -> None:
    job, card = plain(Point(1, 2048, 64)), usable_bytes("a40")
    assert price(profiles["llama_7b_lora"], job, card).fits
    assert price(profiles["llama_7b_lora"], job, usable_bytes("a100-40")).fits
    assert not price(profiles["llama_7b_lora_kept"], job, usable_bytes("rtx3090")).fits
    needed = {
        name: price(profiles[f"llama_7b_{name}"], job).needed_bytes for name in ("lora", "lora_fp32_base", "lora_kept")
    }
    assert needed["lora_fp32_base"] > needed["lora"] + 12 * GIB
    assert needed["lora_kept"] > needed["lora"] + 8 * GIB


@pytest.mark.slow
@pytest.mark.structures("llama_70b_qlora")
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_a24_loading_binds_where_every_rank_reads_all_quantised_weights(
    profiles: Profiles, engine: Literal["fsdp", "deepspeed"]
) -> None:
    profile = profiles["llama_70b_qlora"]
    job = replace(zero(3, 4, Point(1, 512, 16)), engine=engine)
    whole = bill(profile, replace(job, quantised_storage="uint8"), CUDA)
    assert whole.phases[Phase.LOAD]["frozen_weights"] > usable_bytes("rtx4090")
    shards = bill(profile, job, CUDA)
    # seen after loading: near 10 GB on each of four cards
    assert shards.steady_allocated_bytes < 15 * GIB
    assert shards.phases[Phase.OPTIMIZER_STEP]["frozen_weights"] == pytest.approx(10 * GB, rel=0.15)


@pytest.mark.slow
@pytest.mark.structures("llama_70b_qlora")
def test_b6_quantised_weights_are_divided_only_when_they_are_stored_in_16_bits(profiles: Profiles) -> None:
    profile, point = profiles["llama_70b_qlora"], Point(1, 512, 8)
    for job in (zero(3, 2, point), zero(3, 8, point)):
        divided, whole = (
            bill(profile, one, CUDA).phases[Phase.OPTIMIZER_STEP]["frozen_weights"]
            for one in (job, zero(3, job.world_size, point, quantised_storage="uint8"))
        )
        assert whole > 33 * GIB
        assert divided < whole / job.world_size + 4 * GIB
