"""ZeRO-3's window of gathered weights: which are whole on the device while modules run one after another.

Follows DeepSpeed 0.19.8's PartitionedParameterCoordinator in a pass after its trace is complete (from the second
micro-step on). Line numbers are those of `runtime/zero/partitioned_param_coordinator.py` where no file is named.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import Mark, Module, Point, StepPhase
from orchestrator.predict.job import Job
from orchestrator.predict.memo import remembered
from orchestrator.predict.weights import Weight
from orchestrator.predict.zero3 import is_persistent

_NEVER = -(10**10)
_ANY_POINT = Point(1, 1)
_CALLS = {int(Mark.BEFORE_FORWARD), int(Mark.AFTER_FORWARD), int(Mark.BEFORE_BACKWARD), int(Mark.AFTER_BACKWARD)}


@dataclass(frozen=True)
class GatherWindow:
    """Gathered bytes beside shards and persistent weights, by the marks they belong to.

    The allocations come from a stream of their own when `overlap_comm` is on: what is freed there can only serve later
    gathers. `events` and `sizes_bytes` are that stream in a profile's form; `event_marks` is each event's row in the
    marks.
    """

    live_bytes: NDArray[np.int64]
    """After each mark."""
    peak_bytes: NDArray[np.int64]
    """Highest while the mark's call is handled."""
    events: NDArray[np.int32]
    sizes_bytes: NDArray[np.int64]
    event_marks: NDArray[np.int32]
    gathered_bytes: int
    """Of all gathers together: what the pass receives and sends."""

    def held_bytes(self, marks_ahead: int) -> NDArray[np.int64]:
        """Bytes after each mark when the host runs that many marks ahead of the device: what it has freed is taken
        until the device has passed that point (runtime/zero/partition_parameters.py:327, `record_stream`).

        It is reserved, not allocated, and no limit: an allocator that runs out waits for the device and takes it back.
        """
        births = self.events > 0
        sizes = np.where(births, 1, -1) * self.sizes_bytes[np.abs(self.events) - 1]
        rows = len(self.live_bytes)
        delayed = np.where(births, self.event_marks, np.minimum(self.event_marks + marks_ahead, rows))
        return np.cumsum(np.bincount(delayed, weights=sizes, minlength=rows + 1)).astype(np.int64)[:rows]


@dataclass
class _Gather:
    """Weights that were gathered by one call, until the last of them has been waited for."""

    waiting: set[int]
    flat_storages: list[int]
    is_coalesced: bool
    is_complete: bool = False


@dataclass
class _Storages:
    """Allocations in their order."""

    events: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    event_marks: list[int] = field(default_factory=list)
    mark: int = 0

    def allocate(self, size_bytes: int) -> int:
        self.sizes_bytes.append(size_bytes)
        storage = len(self.sizes_bytes)
        self.events.append(storage)
        self.event_marks.append(self.mark)
        return storage

    def free(self, storage: int) -> None:
        self.events.append(-storage)
        self.event_marks.append(self.mark)


def zero3_window(
    weights: Sequence[Weight], modules: Sequence[Module], marks: NDArray[np.int32], job: Job
) -> GatherWindow:
    """The window over `marks` (rows as in a profile), in the first micro-step after an optimizer step."""
    # nothing else moves the window, so a sweep asks for few different ones
    settings = Job(
        point=_ANY_POINT,
        world_size=job.world_size,
        offload_param=job.offload_param,
        stage3_max_live_parameters=job.stage3_max_live_parameters,
        stage3_max_reuse_distance=job.stage3_max_reuse_distance,
        stage3_prefetch_bucket_size=job.stage3_prefetch_bucket_size,
        stage3_param_persistence_threshold=job.stage3_param_persistence_threshold,
    )
    return _cached_window(weights, modules, marks, settings)


@remembered(identities=3, size=128)
def _cached_window(
    weights: Sequence[Weight], modules: Sequence[Module], marks: NDArray[np.int32], job: Job
) -> GatherWindow:
    owned = [module.parameters for module in modules]
    calls = _calls(marks)
    steps = [owned[payload] for _, mark, payload, _ in calls if _is_fetch(mark)]
    coordinator = _Coordinator(weights, steps, job)
    for row, mark, payload, in_backward in calls:
        coordinator.storages.mark = row
        own = owned[payload]
        match Mark(mark):
            case Mark.BEFORE_FORWARD:
                coordinator.fetch(payload, own, is_recomputation=in_backward)
            case Mark.BEFORE_BACKWARD:
                coordinator.active_backward[payload] = None
                coordinator.fetch(payload, own, is_recomputation=False)
            case Mark.AFTER_FORWARD:
                coordinator.release(payload, own)
            case _:
                coordinator.release_backward(payload, own)
    coordinator.storages.mark = len(marks)
    coordinator.release_leftovers(owned)
    return _window(coordinator.storages, len(marks), coordinator.gathered_bytes)


