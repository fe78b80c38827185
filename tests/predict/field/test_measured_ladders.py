"""Published ladders of peaks: one model, one setting changed at a time (field cases A1, A2, A5 to A7)."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from field.pricing import (
    GB,
    GIB,
    MIB,
    auto_buckets,
    device_overhead,
    plain,
    price,
    relative_error,
    usable_bytes,
    zero,
)
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Point, Profile
from orchestrator.predict.job import OptimizerRule
from orchestrator.predict.overhead import CUDA
from orchestrator.predict.verdict import Verdict

Profiles = Mapping[str, Profile]
CONTEXT_OF_V100_BYTES = 1343 * MIB
"""As the source of A1 states it."""


@dataclass(frozen=True)
class Rung:
    """A line of A1: what ran, and what nvidia-smi showed."""

    name: str
    structure: str
    micro_batch: int
    optimizer: OptimizerRule
    device_mib: int


LADDER = (
    Rung("a", "bert_fp32", 4, "adamw", 14949),
    Rung("b", "bert_fp32", 1, "adamw", 8681),
    Rung("c", "bert_fp32_checkpointed", 1, "adamw", 6775),
    Rung("d", "bert_amp", 4, "adamw", 13939),
    Rung("e", "bert_amp_checkpointed", 1, "adamw", 7275),
    Rung("f", "bert_fp32", 4, "adafactor", 12295),
    Rung("g", "bert_amp_checkpointed", 1, "adafactor", 4847),
    Rung("h", "bert_fp32", 4, "adamw_8bit", 13085),
    Rung("i", "bert_amp_checkpointed", 1, "adamw_8bit", 5363),
)
BERT = ("bert_fp32", "bert_fp32_checkpointed", "bert_amp", "bert_amp_checkpointed")


def bert(profiles: Profiles, rung: Rung) -> Verdict:
    """PyTorch before 2.0 zeroed gradients after a step instead of dropping them, so that every micro-step finds those
    of the one before, as when gradients accumulate."""
    job = plain(
        Point(rung.micro_batch, 512), gradient_accumulation=2, optimizer=rung.optimizer, optimizer_loop="for_loop"
    )
    return price(profiles[rung.structure], job, overhead=device_overhead(CONTEXT_OF_V100_BYTES))


def device_bytes(verdict: Verdict, context_bytes: int) -> int:
    """What a driver's tool shows: the middle of what the allocator may reserve, and the context."""
    return sum(verdict.reserved_bytes) // 2 + context_bytes


def softmax_inputs_bytes(rung: Rung) -> int:
    """What eager attention kept for the backward pass up to PyTorch 1.10 beside what it keeps now: softmax's input, in
    float32 (`_softmax_backward_data` had an argument `self`)."""
    layers, heads, tokens = 24, 16, 512
    return 0 if "checkpointed" in rung.structure else 4 * layers * heads * rung.micro_batch * tokens**2


@pytest.mark.structures(*BERT)
def test_a1_bert_large_in_nine_settings(profiles: Profiles) -> None:
    predicted = {
        rung.name: device_bytes(bert(profiles, rung), CONTEXT_OF_V100_BYTES) + softmax_inputs_bytes(rung)
        for rung in LADDER
    }
    errors = {rung.name: relative_error(predicted[rung.name], rung.device_mib * MIB) for rung in LADDER}
    assert max(map(abs, errors.values())) < 0.10, errors
    # mixed precision adds 16-bit copies to float32 weights, which costs more than it saves once activations are few
    assert predicted["e"] > predicted["c"]
    assert 0.85 * predicted["a"] < predicted["d"] < predicted["a"]
    stated_order = sorted(LADDER, key=lambda rung: rung.device_mib)
    by_prediction = sorted(LADDER, key=lambda rung: predicted[rung.name])
    assert [stated_order.index(rung) for rung in by_prediction] == pytest.approx(range(9), abs=1)


@pytest.mark.structures("bert_fp32")
def test_a1_names_what_binds(profiles: Profiles) -> None:
    assert bert(profiles, LADDER[0]).bill.binding_term == "activations"
    assert bert(profiles, LADDER[1]).bill.binding_term == "optimizer_states"


