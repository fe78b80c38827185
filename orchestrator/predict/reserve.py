"""A job's requests to the caching allocator, for a replay: what stays, and one micro-step's stream beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from orchestrator.contract.profile import Mark, Place, Profile
from orchestrator.predict.allocator import Workload
from orchestrator.predict.engine import engine_terms
from orchestrator.predict.fsdp import fsdp_window, unit_shard_bytes
from orchestrator.predict.gradients import gradient_timeline
from orchestrator.predict.job import Job
from orchestrator.predict.live import zero3_window
from orchestrator.predict.overhead import Overhead
from orchestrator.predict.reentrant import is_reentrant, keeps_inputs, kept_inputs
from orchestrator.predict.stream import stream_at
from orchestrator.predict.terms import Terms
from orchestrator.predict.weights import Weight, weights_of

_WEIGHT_TERMS = ("frozen_weights", "trained_weights")
_STATES = "optimizer_states"
_MASTER_BYTES = 4
_STATES_OF_A_WEIGHT = 2
"""Both moments of Adam."""


def allocator_workloads(profile: Profile, job: Job, overhead: Overhead) -> tuple[Workload, ...]:
    """What the default stream's pool is asked for, in its order; several where nothing of one is left in the next.

    Where the engine handles gradients, each dies when it is whole, and what the engine makes of it stands beside.
    States of an optimizer of PyTorch are made in the first step, where the pass has left room in its blocks.
    Gathered weights have a pool of their own (`gather_workload`). So have the reduced gradients of FSDP, which are made
    on another stream: its optimizer step finds the pool of the backward pass empty.
    """
    terms = engine_terms(profile.parameters, job, profile.request.dtype)
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    residents = [*_weight_sizes(weights, terms.resident, job), profile.buffers_bytes, overhead.workspace_bytes]
    lazy = terms.resident.get(_STATES, 0) if job.engine != "deepspeed" else 0
    for name, size_bytes in terms.resident.items():
        if name not in _WEIGHT_TERMS and not (lazy and name == _STATES):
            residents += _parts(size_bytes, weights, job)
    trained = tuple(weight for weight in weights if weight.is_trained)
    update = list(_update_sizes(trained, terms.step, job))
    requests = _Requests(profile, job)
    requests.run(handles_gradients=not _is_whole(job))
    requests.bear_all(_state_sizes(trained, lazy, job), lives_on=True)
    if job.engine != "fsdp":
        requests.bear_all(update)
        return (requests.workload(residents),)
    step = _Requests(profile, job)
    step.bear_all(_state_sizes(trained, lazy, job), lives_on=True)
    step.bear_all([*_parts(terms.step.get("gradients", 0), weights, job), *update])
    return requests.workload(residents), step.workload(residents)


_EARLIER_STEPS = 24
_SHORTEST_SHARE = 0.25
_GOLDEN_SHARE = 0.618034


def after_other_lengths(workload: Workload, profile: Profile, job: Job) -> Workload:
    """`workload` after steps over shorter batches, which leave blocks of other sizes in the cache.

    Lengths are spread evenly from a quarter of the sequence up, in an order without a trend. With them the reserved
    peaks of LoRA on Qwen-7B over rows of all lengths come out as published, 28 GiB where equal lengths need 20
    (modelscope/ms-swift 6cfbc2ec, docs/source_en/LLM/Benchmark.md).
    """
    own = len(profile.storage_place)
    earlier = []
    for step in range(1, _EARLIER_STEPS + 1):
        share = _SHORTEST_SHARE + (1 - _SHORTEST_SHARE) * (step * _GOLDEN_SHARE % 1)
        point = replace(job.point, sequence_tokens=max(1, round(share * job.point.sequence_tokens)))
        earlier.append(np.concatenate([profile.storage_bytes(point), workload.sizes_bytes[own:]]))
    return replace(workload, earlier_sizes_bytes=earlier, steps=1)


def gather_workload(profile: Profile, job: Job) -> Workload | None:
    """What gathers ask of their stream's pool; None where nothing is gathered."""
    if job.world_size == 1:
        return None
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    if job.engine == "fsdp":
        ahead = not is_reentrant(profile.request)
        window = fsdp_window(weights, profile.modules, profile.marks, job, profile.request.dtype, gathers_ahead=ahead)
        highest_bytes = int(window.max(initial=0))
        return Workload(np.array([1, -1], dtype=np.int32), np.array([highest_bytes], dtype=np.int64))
    if job.engine != "deepspeed" or job.zero_stage != 3:
        return None
    gathers = zero3_window(weights, profile.modules, profile.marks, job)
    return Workload(gathers.events, gathers.sizes_bytes, expandable_segments=job.expandable_segments)


