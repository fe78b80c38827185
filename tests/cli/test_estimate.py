"""`brimful estimate`: the bill, the verdict and the change that would help, without a device."""

import json
import math
import re
from pathlib import Path

import pytest
from brimful_command import Workplace

from orchestrator.cli.estimate import EstimateRequest, estimated
from orchestrator.cli.estimate_answer import Answer
from orchestrator.cli.output import Output
from orchestrator.contract.config import Checkpointing, ModelSource
from orchestrator.contract.errors import UsageError
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Quantization, TraceRequest
from orchestrator.contract.units import GIB, MIB
from orchestrator.placement.tracing import trace_all
from orchestrator.predict.terms import total

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GOLDEN = Path(__file__).parent / "golden" / "estimate.json"


@pytest.fixture(scope="session")
def model(place: Workplace) -> Path:
    """A config.json of which all structures that these tests need are traced, in one process."""
    file = place.folder / "config.json"
    file.write_text(json.dumps(CONFIG))
    plain = TraceRequest(model=ModelSource(path=str(file)))
    recomputed = plain.model_copy(update={"gradient_checkpointing": Checkpointing.FULL})
    adapter = {"target_modules": "all-linear", "lora_dropout": 0.0}
    adapted = plain.model_copy(update={"adapter": adapter, "adapter_dtype": "bf16"})
    quantised = adapted.model_copy(update={"quantization": Quantization.NF4})
    autocast = plain.model_copy(update={"autocast": "bf16"})
    trace_all([plain, recomputed, adapted, quantised, autocast], place.folder / "home" / "cache")
    return file


def ask(
    place: Workplace,
    model: str | Path,
    device_memory: str | None = None,
    devices: int = 1,
    engine: str | None = None,
    quantization: str | None = None,
    **knobs: str,
) -> Answer:
    """The answer for a100-80 and rows of 512 tokens, without starting the command."""
    request = EstimateRequest(
        str(model), devices, 1, None, device_memory, None, 512, None, knobs, engine=engine, quantization=quantization
    )
    return estimated(request, place.folder / "home" / "cache", Output(quiet=True))


def as_golden(document: dict[str, object]) -> dict[str, object]:
    """Without what differs between machines: the model's path, versions, the last digits of odds and seconds."""
    numbers = {name: f"{value:.4g}" for name, value in document.items() if isinstance(value, float)}
    assumptions, bill = document["assumptions"], document["bill"]
    assert isinstance(assumptions, list)
    assert isinstance(bill, dict)
    terms = {name: bill[name] for name in ("phases", "device_overhead", "host")}
    return {**document, **numbers, "model": "config.json", "assumptions": assumptions[:-1], "bill": terms}