CONTEXT_OF_A100_BYTES = round(0.92 * GIB)
"""torch 2.1 without lazy loading (stas00/ml-engineering, debug/memory)."""
SEQUENCES = (256, 512, 1024, 2048, 4096, 8192)
QWEN: dict[str, tuple[float, ...]] = {
    "1_8B_lora": (6.7, 7.4, 8.4, 11.0, 16.2, 21.8),
    "1_8B_lora_emb": (13.7, 14.0, 14.0, 15.1, 19.7, 27.7),
    "1_8B_qlora": (5.8, 6.0, 6.6, 7.8, 10.2, 15.8),
    "1_8B_full": (43.5, 43.5, 43.5, 43.5, 47.1, 48.3),
    "7B_lora": (20.1, 20.4, 21.5, 23.8, 29.7, 36.6),
    "7B_lora_emb": (33.7, 34.1, 35.2, 35.1, 39.2, 48.5),
    "7B_qlora": (11.5, 11.5, 12.3, 13.9, 16.9, 23.5),
    "14B_lora": (34.6, 35.1, 35.3, 37.4, 42.5, 55.2),
    "14B_lora_emb": (51.2, 51.1, 51.5, 54.1, 56.8, 67.7),
    "14B_qlora": (18.7, 18.4, 18.9, 19.9, 23.0, 27.9),
    "72B_qlora": (61.4, 61.4, 62.9, 64.1, 68.0, 75.6),
}
"""One card, micro-batch 1, accumulation 8: `G` as printed, at each of SEQUENCES. Its unit is taken to be 2^30 bytes."""
TOO_LOW = {
    *((row, tokens) for row in ("1_8B_qlora", "7B_qlora") for tokens in (4096, 8192)),
    ("1_8B_qlora", 2048),
    ("14B_qlora", 4096),
    *(("1_8B_lora_emb", tokens) for tokens in (256, 512, 1024)),
}
"""Rows that are missed (docs/field-cases.md): quantised ones lack about four bytes a token and word of the vocabulary,
the same at every size; of the small model with trained embeddings 2 GiB lack."""
CONFIG_ZERO2 = {"reduce_bucket_size": 200_000_000, "allgather_bucket_size": 200_000_000, "overlap_comm": True}
"""finetune/ds_config_zero2.json of QwenLM/Qwen, which its scripts for quantised and for all weights name."""


def qwen(profiles: Profiles, row: str, tokens: int) -> Verdict:
    if (row.endswith("lora") and not row.endswith("qlora")) or row.endswith("emb"):
        job = plain(Point(1, tokens, 64), gradient_accumulation=8, optimizer_loop="foreach")
    else:
        rank = 64 if row.endswith("qlora") else 0
        job = zero(2, 1, Point(1, tokens, rank), gradient_accumulation=8, **CONFIG_ZERO2)
    return price(profiles[f"qwen_{row}"], job)


def qwen_errors(profiles: Profiles, row: str, sequences: tuple[int, ...]) -> dict[int, float]:
    stated = dict(zip(SEQUENCES, QWEN[row], strict=True))
    return {
        tokens: relative_error(device_bytes(qwen(profiles, row, tokens), CONTEXT_OF_A100_BYTES), stated[tokens] * GIB)
        for tokens in sequences
    }


@pytest.mark.parametrize(
    ("row", "sequences"),
    [
        ("1_8B_lora", (256, 2048, 8192)),
        ("1_8B_lora_emb", (2048, 8192)),
        ("1_8B_qlora", (256,)),
        ("1_8B_full", (256, 8192)),
        ("7B_lora", (256, 8192)),
    ],
)
@pytest.mark.structures("qwen_1_8B_lora", "qwen_1_8B_lora_emb", "qwen_1_8B_qlora", "qwen_1_8B_full", "qwen_7B_lora")
def test_a2_qwen_by_method_and_length(profiles: Profiles, row: str, sequences: tuple[int, ...]) -> None:
    errors = qwen_errors(profiles, row, sequences)
    assert max(map(abs, errors.values())) < 0.15, errors


@pytest.mark.slow
@pytest.mark.parametrize("row", QWEN)
@pytest.mark.structures(*(f"qwen_{row}" for row in QWEN))
def test_a2_all_rows_of_one_card(profiles: Profiles, row: str) -> None:
    errors = qwen_errors(profiles, row, SEQUENCES)
    missed = {tokens: error for tokens, error in errors.items() if (row, tokens) in TOO_LOW}
    others = [abs(error) for tokens, error in errors.items() if tokens not in missed]
    assert max(others) < 0.15, errors
    assert all(-0.30 < error < 0 for error in missed.values()), errors


@pytest.mark.structures("qwen_1_8B_full")
def test_a2_the_peak_of_full_training_does_not_move_before_the_step_is_passed(profiles: Profiles) -> None:
    short, long = (qwen(profiles, "1_8B_full", tokens).bill for tokens in (256, 2048))
    assert short.peak_allocated_bytes == long.peak_allocated_bytes
    assert short.binding_phase is Phase.OPTIMIZER_STEP


@pytest.mark.structures("qwen_1_8B_lora", "qwen_1_8B_lora_emb")
def test_a2_embeddings_and_head_that_are_trained_cost_gradients_and_states(profiles: Profiles) -> None:
    without, beside = (qwen(profiles, row, 256).bill for row in ("1_8B_lora", "1_8B_lora_emb"))
    assert beside.peak_allocated_bytes - without.peak_allocated_bytes > 5 * GIB
    terms = beside.phases[Phase.OPTIMIZER_STEP]
    assert terms["optimizer_states"] > 5 * without.phases[Phase.OPTIMIZER_STEP]["optimizer_states"]


