"""The trace of a training step: exact laws, the real allocator's peak, and what it tells of weights and operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.contract.config import ModelSource
from orchestrator.contract.profile import Mark, Place, Point, Profile, TraceRequest, read_profile
from orchestrator.predict.job import Job
from orchestrator.predict.memory import bill
from orchestrator.predict.overhead import CPU
from orchestrator.trial.trace.build import QuantisedLinear, build
from orchestrator.trial.trace.profile import make_profile
from orchestrator.trial.trace.recorder import Recorder, Recording
from orchestrator.trial.trace.step import record_step, weights_of
from orchestrator.trial.unusable import Unusable

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ADAPTER: dict[str, Any] = {"target_modules": "all-linear", "lora_dropout": 0.1}
STRUCTURES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, checkpointed": {"gradient_checkpointing": "full"},
    "lora": {"adapter": ADAPTER},
    "lora, checkpointed": {"adapter": ADAPTER, "gradient_checkpointing": "full"},
    "eager, padded": {"attention": "eager", "is_padded": True},
    "sdpa, padded": {"is_padded": True},
    "autocast": {"adapter": ADAPTER, "autocast": "bf16"},
    "4 bits": {"adapter": ADAPTER, "quantization": "nf4_double", "kbit_preparation": True, "autocast": "bf16"},
    "float32 on CPU": {"dtype": "fp32", "device": "cpu"},
}
NEW_POINTS = (Point(2, 96, 4), Point(3, 1024, 16), Point(8, 256, 1))


def request(config: dict[str, Any] = LLAMA, **structure: Any) -> TraceRequest:
    return TraceRequest(model=ModelSource(config=config), **structure)


def peak_bytes(sizes: np.ndarray, events: np.ndarray) -> int:
    changes = np.sign(events) * sizes[np.abs(events) - 1]
    return int(np.cumsum(changes).max())


class CountedClones(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def direct(of: TraceRequest, point: Point) -> Recording:
    model = build(of, point.lora_rank)
    return record_step(model, weights_of(model), of, point)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_laws_give_the_sizes_of_a_direct_trace_at_any_point(structure: dict[str, Any]) -> None:
    of = request(**structure)
    made = make_profile(of)
    for point in NEW_POINTS:
        recording = direct(of, point)
        assert recording.events == made.events.tolist()
        traced = peak_bytes(np.array(recording.sizes_bytes), np.array(recording.events))
        assert peak_bytes(made.storage_bytes(point), made.events) == pytest.approx(traced, rel=0.001)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 2048},
        LLAMA | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        LLAMA | {"max_position_embeddings": 128},
        LLAMA | {"model_type": "gemma3_text", "sliding_window": 1024, "head_dim": 16},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
    ],
    ids=lambda config: f"{config['model_type']} {config.get('max_position_embeddings', '')}",
)
def test_other_families_have_exact_laws_too(config: dict[str, Any]) -> None:
    of = request(config, beyond_window="sliding_window" in config)
    made = make_profile(of)
    recording = direct(of, NEW_POINTS[1])
    traced = peak_bytes(np.array(recording.sizes_bytes), np.array(recording.events))
    assert peak_bytes(made.storage_bytes(NEW_POINTS[1]), made.events) == pytest.approx(traced, rel=0.001)


def real_peak_bytes(step: Callable[[], None]) -> int:
    """Most bytes that PyTorch's CPU allocator had given out at once beyond those at the start of `step`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in events]).max())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("adapter", [None, {"target_modules": ["q_proj", "v_proj"]}], ids=["full", "lora"])
def test_the_peak_is_that_of_the_real_allocator(adapter: dict[str, Any] | None, checkpointing: str) -> None:
    of = request(dtype="fp32", device="cpu", adapter=adapter, gradient_checkpointing=checkpointing)
    point = Point(4, 256, 8)
    made = make_profile(of)
    torch.manual_seed(0)
    # a rotary embedding's buffers come from the configuration, all else from its initialisation
    model = build(of, point.lora_rank, device="cpu")
    tokens = torch.randint(LLAMA["vocab_size"], (point.micro_batch, point.sequence_tokens))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    step()
    model.zero_grad(set_to_none=True)
    predicted = peak_bytes(made.storage_bytes(point), made.events)
    inputs_bytes = 2 * tokens.nbytes
    # each checkpoint keeps the state of the CPU's random numbers, whose size does not depend on the model
    states_bytes = LLAMA["num_hidden_layers"] * torch.get_rng_state().nbytes if checkpointing == "full" else 0
    assert real_peak_bytes(step) == pytest.approx(predicted - inputs_bytes + states_bytes, rel=0.001)


