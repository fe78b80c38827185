"""Streams of storages of a training step, written by hand: Llama-3-8B, every layer recomputed, logits kept whole."""

from dataclasses import replace

import numpy as np

from orchestrator.predict.allocator import Workload

HIDDEN, MLP, VOCABULARY, LAYERS, KEYS = 4096, 14336, 128256, 32, 1024
LAYER_BYTES = [
    2 * rows * columns
    for rows, columns in (
        (HIDDEN, HIDDEN),
        (KEYS, HIDDEN),
        (KEYS, HIDDEN),
        (HIDDEN, HIDDEN),
        (MLP, HIDDEN),
        (MLP, HIDDEN),
        (MLP, HIDDEN),
        (1, HIDDEN),
        (1, HIDDEN),
    )
]
WEIGHTS_BYTES = [2 * VOCABULARY * HIDDEN, *LAYER_BYTES * LAYERS, 2 * VOCABULARY * HIDDEN, 2 * HIDDEN]


class Stream:
    """Births and deaths in order."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.sizes_bytes: list[int] = []

    def born(self, *sizes_bytes: int) -> list[int]:
        first = len(self.sizes_bytes) + 1
        self.sizes_bytes += sizes_bytes
        storages = list(range(first, first + len(sizes_bytes)))
        self.events += storages
        return storages

    def die(self, storages: list[int]) -> None:
        self.events += [-storage for storage in storages]


def training_step(
    sequences: int, trained_layer_bytes: list[int], layers: int = LAYERS, trains_head: bool = False
) -> Workload:
    """Two steps in bf16 of sequences of 4096 tokens; AdamW by foreach, whose states are born in the first step."""
    stream = Stream()
    tokens = sequences * 4096
    row = tokens * HIDDEN * 2
    head_bytes = [2 * VOCABULARY * HIDDEN] if trains_head else []
    hidden = stream.born(row)
    inputs: list[list[int]] = []
    for _ in range(layers):
        inputs.append(hidden)
        kept, hidden = _layer(stream, tokens)
        stream.die(kept)
    gradient = _loss(stream, tokens, hidden)
    gradients = stream.born(*head_bytes)
    for saved in reversed(inputs):
        kept, output = _layer(stream, tokens)
        stream.die(output)
        for storage in reversed(kept):
            temporary = stream.born(stream.sizes_bytes[storage - 1])
            stream.die([storage, *temporary])
        passed = stream.born(row)
        stream.die([*gradient, *saved])
        gradient = passed
        gradients += stream.born(*trained_layer_bytes)
    stream.die(gradient)
    gradients += stream.born(*head_bytes)
    trained_bytes = [stream.sizes_bytes[storage - 1] for storage in gradients]
    states = stream.born(*trained_bytes, *trained_bytes)
    stream.die(stream.born(*trained_bytes))
    stream.die(gradients)
    lives_on = np.zeros(len(stream.sizes_bytes), dtype=bool)
    lives_on[[state - 1 for state in states]] = True
    weights_bytes = [WEIGHTS_BYTES[0], *LAYER_BYTES * layers, *WEIGHTS_BYTES[-2:]]
    if not trains_head:
        weights_bytes += trained_layer_bytes * layers
    return Workload(
        events=np.array(stream.events, dtype=np.int32),
        sizes_bytes=np.array(stream.sizes_bytes, dtype=np.int64),
        resident_bytes=weights_bytes,
        lives_on=lives_on,
    )


def _layer(stream: Stream, tokens: int) -> tuple[list[int], list[int]]:
    """(what the backward pass needs, the output) of one layer."""
    row, narrow, wide = tokens * HIDDEN * 2, tokens * KEYS * 2, tokens * MLP * 2
    kept = stream.born(tokens * 4, row, row, narrow, narrow, row, tokens * 32 * 4)
    projected = stream.born(row)
    residual = stream.born(row)
    stream.die(projected)
    kept += residual + stream.born(tokens * 4, row, wide, wide, wide)
    down = stream.born(row)
    output = stream.born(row)
    stream.die(down)
    return kept, output


def _loss(stream: Stream, tokens: int, hidden: list[int]) -> list[int]:
    """transformers 4.45 with the gradient written over the shifted copy. Returns the gradient of the hidden states."""
    half, whole = tokens * VOCABULARY * 2, tokens * VOCABULARY * 4
    normed = stream.born(tokens * HIDDEN * 2)
    logits = stream.born(half)
    as_float = stream.born(whole)
    stream.die(logits)
    shifted = stream.born((tokens - tokens // 4096) * VOCABULARY * 4)
    stream.die(as_float)
    unshifted = stream.born(whole)
    stream.die(shifted)
    as_half = stream.born(half)
    stream.die(unshifted)
    gradient = stream.born(tokens * HIDDEN * 2)
    stream.die([*as_half, *normed, *hidden])
    return gradient


def scenarios() -> dict[str, tuple[Workload, int | None]]:
    """Workloads and capacities, by name, whose outcome is recorded in `allocator_recorded`."""
    bases = {f"random {seed}": _random_workload(seed) for seed in range(40)}
    for sequences in (1, 2):
        bases[f"full {sequences}"] = training_step(sequences, LAYER_BYTES, layers=3, trains_head=True)
        bases[f"lora {sequences}"] = training_step(sequences, [4 * 16 * 2 * HIDDEN] * 4, layers=6)
    named: dict[str, tuple[Workload, int | None]] = {}
    for name, base in bases.items():
        for kind in ("fixed", "expandable"):
            workload = replace(base, expandable_segments=kind == "expandable")
            named[f"{name} {kind}"] = workload, None
            for percent in (99, 104, 112, 130):
                named[f"{name} {kind} {percent} %"] = workload, base.peak_allocated_bytes * percent // 100
    named["two holes"] = replace(_two_holes(), expandable_segments=True), 165 << 20
    return named


def _two_holes() -> Workload:
    """The last request fits between two unmapped ranges, of which the first alone has room."""
    mib = 1 << 20
    stream = Stream()
    first, middle, last, _ = ([storage] for storage in stream.born(*[20 * mib] * 4))
    stream.die([*first, *last])
    stream.born(100 * mib)
    stream.die(middle)
    stream.born(60 * mib)
    return Workload(np.array(stream.events, dtype=np.int32), np.array(stream.sizes_bytes, dtype=np.int64), steps=1)


def _random_workload(seed: int) -> Workload:
    """The same on every machine: the numbers come from a linear congruential generator (Knuth's MMIX)."""
    state = seed

    def below(limit: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % limit

    mib = 1 << 20
    sizes_bytes = [1 + below((mib, 10 * mib, 64 * mib, 200 * mib)[below(4)]) for _ in range(6)]
    stream = Stream()
    alive: list[int] = []
    for _ in range(80):
        if below(100) < 53 or not alive:
            alive += stream.born(sizes_bytes[below(6)] if below(5) else 1 + below(64 * mib))
        else:
            stream.die([alive.pop(below(len(alive)))])
    return Workload(
        events=np.array(stream.events, dtype=np.int32),
        sizes_bytes=np.array(stream.sizes_bytes, dtype=np.int64),
        resident_bytes=[1 + below(50 * mib) for _ in range(below(4))],
        steps=1 + below(3),
        empties_cache=below(3) == 0,
    )
