"""Profiles with laws written by hand: a Llama-like decoder whose storages are counted in hidden states."""

from typing import Literal

import numpy as np

from orchestrator.contract.config import Checkpointing, ModelSource
from orchestrator.contract.profile import (
    MONOMIALS,
    Dtype,
    FlopsLaw,
    Mark,
    Module,
    Parameter,
    Place,
    Profile,
    StepPhase,
    TraceRequest,
)

_Pass = Literal["forward", "recompute", "backward"]
_BATCH_SEQUENCE = MONOMIALS.index((1, 1, 0))
_BATCH_SEQUENCE_RANK = MONOMIALS.index((1, 1, 1))
_BATCH_SEQUENCE_SQUARED = MONOMIALS.index((1, 2, 0))

# (hidden states born, kernels) of one layer in the forward and the backward phase, counted in the dispatched operations
# of Llama-2-7B at 4096 tokens, transformers 5.24, without the gradients of weights
_BORN: dict[tuple[bool, bool], tuple[tuple[float, int], tuple[float, int]]] = {
    (False, False): ((43.8, 38), (77.7, 71)),
    (False, True): ((43.8, 38), (119.6, 107)),
    (True, False): ((79.8, 62), (111.8, 96)),
    (True, True): ((79.8, 62), (189.6, 156)),
}


def decoder(
    *,
    hidden: int = 4096,
    layers: int = 32,
    intermediate: int = 11008,
    vocabulary: int = 32000,
    lora: bool = False,
    checkpointing: bool = False,
    dtype: Dtype = "bf16",
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa",
    device: Literal["cuda", "cpu"] = "cuda",
) -> Profile:
    """Llama-2-7B unless said otherwise. LoRA adapts the four projections of attention, in fp32."""
    square, wide = hidden * hidden, hidden * intermediate
    shapes = {"q": square, "k": square, "v": square, "o": square, "gate": wide, "up": wide, "down": wide}
    element_bytes = 4 if dtype == "fp32" else 2
    parameters: list[Parameter] = []
    modules: list[Module] = []

    def add(name: str, numel: int, layer: int, adapter_per_rank: int = 0) -> None:
        indices = [len(parameters)]
        parameters.append(
            Parameter(
                name=name,
                numel_fixed=numel,
                bytes_per_element=element_bytes,
                is_trained=not lora,
                layer=layer,
                largest_axis=max(hidden, intermediate if numel == wide else hidden),
            )
        )
        if adapter_per_rank:
            indices.append(len(parameters))
            parameters.append(
                Parameter(
                    name=f"{name}.lora",
                    numel_fixed=0,
                    numel_per_rank=adapter_per_rank,
                    bytes_per_element=4,
                    is_trained=True,
                    layer=layer,
                )
            )
        modules.append(Module(name=name, parameters=tuple(indices)))

    add("embedding", vocabulary * hidden, -1)
    for layer in range(layers):
        for name, numel in shapes.items():
            adapter = 2 * hidden if lora and name in ("q", "k", "v", "o") else 0
            add(f"{layer}.{name}", numel, layer, adapter)
        add(f"{layer}.norms", 2 * hidden, layer)
    add("norm", hidden, -1)
    add("head", vocabulary * hidden, -1)
    laws, storage_law, events, marks = _stream(hidden, layers, vocabulary, lora, checkpointing, attention)
    return Profile(
        request=TraceRequest(
            model=ModelSource(config={"model_type": "llama"}),
            device=device,
            dtype=dtype,
            adapter={"peft_type": "LORA"} if lora else None,
            gradient_checkpointing=Checkpointing.FULL if checkpointing else Checkpointing.NONE,
            attention=attention,
        ),
        versions={},
        parameters=tuple(parameters),
        modules=tuple(modules),
        flops=_flops(
            layers * sum(shapes.values()),
            vocabulary * hidden,
            layers * hidden,
            lora=lora,
            checkpointing=checkpointing,
            is_eager=attention == "eager",
        ),
        buffers_bytes=0,
        laws=laws,
        storage_law=storage_law,
        storage_place=np.full(len(storage_law), Place.ACTIVATION, dtype=np.int8),
        events=events,
        marks=marks,
    )


def _law(index: int, coefficient: float) -> list[float]:
    row = [0.0] * len(MONOMIALS)
    row[index] = coefficient
    return row


def _stream(
    hidden: int, layers: int, vocabulary: int, lora: bool, checkpointing: bool, attention: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every kernel of a layer makes an equal storage; the head adds logits in bf16 and three times in fp32."""
    (forward_units, forward_kernels), (backward_units, backward_kernels) = _BORN[lora, checkpointing]
    laws = [
        _law(_BATCH_SEQUENCE, forward_units / forward_kernels * hidden * 2),
        _law(_BATCH_SEQUENCE, backward_units / backward_kernels * hidden * 2),
        _law(_BATCH_SEQUENCE, vocabulary * 7.0),
        _law(_BATCH_SEQUENCE_SQUARED, 3 * 2.0 * hidden / 128),
    ]
    eager = [3] if attention == "eager" else []
    forward = ([0] * forward_kernels + eager) * layers + [2, 2]
    backward = [2, 2] + ([1] * backward_kernels + eager) * layers
    storage_law = np.array(forward + backward, dtype=np.int32)
    births = np.arange(1, len(storage_law) + 1, dtype=np.int32)
    events = np.stack([births, -births], axis=1).reshape(-1)
    marks = np.array(
        [[0, Mark.PHASE, StepPhase.FORWARD], [2 * len(forward), Mark.PHASE, StepPhase.BACKWARD]], dtype=np.int32
    )
    return np.array(laws), storage_law, events, marks


def _flops(body: int, head: int, pair: int, *, lora: bool, checkpointing: bool, is_eager: bool) -> tuple[FlopsLaw, ...]:
    """2 a weight and token and pass. Attention: 2 x 2 x hidden a pair, two and a half times that backward, all pairs
    counted as a trace does; eager attention's products are linear ones. Four adapted projections of hidden by hidden:
    2 x 2 x 4 a rank and hidden state."""
    adapter = 2.0 * 2 * 4 * pair if lora else 0.0
    backward = 1 if lora else 2

    def laws(
        phase: Literal["forward", "backward", "recompute"], linear: float, rank: float, attention: float
    ) -> list[FlopsLaw]:
        coefficients = [0.0] * len(MONOMIALS)
        coefficients[_BATCH_SEQUENCE], coefficients[_BATCH_SEQUENCE_RANK] = linear, rank
        coefficients[_BATCH_SEQUENCE_SQUARED] = attention * 4.0 * pair if is_eager else 0.0
        return [
            FlopsLaw(phase=phase, kind="linear", coefficients=tuple(coefficients)),
            FlopsLaw(
                phase=phase,
                kind="attention",
                coefficients=tuple(_law(_BATCH_SEQUENCE_SQUARED, 0.0 if is_eager else attention * 4.0 * pair)),
            ),
        ]

    found = laws("forward", 2.0 * (body + head), adapter, 1.0)
    found += laws("backward", 2.0 * backward * (body + head), 2 * adapter, 2.5)
    if checkpointing:
        found += laws("recompute", 2.0 * body, adapter, 1.0)
    return tuple(found)