def test_the_optimizer_step_of_the_bill_is_that_of_a_direct_trace() -> None:
    made = make_profile(request())
    model = build(request(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    recorder = Recorder()
    with torch.device("meta"), recorder:
        optimizer.step()
    job = Job(point=Point(1, 32), engine="torch", master_dtype=None, optimizer_loop="foreach")
    terms = bill(made, job, CPU).phases["optimizer_step"]
    traced = peak_bytes(np.array(recorder.recording.sizes_bytes), np.array(recorder.recording.events))
    assert terms["optimizer_states"] + terms["optimizer_temporaries"] == pytest.approx(traced, rel=0.01)


def test_weights_are_told_apart(tmp_path: Path) -> None:
    tied = make_profile(request(LLAMA | {"tie_word_embeddings": True}, adapter={"target_modules": ["q_proj"]}))
    (tmp_path / "profile.npz").write_bytes(tied.to_bytes())
    read = read_profile(tmp_path / "profile.npz")
    names = [parameter.name for parameter in read.parameters]
    assert sum("embed_tokens" in name or "lm_head" in name for name in names) == 1
    trained = [parameter for parameter in read.parameters if parameter.is_trained]
    assert sum(parameter.numel(8) for parameter in trained) == 3 * 8 * (64 + 64)
    assert {parameter.layer for parameter in trained} == {0, 1, 2}
    by_name = {parameter.name.split(".", 3)[-1]: parameter.numel(8) for parameter in read.parameters}
    assert by_name["layers.0.self_attn.k_proj.weight"] == 64 * 32, "grouped heads are smaller"
    assert all(parameter.bytes_per_element == 2 for parameter in read.parameters if not parameter.is_trained)
    assert all(parameter.bytes_per_element == 4 for parameter in trained), "peft keeps adapters in float32"


def test_quantised_weights_count_their_scales() -> None:
    made = make_profile(request(adapter=ADAPTER, quantization="nf4_double"))
    bits = {round(parameter.bytes_per_element * 8, 3) for parameter in made.parameters}
    assert bits == {4.127, 16, 32}


def test_only_adapted_layers_in_4_bits_copy_their_result() -> None:
    """peft adds to a copy; a layer that it left alone is bitsandbytes' own. Each copy is traffic."""
    adapter = {**ADAPTER, "target_modules": ["q_proj", "v_proj"]}
    model = build(request(adapter=adapter, quantization="nf4"), lora_rank=4)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    copies = set()
    for name, layer in layers.items():
        with CountedClones() as clones:
            layer(torch.empty(1, 32, layer.in_features, dtype=layer.weight.dtype, device="meta"))
        if clones.count:
            copies.add(name.split(".")[-2])
    assert len(layers) == 3 * 7
    assert copies == {"q_proj", "v_proj"}


def test_gradients_become_whole_from_the_last_layer_to_the_first() -> None:
    made = make_profile(request(adapter={"target_modules": ["q_proj"]}))
    order = [made.parameters[payload].layer for _, mark, payload in made.marks.tolist() if mark == Mark.GRADIENT]
    assert order == sorted(order, reverse=True)
    assert np.count_nonzero(made.storage_place == Place.GRADIENT) == len(order) == 6


def linear_flops_per_token(made: Profile, phase: str) -> float:
    point = Point(2, 512, 8)
    laws = [law for law in made.flops if law.phase == phase and law.kind == "linear"]
    return sum(law.at(point) for law in laws) / (point.micro_batch * point.sequence_tokens)


def test_operations_follow_the_weights_that_are_used() -> None:
    made = make_profile(request())
    matrices = sum(
        parameter.numel_fixed
        for parameter in made.parameters
        if "norm" not in parameter.name and "embed" not in parameter.name
    )
    assert linear_flops_per_token(made, "forward") == pytest.approx(2 * matrices)
    assert linear_flops_per_token(made, "backward") == pytest.approx(4 * matrices)
    frozen = make_profile(request(adapter={"target_modules": ["q_proj"]}))
    assert linear_flops_per_token(frozen, "backward") < 2.2 * matrices


def test_a_mixture_of_experts_costs_its_active_weights() -> None:
    config = LLAMA | {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    }  # fmt: skip
    made = make_profile(request(config))
    experts = sum(parameter.numel_fixed for parameter in made.parameters if ".experts." in parameter.name)
    rest = sum(
        parameter.numel_fixed
        for parameter in made.parameters
        if not any(part in parameter.name for part in (".experts.", "norm", "embed"))
    )
    assert linear_flops_per_token(made, "forward") == pytest.approx(2 * (rest + experts / 4))


@pytest.mark.parametrize(
    ("structure", "field"),
    [
        ({"adapter": {"peft_type": "NONE_SUCH"}}, "adapter.peft_type"),
        ({"adapter": {"target_modules": ["no_such_layer"]}}, "adapter"),
    ],
)
def test_what_cannot_be_traced_names_the_place(structure: dict[str, Any], field: str) -> None:
    with pytest.raises(Unusable) as caught:
        make_profile(request(**structure))
    assert caught.value.field == field