def test_the_whole_answer_as_json(place: Workplace, model: Path) -> None:
    run = place.run("estimate", "--model", model, "--micro-batch", "8", "--sequence-length", "512", "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert as_golden(document) == json.loads(GOLDEN.read_text())
    assert "torch" in document["assumptions"][-1]


def test_what_people_read(place: Workplace, model: Path) -> None:
    run = place.run(
        "estimate", "--model", model, "--micro-batch", "64", "--sequence-length", "512", "--device-memory", "1GiB"
    )
    assert run.returncode == 0, run.stderr
    assert "backward binds" in run.stdout
    assert "########################" in run.stdout
    assert "Verdict: does not fit (probability below 0.001)" in run.stdout
    assert "of 1.00 GiB" in run.stdout
    assert "Speed, predicted, not measured: " in run.stdout
    assert "Cheapest single change that makes it fit: micro_batch " in run.stdout
    assert "Assumed: device: a100-80 with 1GiB of memory, since no --device is given" in run.stdout


def test_peak_is_the_highest_phase_and_every_quantity_is_told_apart(place: Workplace, model: Path) -> None:
    answer = ask(place, model, micro_batch="8")
    phases = answer.bill.phases
    assert answer.peak_allocated_bytes == max(map(total, phases.values())) == total(phases[answer.binding_phase])
    assert phases[answer.binding_phase][answer.binding_term] == max(phases[answer.binding_phase].values())
    low_bytes, high_bytes = answer.peak_reserved_bytes
    assert answer.peak_allocated_bytes <= answer.smallest_capacity_bytes <= low_bytes <= high_bytes
    assert high_bytes < answer.peak_device_bytes
    assert (answer.fits, answer.change) == (True, None)
    assert answer.room_bytes == (answer.capacity_bytes or 0) - answer.needed_bytes


def test_the_verdict_turns_at_the_bytes_that_are_needed(place: Workplace, model: Path) -> None:
    needed_bytes = ask(place, model, micro_batch="8").needed_bytes
    odds = [ask(place, model, f"{needed_bytes + off * MIB}", micro_batch="8") for off in (-200, 0, 200)]
    assert [answer.fits for answer in odds] == [False, True, True]
    assert [answer.probability_fits for answer in odds] == sorted(answer.probability_fits or 0.0 for answer in odds)
    assert odds[1].probability_fits == pytest.approx(0.5, abs=0.01)


def test_the_cheapest_change_is_the_fastest_of_those_that_fit(place: Workplace, model: Path) -> None:
    answer = ask(place, model, "1280MiB", micro_batch="32")
    change = answer.change
    assert change is not None
    speeds = [each.tokens_per_second or 0.0 for each in (change, *answer.other_changes)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] > 0
    assert all(each.fits for each in (change, *answer.other_changes))
    changed = ask(place, model, "1280MiB", micro_batch="32", **{name: str(new) for name, new in change.knobs.items()})
    assert changed.fits
    assert changed.needed_bytes == change.needed_bytes


def test_where_no_single_change_is_enough_the_nearest_is_told(place: Workplace, model: Path) -> None:
    change = ask(place, model, "64MiB", micro_batch="8").change
    assert change is not None
    assert not change.fits


def test_knobs_without_an_effect_are_told(place: Workplace, model: Path) -> None:
    answer = ask(place, model, offload_optimizer="cpu")
    assert "offload_optimizer has no effect here: it needs that zero_stage is 1, 2 or 3" in answer.assumptions


def test_quantised_weights_take_half_a_byte_and_their_scales(place: Workplace, model: Path) -> None:
    plain, quantised = ask(place, model, method="lora"), ask(place, model, quantization="nf4")
    assert (quantised.config, quantised.trained_parameters) == (plain.config, plain.trained_parameters)

    def frozen_bytes(answer: Answer) -> int:
        return answer.bill.phases[answer.binding_phase]["frozen_weights"]

    head, width, narrow, wide = 2 * 4096 * 64, 64, 32, 128
    linear = 4 * (2 * width * width + 2 * width * narrow + 3 * width * wide)
    assert frozen_bytes(plain) - frozen_bytes(quantised) == pytest.approx(linear * (2 - 0.5 - 4 / 64), rel=0.01)
    assert frozen_bytes(quantised) > 2 * head
    assert any(each.startswith("frozen linear weights stored as nf4") for each in quantised.assumptions)


def test_states_on_disk_leave_device_and_host(place: Workplace, model: Path) -> None:
    on_host = ask(place, model, devices=2, zero_stage="3", offload_optimizer="cpu")
    on_disk = ask(place, model, devices=2, zero_stage="3", offload_optimizer="nvme")
    assert on_disk.config == on_host.config | {"offload_optimizer": "nvme"}
    weights = on_host.total_parameters
    # master, gradient and both states of Adam, four bytes each, of all ranks
    assert on_disk.disk_bytes == pytest.approx(16 * weights, rel=0.02)
    assert on_host.disk_bytes == 0
    assert (on_disk.step_s or 0.0) > (on_host.step_s or 0.0)


def test_other_engines_hold_other_things(place: Workplace, model: Path) -> None:
    deepspeed, ddp = ask(place, model), ask(place, model, engine="ddp")
    step = ddp.bill.phases[Phase.OPTIMIZER_STEP]
    assert "master_weights" not in step
    assert step["optimizer_states"] == pytest.approx(4 * ddp.total_parameters, rel=0.02)
    assert deepspeed.bill.phases[Phase.OPTIMIZER_STEP]["master_weights"] > 0
    fsdp = ask(place, model, "64MiB", devices=2, engine="fsdp")
    sharded = fsdp.bill.phases[Phase.OPTIMIZER_STEP]
    assert sharded["optimizer_states"] == pytest.approx(4 * fsdp.total_parameters, rel=0.02)
    assert fsdp.change is not None
    assert not fsdp.change.knobs.keys() & {"zero_stage", "offload_optimizer", "offload_param"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"engine": "fsdb"}, "--engine fsdb: did you mean fsdp?"),
        ({"quantization": "nf8"}, "--quantization nf8: "),
        ({"quantization": "nf4", "method": "full"}, "--quantization nf4: quantised weights cannot be trained"),
        ({"engine": "ddp", "zero_stage": "2"}, "--zero-stage is DeepSpeed's: leave it out"),
        ({"offload_param": "nvme"}, "--offload-param nvme: DeepSpeed does so in stage 3 alone"),
        ({"engine": "fsdp", "offload_optimizer": "nvme"}, "--offload-optimizer is DeepSpeed's"),
    ],
)
def test_what_no_engine_does_is_refused(place: Workplace, asked: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ask(place, "llama-2-7b", **asked)  # type: ignore[arg-type]


def test_a_7b_model_by_its_name_needs_no_network(place: Workplace) -> None:
    answer = ask(place, "llama-2-7b", "160GiB")
    assert (answer.model, answer.total_parameters) == ("meta-llama/Llama-2-7b-hf", 6_738_415_616)
    terms = answer.bill.phases[answer.binding_phase]
    # bf16 weights and gradients, fp32 masters and both of Adam's states
    for name, bytes_each in {"trained_weights": 2, "gradients": 2, "master_weights": 4, "optimizer_states": 8}.items():
        assert terms[name] == pytest.approx(bytes_each * answer.total_parameters, rel=0.001), name
    assert answer.fits
    assert answer.needed_bytes < (answer.capacity_bytes or 0) == 160 * GIB
    assert answer.mfu is not None
    assert 0 < answer.mfu < 1
    assert math.isfinite(answer.tokens_per_second or math.nan)


@pytest.mark.parametrize(
    ("model", "knobs", "told"),
    [
        ("lama-2-7b", {}, "did you mean meta-llama/Llama-2-7b-hf"),
        ("./nothing/here", {}, "there is no such file or folder"),
        ("llama-2-7b", {"zero_stage": "5"}, "--zero-stage 5: 5 is not one of 0, 1, 2, 3"),
        ("llama-2-7b", {"micro_batch": "[1, 2]"}, "--micro-batch [1, 2]: must be one value"),
        ("llama-2-7b", {"zero_stage": "2", "allgather_bucket_size": "3"}, "allgather_bucket_size 3 is odd"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_line(
    place: Workplace, model: str, knobs: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match=r".*") as refused:
        ask(place, model, **knobs)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_wrong_usage_ends_with_2_and_one_document(place: Workplace) -> None:
    run = place.run("estimate", "--model", "llama-2-7b", "--device", "a10z", "--json")
    assert run.returncode == 2
    assert json.loads(run.stdout) == {"error": "--device a10z: did you mean a10?", "exit_code": 2}
    assert place.run("estimate", "--no-such-knob", "1").returncode == 2