class _Requests:
    """Births and deaths of a micro-step, with what the engine adds at its marks."""

    def __init__(self, profile: Profile, job: Job) -> None:
        self._profile = profile
        self._job = job
        self.events: list[int] = []
        self.sizes_bytes: list[int] = profile.storage_bytes(job.point).tolist()
        self._held: list[int] = []
        """Storages that stand for the engine's gradients, the oldest first."""
        self._held_bytes = 0
        self._lasting: list[int] = []

    def run(self, *, handles_gradients: bool) -> None:
        """All events of the profile in their order."""
        profile = self._profile
        is_gradient = (profile.storage_place == Place.GRADIENT).tolist()
        marks = profile.marks.tolist()
        timeline = gradient_timeline(profile.parameters, self._job, profile.request.dtype, _gradient_order(profile))
        levels = iter(zip(timeline.live_bytes.tolist(), timeline.peak_bytes.tolist(), strict=True))
        kept = self._kept_inputs()
        waiting: list[int] = []
        if handles_gradients:
            self._hold(timeline.opening_bytes)
        row = 0
        for position, event in enumerate([*profile.events.tolist(), 0]):
            while row < len(marks) and marks[row][0] <= position:
                if handles_gradients and marks[row][1] == Mark.GRADIENT:
                    self._take(waiting.pop(0) if waiting else None, *next(levels))
                for size_bytes in kept.get(row, ()):
                    self._bear(size_bytes)
                row += 1
            if event == 0 or (handles_gradients and event < 0 and is_gradient[-event - 1]):
                continue
            self.events.append(event)
            if handles_gradients and event > 0 and is_gradient[event - 1]:
                waiting.append(event)
        self.events += [-storage for storage in waiting]

    def bear_all(self, sizes_bytes: Sequence[int], *, lives_on: bool = False) -> None:
        """Storages that stand together until the end, as the temporaries of the optimizer step do, or for ever."""
        born = [self._bear(size_bytes) for size_bytes in sizes_bytes]
        if lives_on:
            self._lasting += born

    def workload(self, resident_bytes: Sequence[int]) -> Workload:
        """All requests so far, beside what is resident."""
        lives_on = np.zeros(len(self.sizes_bytes), dtype=np.bool_)
        lives_on[[storage - 1 for storage in self._lasting]] = True
        return Workload(
            events=np.array(self.events, dtype=np.int32),
            sizes_bytes=np.array(self.sizes_bytes, dtype=np.int64),
            resident_bytes=[size for size in resident_bytes if size],
            lives_on=lives_on if self._lasting else None,
            expandable_segments=self._job.expandable_segments,
        )

    def _take(self, gradient: int | None, live_bytes: int, peak_bytes: int) -> None:
        """A gradient is whole: what handling it needs at most, its death, and what is left of it."""
        own_bytes = self.sizes_bytes[gradient - 1] if gradient else 0
        extra_bytes = peak_bytes - self._held_bytes - own_bytes
        passing = self._bear(extra_bytes) if extra_bytes > 0 else None
        if gradient:
            self.events.append(-gradient)
        self._hold(live_bytes)
        if passing:
            self.events.append(-passing)

    def _hold(self, level_bytes: int) -> None:
        while self._held and self._held_bytes > level_bytes:
            storage = self._held.pop(0)
            self.events.append(-storage)
            self._held_bytes -= self.sizes_bytes[storage - 1]
        if level_bytes > self._held_bytes:
            self._held.append(self._bear(level_bytes - self._held_bytes))
            self._held_bytes = level_bytes

    def _bear(self, size_bytes: int) -> int:
        self.sizes_bytes.append(size_bytes)
        self.events.append(len(self.sizes_bytes))
        return len(self.sizes_bytes)

    def _kept_inputs(self) -> dict[int, Sequence[int]]:
        """Sizes that are born at rows of marks and stay."""
        if not keeps_inputs(self._profile, self._job):
            return {}
        rows, input_bytes = kept_inputs(self._profile, stream_at(self._profile, self._job.point))
        # the gradient of the latest input is the stream's own
        return {row: (input_bytes, input_bytes) if order else (input_bytes,) for order, row in enumerate(rows)}


def _is_whole(job: Job) -> bool:
    """Weights, gradients and states are whole tensors of each rank."""
    return job.engine == "torch" or (job.engine == "deepspeed" and job.zero_stage == 0)


def _weight_sizes(weights: tuple[Weight, ...], resident: Terms, job: Job) -> list[int]:
    """Single weights where they are whole and apart; else each kind in its units or as one block."""
    if _is_whole(job):
        return [weight.bytes + weight.scales_bytes for weight in weights]
    return [part for name in _WEIGHT_TERMS if name in resident for part in _parts(resident[name], weights, job)]


def _parts(size_bytes: int, weights: tuple[Weight, ...], job: Job) -> list[int]:
    """A resident term as it is allocated: in flat units under FSDP, flat as a whole in DeepSpeed."""
    if job.engine != "fsdp":
        return [size_bytes]
    shards = unit_shard_bytes(weights, job)
    return [round(size_bytes * shard / sum(shards)) for shard in shards]


def _state_sizes(trained: tuple[Weight, ...], states_bytes: int, job: Job) -> list[int]:
    """Two states for each tensor that the optimizer knows."""
    if not states_bytes:
        return []
    whole = [weight.bytes for weight in trained] if _is_whole(job) else unit_shard_bytes(trained, job)
    each = [round(states_bytes * size / sum(whole) / _STATES_OF_A_WEIGHT) for size in whole]
    return [size for size in each for _ in range(_STATES_OF_A_WEIGHT)]


def _update_sizes(trained: tuple[Weight, ...], step: Terms, job: Job) -> Iterator[int]:
    """Temporaries of the optimizer step: one for each tensor that the update walks over.

    Stage 0 of DeepSpeed copies each gradient to float32, stages 1 and 2 hold a flat one in each type.
    """
    total_bytes = step.get("optimizer_temporaries", 0)
    sizes = [weight.bytes for weight in trained]
    walks_over_weights = job.engine == "deepspeed" or job.optimizer_loop == "foreach"
    if not total_bytes or not sizes:
        return
    if _is_whole(job) and walks_over_weights:
        yield from (round(size * total_bytes / sum(sizes)) for size in sizes)
    elif job.engine == "deepspeed" and job.zero_stage in (1, 2) and trained[0].element_bytes < _MASTER_BYTES:
        flat_bytes = total_bytes * trained[0].element_bytes // (trained[0].element_bytes + _MASTER_BYTES)
        yield from (flat_bytes, total_bytes - flat_bytes)
    else:
        yield from _parts(total_bytes, trained, job)


def _gradient_order(profile: Profile) -> list[int]:
    return [payload for _, mark, payload in profile.marks.tolist() if mark == Mark.GRADIENT]