@pytest.mark.slow
@pytest.mark.structures("qwen_7B_full", "qwen_72B_lora", "qwen_72B_lora_emb")
def test_a2_rows_of_several_cards_are_sums(profiles: Profiles) -> None:
    """The bill is of one device; the source adds all up."""
    context_bytes = CONTEXT_OF_A100_BYTES + CUDA.communicator_bytes
    for structure, ranks, rank, hidden, rows in (
        ("qwen_7B_full", 2, 0, 4096, {256: 139.2, 512: 148.0, 1024: 162.0}),
        ("qwen_72B_lora", 4, 64, 8192, {256: 215.4, 2048: 228.8, 8192: 289.2}),
    ):
        for tokens, stated in rows.items():
            job = zero(3, ranks, Point(1, tokens, rank), gradient_accumulation=8, overlap_comm=True,
                       **auto_buckets(hidden))  # fmt: skip
            verdict = price(profiles[structure], job)
            assert ranks * device_bytes(verdict, context_bytes) == pytest.approx(stated * GIB, rel=0.15)
            assert verdict.needed_bytes < usable_bytes("a100-80")
    without = price(profiles["qwen_72B_lora"], zero(2, 4, Point(1, 256, 64), **CONFIG_ZERO2), usable_bytes("a100-80"))
    assert without.fits is False
    # ran out: that PEFT and DeepSpeed left copies of embeddings and head whole, where the installed ones divide them
    job = zero(3, 4, Point(1, 256, 64), overlap_comm=True, **auto_buckets(8192))
    divided = price(profiles["qwen_72B_lora_emb"], job).needed_bytes
    whole_bytes = 2 * 152_064 * 8192 * 16
    assert divided < usable_bytes("a100-80") < divided + whole_bytes * 3 // 4


@pytest.mark.slow
@pytest.mark.structures("llama_70b_lora")
def test_a5_llama_70b_lora_over_eight_devices(profiles: Profiles) -> None:
    job = zero(3, 8, Point(8, 2048, 8), gradient_accumulation=4, **auto_buckets(8192))
    verdict = price(profiles["llama_70b_lora"], job)
    context_bytes = CUDA.context_bytes + CUDA.communicator_bytes
    assert device_bytes(verdict, context_bytes) == pytest.approx(64 * GB, rel=0.15)
    assert verdict.bill.binding_term == "activations"
    terms = verdict.bill.phases[verdict.bill.binding_phase]
    assert terms["frozen_weights"] == pytest.approx(16.1 * GIB, rel=0.01)


@pytest.mark.slow
@pytest.mark.structures("llama_70b_qlora")
def test_a6_llama_70b_qlora_over_two_devices_of_40_gb(profiles: Profiles) -> None:
    job = zero(3, 2, Point(2, 2048, 8), gradient_accumulation=2, **auto_buckets(8192))
    verdict = price(profiles["llama_70b_qlora"], job, usable_bytes("a100-40"))
    assert verdict.fits
    assert verdict.needed_bytes == pytest.approx(36.6 * GB, rel=0.15)
    assert verdict.bill.binding_term == "frozen_weights"


@dataclass(frozen=True)
class Readme:
    """A line of A7: peaks on an A100 of 80 GB and on its host, in GiB; None: out of memory."""

    name: str
    full_gib: float | None
    lora_gib: float
    offloaded_gib: float
    host_gib: float


READMES = (
    Readme("t0_3b", 47.14, 14.4, 9.8, 17.8),
    Readme("mt0_xxl", None, 56, 22, 52),
    Readme("bloomz_7b", None, 32, 18.1, 35),
)
OFFLOADED_TOO_LOW = {"bloomz_7b"}


@pytest.mark.slow
@pytest.mark.parametrize("line", READMES, ids=lambda line: line.name)
@pytest.mark.structures(*(f"{line.name}_{method}" for line in READMES for method in ("full", "lora")))
def test_a7_full_lora_and_offload_on_one_card(profiles: Profiles, line: Readme) -> None:
    """Eight rows of 64 tokens, as the examples behind the table have them."""
    card = usable_bytes("a100-80")
    full = price(profiles[f"{line.name}_full"], plain(Point(8, 64), optimizer_loop="for_loop"), card)
    lora = price(profiles[f"{line.name}_lora"], plain(Point(8, 64, 8), optimizer_loop="for_loop"), card)
    if line.full_gib is None:
        assert full.fits is False
        assert full.bill.binding_term == "optimizer_states"
    else:
        assert full.fits
        assert full.bill.peak_allocated_bytes == pytest.approx(line.full_gib * GIB, rel=0.25)
    assert lora.fits
    assert lora.bill.binding_term == "frozen_weights"
    assert lora.bill.peak_allocated_bytes == pytest.approx(line.lora_gib * GIB, rel=0.25)
    offloads = {"offload_optimizer": "cpu", "offload_param": "cpu", "pin_memory": False}
    offloaded = price(profiles[f"{line.name}_lora"], zero(3, 1, Point(8, 64, 8), **offloads), card).bill
    assert offloaded.peak_host_bytes == pytest.approx(line.host_gib * GIB, rel=0.25)
    assert offloaded.peak_allocated_bytes < 0.8 * lora.bill.peak_allocated_bytes
    if line.name not in OFFLOADED_TOO_LOW:
        assert offloaded.peak_allocated_bytes == pytest.approx(line.offloaded_gib * GIB, rel=0.25)
