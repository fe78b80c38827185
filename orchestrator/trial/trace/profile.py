"""Traces a structure at a few points and puts them together as a profile."""

import itertools
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray
from torch import nn

from orchestrator.contract.profile import MONOMIALS, FlopsLaw, Module, Parameter, Place, Point, Profile, TraceRequest
from orchestrator.trial.trace.build import STORED_BITS, QuantisedLinear, build
from orchestrator.trial.trace.laws import NoLaw, laws_of
from orchestrator.trial.trace.recorder import Recording
from orchestrator.trial.trace.step import Weights, record_step, weights_of
from orchestrator.trial.unusable import Unusable

LIBRARIES = ("torch", "transformers", "peft")
_BITS_PER_BYTE = 8
_SMALLEST_BATCH, _SMALLEST_RANK = 101, 211
_SEQUENCE_MULTIPLE = 32
"""Kernels round the sequence up to it, and take other ways where it is no multiple of 8: real ones mostly are."""
_SEQUENCE_MULTIPLES = (_SEQUENCE_MULTIPLE, 8, 1)
"""Smaller ones serve models of few positions."""
_POINTS = 4
_SMALLEST_SEQUENCE_FACTOR, _FEW_POSITIONS_FACTOR = 31, 11
_FEW_POSITIONS = _SEQUENCE_MULTIPLE * 53
_LOGITS_MOST_BYTES = 16
"""Of one logit in all forms that one storage can hold."""


def make_profile(request: TraceRequest) -> Profile:
    """The profile of `request`'s structure. Raises Unusable where it cannot be built or has no exact laws."""
    model = build(request, _SMALLEST_RANK)
    weights = weights_of(model)
    points = _points(request, model, weights)
    if points[0].lora_rank != _SMALLEST_RANK and request.has_rank and request.adapter is not None:
        model = build(request, points[0].lora_rank)
        weights = weights_of(model)
    recordings = [_record(model, weights, request, point) for point in points[:2]]
    other = weights
    if points[-1].lora_rank != points[0].lora_rank:
        model = build(request, points[-1].lora_rank)
        other = weights_of(model)
    recordings += [_record(model, other, request, point) for point in points[2:]]
    return _assemble(request, model, (weights, other), points, recordings)


def _record(model: nn.Module, weights: Weights, request: TraceRequest, point: Point) -> Recording:
    try:
        return record_step(model, weights, request, point)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Unusable("model", f"its code does not run on tensors without data: {lines[0]}") from error