@remembered(identities=1, size=64)
def _calls(marks: NDArray[np.int32]) -> list[tuple[int, int, int, bool]]:
    calls, in_backward = [], False
    for row, (_, mark, payload) in enumerate(marks.tolist()):
        if mark == Mark.PHASE:
            in_backward = payload == StepPhase.BACKWARD
        elif mark in _CALLS:
            calls.append((row, mark, payload, in_backward))
    return calls


def _is_fetch(mark: int) -> bool:
    return mark in (Mark.BEFORE_FORWARD, Mark.BEFORE_BACKWARD)


def _window(storages: _Storages, rows: int, gathered_bytes: int) -> GatherWindow:
    events = np.array(storages.events, dtype=np.int32)
    sizes = np.array(storages.sizes_bytes, dtype=np.int64)
    at = np.array(storages.event_marks, dtype=np.int32)
    changes = np.sign(events) * sizes[np.abs(events) - 1]
    totals = np.cumsum(changes)
    live = np.cumsum(np.bincount(at, weights=changes, minlength=rows + 1)).astype(np.int64)
    peak = np.concatenate([[0], live[:-1]])
    np.maximum.at(peak, at, totals)
    return GatherWindow(live[:rows], peak[:rows], events, sizes, at, gathered_bytes)


class _Coordinator:
    """The state of PartitionedParameterCoordinator, in the names of its fields."""

    def __init__(self, weights: Sequence[Weight], steps: Sequence[tuple[int, ...]], job: Job) -> None:
        self.storages = _Storages()
        self.gathered_bytes = 0
        self.active_backward: dict[int, None] = {}
        self._weights = weights
        self._job = job
        self._persists = [is_persistent(weight, job) for weight in weights]
        self._available = list(self._persists)
        self._in_flight: dict[int, _Gather] = {}
        self._storage: dict[int, int] = {}
        self._active: list[set[int]] = [set() for _ in weights]
        self._recomputed: dict[int, set[int]] = {}
        self._step = 0
        self._available_numel = 0
        self._fetched_for = [_NEVER] * len(weights)
        self._queue = deque((index, step) for step, own in enumerate(steps) for index in sorted(set(own)))
        self._uses: list[list[int]] = [[] for _ in weights]
        self._traversed_numel = [0]
        for step, own in enumerate(steps):
            for index in set(own):
                self._uses[index].append(step)
            numel = sum(weights[index].numel for index in own)
            self._traversed_numel.append(self._traversed_numel[-1] + numel)

    def fetch(self, module: int, own: Sequence[int], is_recomputation: bool) -> None:
        """Gather what the module needs, wait for it, and gather ahead (:348, `_fetch_sub_module_impl`)."""
        needed = list(dict.fromkeys(own))
        self._gather([index for index in needed if self._is_absent(index)])
        for index in needed:
            self._active[index].add(module)
            if is_recomputation and self.active_backward and not self._weights[index].is_trained:
                # the frozen weights of a recomputed layer belong to the module whose backward asked for it (:390)
                owner = next(reversed(self.active_backward))
                self._recomputed.setdefault(owner, set()).add(index)
                self._active[index].add(owner)
            self._wait(index)
        self._skip_in_queue(needed)
        self._prefetch()
        self._step += 1

    def release(self, module: int, own: Sequence[int]) -> None:
        """After a module's forward pass (:494)."""
        for index in dict.fromkeys(own):
            self._active[index].discard(module)
            if self._may_go(index):
                self._free(index)

    def release_backward(self, module: int, own: Sequence[int]) -> None:
        """After a module's backward pass: with the weights recomputed for it, used again soon or not (:503)."""
        recomputed = self._recomputed.pop(module, set())
        self.active_backward.pop(module, None)
        for index in dict.fromkeys([*own, *sorted(recomputed)]):
            self._active[index].discard(module)
            if self._may_go(index) if index not in recomputed else not self._persists[index]:
                self._free(index)

    def release_leftovers(self, owned: Sequence[tuple[int, ...]]) -> None:
        """Modules whose backward pass has not ended (:557)."""
        while self.active_backward:
            module, _ = self.active_backward.popitem()
            for index in {*owned[module], *self._recomputed.pop(module, set())}:
                self._active[index].discard(module)
                if not self._persists[index]:
                    self._free(index)

    def _is_absent(self, index: int) -> bool:
        return not self._available[index] and index not in self._in_flight

    def _gather(self, indices: Sequence[int]) -> None:
        """One weight arrives in a buffer that it keeps; several in a flat one of which each gets a copy later
        (runtime/zero/partition_parameters.py:1373-1412, 1329-1371). One rank alone gathers nothing (:904)."""
        if not indices:
            return
        self._available_numel += sum(self._weights[index].numel for index in indices)
        if self._job.world_size == 1:
            self._keep_own(indices)
            return
        ranks = self._job.world_size
        sizes = {index: self._weights[index].padded_bytes(ranks) for index in indices}
        self.gathered_bytes += sum(sizes.values())
        self._bring_shards(indices)
        gather = _Gather(set(indices), [], is_coalesced=len(indices) > 1)
        if gather.is_coalesced:
            by_type: dict[int, int] = {}
            for index in indices:
                element_bytes = self._weights[index].element_bytes
                by_type[element_bytes] = by_type.get(element_bytes, 0) + sizes[index]
            gather.flat_storages = [self.storages.allocate(size_bytes) for size_bytes in by_type.values()]
        else:
            self._storage[indices[0]] = self.storages.allocate(sizes[indices[0]])
        self._in_flight.update(dict.fromkeys(indices, gather))

    def _keep_own(self, indices: Sequence[int]) -> None:
        if self._job.offload_param != "none":
            for index in indices:
                self._storage[index] = self.storages.allocate(self._weights[index].bytes)
        self._in_flight.update(dict.fromkeys(indices, _Gather(set(indices), [], is_coalesced=False)))

    def _bring_shards(self, indices: Sequence[int]) -> None:
        """Parts that lie on the host pass through the device (runtime/zero/partition_parameters.py:1356, 1399)."""
        if self._job.offload_param == "none":
            return
        size_bytes = sum(self._weights[index].shard_bytes(self._job.world_size) for index in indices)
        self.storages.free(self.storages.allocate(size_bytes))

    def _wait(self, index: int) -> None:
        """The first wait of a coalesced gather copies all its weights out of the flat buffer, which lives until the
        last of them is waited for (:404; runtime/zero/partition_parameters.py:779-798)."""
        gather = self._in_flight.pop(index, None)
        if gather is None:
            return
        if not gather.is_complete:
            gather.is_complete = True
            for each in sorted(gather.waiting):
                self._available[each] = True
                if gather.is_coalesced:
                    self._storage[each] = self.storages.allocate(self._weights[each].bytes)
        gather.waiting.discard(index)
        if not gather.waiting:
            for storage in gather.flat_storages:
                self.storages.free(storage)

    def _skip_in_queue(self, needed: Sequence[int]) -> None:
        new = {index for index in needed if self._fetched_for[index] < self._step}
        skipped: set[int] = set()
        while self._queue and len(skipped) < len(new):
            index, step = self._queue.popleft()
            self._fetched_for[index] = step
            skipped.add(index)

    def _prefetch(self) -> None:
        """As long as there is room in `max_live_parameters`, at least one weight ahead (:443-468)."""
        job = self._job
        room_numel = min(job.stage3_max_live_parameters - self._available_numel, job.stage3_prefetch_bucket_size)
        chosen: dict[int, None] = {}
        numel = 0
        while self._queue and numel < room_numel:
            index, step = self._queue.popleft()
            self._fetched_for[index] = max(self._fetched_for[index], step)
            if index not in chosen and self._is_absent(index):
                chosen[index] = None
                numel += self._weights[index].numel
        self._gather(list(chosen))

    def _may_go(self, index: int) -> bool:
        """Not if its next use was passed over by the prefetch, or is near (:637, `__params_to_release`)."""
        if self._persists[index] or self._fetched_for[index] > self._step:
            return False
        uses = self._uses[index]
        at = bisect_left(uses, self._step)
        if at == len(uses):
            return True
        distance = self._traversed_numel[uses[at]] - self._traversed_numel[self._step]
        return distance >= self._job.stage3_max_reuse_distance

    def _free(self, index: int) -> None:
        if not self._available[index] or self._active[index]:
            return
        self._available[index] = False
        self._available_numel -= self._weights[index].numel
        storage = self._storage.pop(index, None)
        if storage is not None:
            self.storages.free(storage)


def largest_gather_bytes(weights: Iterable[Weight], job: Job) -> int:
    """Of a single weight, padding included: no setting makes the window smaller than that."""
    sizes = [weight.padded_bytes(job.world_size) for weight in weights if not is_persistent(weight, job)]
    return max(sizes, default=0)
