"""What PyTorch's CUDA caching allocator makes of a stream of storages: peaks, retries, and whether it runs out.

`replay` answers for one capacity. A capacity is what the allocator may reserve: the device's memory without the
context, the communicator and other processes, or the share set by `set_per_process_memory_fraction`. Sizes are of
storages on one device and one stream: blocks that wait for another stream (`record_stream`) are not modelled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from orchestrator.predict.segments import PAGE_UNITS, SMALL_UNITS, UNIT_BYTES, ExpandableSegments, FixedSegments

_PAGE_BYTES = PAGE_UNITS * UNIT_BYTES


@dataclass(frozen=True, eq=False)
class Workload:
    """What a process asks of the allocator, in order: the residents, then the stream once for every step.

    Raises ValueError when `events` names a storage that does not exist, or lets one die that is not alive.
    """

    events: NDArray[np.int32]
    """`i + 1`: storage `i` is born; `-(i + 1)`: it dies. What is alive after the last event dies there."""
    sizes_bytes: NDArray[np.int64]
    """Of every storage, before rounding."""
    resident_bytes: Sequence[int] = ()
    """Sizes that are allocated first and live for ever, in the order of birth."""
    steps: int = 2
    """How often the stream is replayed: the second step finds the cache of the first."""
    lives_on: NDArray[np.bool_] | None = None
    """Storages that are born in the first step and live for ever, as the states of a lazy optimizer do."""
    earlier_sizes_bytes: Sequence[NDArray[np.int64]] = ()
    """Sizes of the same storages in steps before, one array a step: batches of other lengths leave other blocks."""
    empties_cache: bool = False
    """Whether `torch.cuda.empty_cache` runs between steps."""
    expandable_segments: bool = False
    """The setting of this name in `PYTORCH_ALLOC_CONF`."""

    def __post_init__(self) -> None:
        if not self.events.size:
            return
        storages = np.abs(self.events) - 1
        if storages.min() < 0 or storages.max() >= self.sizes_bytes.size:
            raise ValueError(f"events name storages outside of the {self.sizes_bytes.size} that have a size")
        order = np.argsort(storages, kind="stable")
        same = storages[order][1:] == storages[order][:-1]
        births = self.events[order] > 0
        if np.any(births[1:] == births[:-1], where=same) or not births[np.flatnonzero(np.r_[True, ~same])].all():
            raise ValueError("events let a storage be born while it is alive, or die while it is not")

    @cached_property
    def phases(self) -> tuple["_Phase", ...]:
        """The residents and every step, as the allocator sees them."""
        residents = np.asarray(self.resident_bytes, dtype=np.int64)
        phases = [_Phase.of(np.arange(1, residents.size + 1), residents)]
        first, later = self._step_events()
        known: dict[tuple[int, int], _Phase] = {}
        for index, sizes in enumerate([*self.earlier_sizes_bytes, *[self.sizes_bytes] * self.steps]):
            events = later if index else first
            key = id(events), id(sizes)
            if key not in known:
                known[key] = _Phase.of(events, sizes)
            phases.append(known[key])
        return tuple(phases)

    @cached_property
    def peak_allocated_bytes(self) -> int:
        """Most bytes alive at once, each storage rounded up to 512 bytes."""
        alive = peak = 0
        for phase in self.phases:
            peak = max(peak, alive + phase.peak_units)
            alive += phase.end_units
        return peak * UNIT_BYTES

    def _step_events(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        storages = np.abs(self.events) - 1
        alive = np.bincount(storages, weights=np.sign(self.events), minlength=self.sizes_bytes.size) > 0
        if self.lives_on is None:
            first = np.r_[self.events, -(np.flatnonzero(alive) + 1)]
            return first, first
        deaths = -(np.flatnonzero(alive & ~self.lives_on) + 1)
        later = self.events[~self.lives_on[storages]]
        return np.r_[self.events, deaths], np.r_[later, deaths]


@dataclass(frozen=True)
class OutOfMemory:
    """The request that the allocator could not serve, after it released its cache."""

    step: int
    """0: among the residents; then from 1, steps before `steps` included."""
    storage: int
    """Index of the storage, or of the resident."""
    requested_bytes: int
    """Rounded up to 512 bytes."""
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Replay:
    """What a replay came to."""

    peak_allocated_bytes: int
    """Of the whole workload, whether it fits or not, each storage rounded up to 512 bytes."""
    peak_block_bytes: int
    """What `max_memory_allocated` reports: as above, but with the rests of up to 1 MiB that blocks are not split of."""
    peak_reserved_bytes: int
    """What `max_memory_reserved` reports."""
    end_reserved_bytes: int
    segments: int
    """Segments held at the end; pages of 2 or 20 MiB with expandable segments."""
    retries: int
    """Requests that were served, or failed, only after the cache was released (`num_alloc_retries`)."""
    released_segments: int
    """By those retries."""
    out_of_memory: OutOfMemory | None
    """None: all requests were served."""


def replay(workload: Workload, capacity_bytes: int | None = None) -> Replay:
    """Serve all requests of `workload` within `capacity_bytes` (None: no end of memory)."""
    allocator = _Allocator(capacity_bytes, workload.expandable_segments)
    failure: OutOfMemory | None = None
    for step, phase in enumerate(workload.phases):
        if step > 1 and workload.empties_cache:
            allocator.release()
        storage = allocator.serve(phase)
        if storage is not None:
            failure = OutOfMemory(
                step=step,
                storage=storage,
                requested_bytes=phase.units[storage] * UNIT_BYTES,
                allocated_bytes=allocator.in_use * UNIT_BYTES,
                reserved_bytes=allocator.reserved * UNIT_BYTES,
            )
            break
    return Replay(
        peak_allocated_bytes=workload.peak_allocated_bytes,
        peak_block_bytes=allocator.peak_in_use * UNIT_BYTES,
        peak_reserved_bytes=allocator.peak_reserved * UNIT_BYTES,
        end_reserved_bytes=allocator.reserved * UNIT_BYTES,
        segments=allocator.segments,
        retries=allocator.retries,
        released_segments=allocator.released_segments,
        out_of_memory=failure,
    )


def smallest_capacity_bytes(workload: Workload, max_replays: int = 8) -> int:
    """A capacity in which `workload` was seen to fit, the smallest that a bisection of `max_replays` replays finds.

    With eight replays it lies at most 1/128 of the span from `peak_allocated_bytes` to the peak reserved at ease above
    a capacity that was seen not to fit; to 2 MiB where that span is under 256 MiB. More memory does not always help:
    where the cache is released later, it may be cut up worse. Ask `replay` whether the workload fits in a given one.
    """
    return _squeeze(workload, replay(workload), max_replays - 1)[0]


def reserved_interval(workload: Workload, capacity_bytes: int | None = None) -> tuple[int, int]:
    """Peak reserved bytes: with just enough memory, and with ample memory (at most `capacity_bytes`).

    Cached segments are given back only when a request fails, so what a run reserves depends on how much there is.
    Batches of other lengths before can add to both: see `earlier_sizes_bytes`.
    """
    ample = replay(workload)
    low = _squeeze(workload, ample, 7)[1]
    high = ample.peak_reserved_bytes
    if capacity_bytes is not None:
        high = max(low, min(high, capacity_bytes))
    return low, high


def _squeeze(workload: Workload, ample: Replay, replays: int) -> tuple[int, int]:
    """(capacity, peak reserved in it) of the smallest capacity found to fit."""
    too_small = -(-workload.peak_allocated_bytes // _PAGE_BYTES) - 1
    fits, reserved = ample.peak_reserved_bytes // _PAGE_BYTES, ample.peak_reserved_bytes
    for _ in range(replays):
        if fits - too_small <= 1:
            break
        tried = (too_small + fits) // 2
        attempt = replay(workload, tried * _PAGE_BYTES)
        if attempt.out_of_memory is None:
            fits, reserved = attempt.peak_reserved_bytes // _PAGE_BYTES, attempt.peak_reserved_bytes
        else:
            too_small = tried
    return fits * _PAGE_BYTES, reserved


@dataclass(frozen=True)
class _Phase:
    """Requests in order, in units of 512 bytes. Storages of no size ask for nothing."""

    operations: list[int]
    """As `Workload.events`."""
    units: list[int]
    peak_units: int
    end_units: int

    @classmethod
    def of(cls, events: NDArray[np.int64], sizes_bytes: NDArray[np.int64]) -> "_Phase":
        units = -(-sizes_bytes // UNIT_BYTES)
        storages = np.abs(events) - 1
        asked = units[storages] > 0
        alive = np.cumsum(np.sign(events) * units[storages])
        return cls(
            operations=events[asked].tolist(),
            units=units.tolist(),
            peak_units=int(alive.max(initial=0)),
            end_units=int(alive[-1]) if alive.size else 0,
        )


class _Allocator:
    """Both pools of a device under one capacity."""

    def __init__(self, capacity_bytes: int | None, expandable_segments: bool) -> None:
        kind = ExpandableSegments if expandable_segments else FixedSegments
        self._small: ExpandableSegments | FixedSegments = kind(is_small=True)
        self._large: ExpandableSegments | FixedSegments = kind(is_small=False)
        self._capacity = math.inf if capacity_bytes is None else capacity_bytes // UNIT_BYTES
        self.peak_in_use = self.peak_reserved = self.retries = self.released_segments = 0

    @property
    def reserved(self) -> int:
        return self._small.reserved + self._large.reserved

    @property
    def in_use(self) -> int:
        return self._small.in_use + self._large.in_use

    @property
    def segments(self) -> int:
        return self._small.segments + self._large.segments

    def release(self) -> int:
        """Give back what is wholly free. Returns how many segments."""
        return self._small.release() + self._large.release()

    def serve(self, phase: _Phase) -> int | None:
        """Serve the requests in order. Returns the storage that there was no memory for, None when all were served."""
        starts = [0] * len(phase.units)
        units = phase.units
        for operation in phase.operations:
            if operation < 0:
                storage = -operation - 1
                pool = self._small if units[storage] <= SMALL_UNITS else self._large
                pool.free(starts[storage])
                continue
            start = self._allocate(units[operation - 1])
            if start is None:
                return operation - 1
            starts[operation - 1] = start
        return None

    def _allocate(self, size: int) -> int | None:
        """`malloc`: from the cache, else from the device, else again after the cache was released."""
        small, large = self._small, self._large
        pool = small if size <= SMALL_UNITS else large
        start = pool.allocate(size, self._capacity - small.reserved - large.reserved)
        if start is None:
            self.retries += 1
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            self.released_segments += self.release()
            start = pool.allocate(size, self._capacity - small.reserved - large.reserved)
            if start is None:
                return None
        in_use = small.in_use + large.in_use
        if in_use > self.peak_in_use:
            self.peak_in_use = in_use
        reserved = small.reserved + large.reserved
        if reserved > self.peak_reserved:
            self.peak_reserved = reserved
        return start