def _points(request: TraceRequest, model: nn.Module, weights: Weights) -> list[Point]:
    """Four points whose coordinates have primes that divide no size of the model: sizes show where they come from."""
    sizes = {size for parameter in weights.parameters for size in parameter.shape}
    batches = _primes(_SMALLEST_BATCH, sizes)
    lengths = _lengths(request, model, sizes)
    ranks = _primes(_SMALLEST_RANK, sizes)
    chosen = [next(ranks), next(ranks)] if request.adapter is not None and request.has_rank else [0, 0]
    points = [(next(batches), next(lengths)) for _ in range(_POINTS)]
    return [Point(batch, length, chosen[number // 2]) for number, (batch, length) in enumerate(points)]


def _lengths(request: TraceRequest, model: nn.Module, sizes: set[int]) -> Iterator[int]:
    """Sequences of a prime and a multiple that kernels like, within the positions and on one side of the window."""
    config = model.config.get_text_config().to_dict()  # type: ignore[operator, union-attr]
    window = int(config.get("sliding_window") or config.get("attention_chunk_size") or 0)
    if request.beyond_window and window:
        first = window // _SEQUENCE_MULTIPLE + _SMALLEST_SEQUENCE_FACTOR
        return (_SEQUENCE_MULTIPLE * prime for prime in _primes(first, sizes))
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or _FEW_POSITIONS)
    largest = min(positions, window) if window else positions
    if largest >= _FEW_POSITIONS:
        return (_SEQUENCE_MULTIPLE * prime for prime in _primes(_SMALLEST_SEQUENCE_FACTOR, sizes))
    for multiple in _SEQUENCE_MULTIPLES:
        within = itertools.takewhile(
            lambda prime: prime <= largest // multiple,  # noqa: B023
            _primes(_FEW_POSITIONS_FACTOR, sizes),
        )
        primes = list(itertools.islice(within, _POINTS))
        if len(primes) > 1:
            return itertools.cycle([multiple * prime for prime in primes])
    return _primes(_FEW_POSITIONS_FACTOR, sizes)


def _primes(smallest: int, sizes: set[int]) -> Iterator[int]:
    for number in itertools.count(smallest):
        is_prime = all(number % divisor for divisor in range(2, int(number**0.5) + 1))
        if is_prime and all(size % number for size in sizes):
            yield number


def _assemble(
    request: TraceRequest, model: nn.Module, weights: tuple[Weights, Weights], points: list[Point],
    recordings: list[Recording],
) -> Profile:  # fmt: skip
    first = recordings[0]
    for other in recordings[1:]:
        if other.events != first.events or [mark[1:] for mark in other.marks] != [mark[1:] for mark in first.marks]:
            raise Unusable("model", "its storages come in another order at another size: no profile can be made")
    try:
        laws = laws_of([recording.sizes_bytes for recording in recordings], points)
        flops = _flops(recordings, points)
    except NoLaw as error:
        raise Unusable("model", str(error)) from error
    unique, storage_law = np.unique(laws, axis=0, return_inverse=True)
    places = _with_logits(np.array(first.places, dtype=np.int8), laws, _vocab_size(model))
    return Profile(
        request=request,
        versions={name: version(name) for name in LIBRARIES},
        parameters=_parameters(weights, points),
        modules=tuple(Module(name=path, parameters=own) for path, _, own in weights[0].modules),
        flops=flops,
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        laws=unique,
        storage_law=storage_law.reshape(-1).astype(np.int32),
        storage_place=places,
        events=np.array(first.events, dtype=np.int32),
        marks=np.array([(position, int(mark), payload) for position, mark, payload in first.marks], dtype=np.int32),
    )


def _vocab_size(model: nn.Module) -> int:
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def _with_logits(places: NDArray[np.int8], laws: NDArray[np.float64], vocab_size: int) -> NDArray[np.int8]:
    """Storages of the size of tokens by vocabulary are logits, whatever they are for."""
    tokens = laws[:, MONOMIALS.index((1, 1, 0))]
    rest = tokens % vocab_size
    per_logit = tokens / vocab_size
    is_logits = (per_logit >= 1) & (per_logit <= _LOGITS_MOST_BYTES) & (rest == 0)
    movable = np.isin(places, (Place.ACTIVATION, Place.TEMPORARY))
    return np.where(is_logits & movable, np.int8(Place.LOGITS), places).astype(np.int8)


def _parameters(weights: tuple[Weights, Weights], points: list[Point]) -> tuple[Parameter, ...]:
    low, high = points[0].lora_rank, points[-1].lora_rank
    bits = _quantised_bits(weights[0])
    found = []
    for index, (name, first, second) in enumerate(
        zip(weights[0].names, weights[0].parameters, weights[1].parameters, strict=True)
    ):
        per_rank = (second.numel() - first.numel()) // (high - low) if high != low else 0
        found.append(
            Parameter(
                name=name,
                numel_fixed=first.numel() - per_rank * low,
                numel_per_rank=per_rank,
                bytes_per_element=bits.get(index, first.element_size() * _BITS_PER_BYTE) / _BITS_PER_BYTE,
                is_trained=first.requires_grad,
                layer=weights[0].layers[index],
                largest_axis=max(first.shape, default=1),
            )
        )
    return tuple(found)


def _quantised_bits(weights: Weights) -> dict[int, float]:
    """Bits per element by the index of each quantised weight; its bias stays whole."""
    bits: dict[int, float] = {}
    for _, module, own in weights.modules:
        if isinstance(module, QuantisedLinear):
            bits |= {index: module.bits for index in own if weights.parameters[index] is module.weight}
    stacked = ((index, getattr(parameter, STORED_BITS, None)) for index, parameter in enumerate(weights.parameters))
    return bits | {index: stored for index, stored in stacked if stored is not None}


def _flops(recordings: list[Recording], points: list[Point]) -> tuple[FlopsLaw, ...]:
    laws = laws_of([[amount for *_, amount in recording.flops] for recording in recordings], points)
    square = [index for index, (_, sequence, _) in enumerate(MONOMIALS) if sequence == 2]
    sums: dict[tuple[str, str], NDArray[np.float64]] = {}
    for (phase, kind, _), law in zip(recordings[0].flops, laws, strict=True):
        # attention written as plain products shows by the square of the sequence
        key = (phase, "attention" if law[square].any() else kind)
        sums[key] = sums.get(key, np.zeros(len(MONOMIALS))) + law
    return tuple(
        FlopsLaw.model_validate({"phase": phase, "kind": kind, "coefficients": tuple(law.tolist())})
        for (phase, kind), law in sorted(sums.items())
    )
