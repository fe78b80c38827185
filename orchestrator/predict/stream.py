"""A profile at one point: how many bytes of each place are alive over one micro-step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import Mark, Place, Point, Profile, StepPhase
from orchestrator.predict.memo import remembered

ALLOCATION_BYTES: dict[str, int] = {"cuda": 512, "cpu": 64}
"""What PyTorch's allocators round a tensor up to (torch 2.13 c10/core/AllocatorConfig.h `kMinBlockSize`, and
c10/core/alignment.h `gAlignment`)."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Moments of one micro-step in order: one after each event, and one at each mark, before the next event.

    `live_bytes[place]` and `pending_bytes` have one value a moment. `pending_bytes` is of gradients that are being
    made; gradients that are whole are left to the engine. `mark_moments[k]` is the moment of the k-th mark.
    """

    live_bytes: dict[Place, NDArray[np.int64]]
    whole_live_bytes: NDArray[np.int64]
    """Of all places."""
    pending_bytes: NDArray[np.int64]
    mark_moments: NDArray[np.int64]
    latest_marks: NDArray[np.int64]
    """How many marks there were until each moment."""
    backward_start: int
    """The first moment of the backward pass."""
    gradient_order: tuple[int, ...]
    """Parameters in the order in which their gradients become whole."""
    gradient_marks: NDArray[np.int64]
    """Rows of the marks that say so."""

    @property
    def moments(self) -> int:
        """How many there are."""
        return len(self.pending_bytes)

    def over_time(self, by_mark: NDArray[np.int64]) -> NDArray[np.int64]:
        """A quantity that changes at marks (one value for each, as of after it) as one value a moment; 0 before."""
        return np.concatenate([[0], by_mark])[self.latest_marks]


@dataclass(frozen=True, eq=False)
class _Order:
    """What is where in a profile's micro-step, whatever its size."""

    storages: NDArray[np.int32]
    signs: NDArray[np.int64]
    moments: int
    moments_of: dict[Place, NDArray[np.int64]]
    """Of the events of each place."""
    events_of: dict[Place, NDArray[np.int64]]
    mark_moments: NDArray[np.int64]
    latest_marks: NDArray[np.int64]
    backward_start: int
    gradient_order: tuple[int, ...]
    gradient_marks: NDArray[np.int64]


@remembered(identities=1, size=64)
def _order(profile: Profile) -> _Order:
    storages = np.abs(profile.events) - 1
    places = profile.storage_place[storages]
    positions, kinds, payloads = profile.marks.T.astype(np.int64)
    events = np.arange(len(profile.events))
    event_moments = events + np.searchsorted(positions, events, "right")
    mark_moments = positions + np.arange(len(positions))
    moments = len(profile.events) + len(positions)
    is_mark = np.zeros(moments, dtype=np.int64)
    is_mark[mark_moments] = 1
    events_of = {place: np.flatnonzero(places == place) for place in Place}
    gradient_marks = np.flatnonzero(kinds == Mark.GRADIENT)
    is_backward = (kinds == Mark.PHASE) & (payloads == StepPhase.BACKWARD)
    return _Order(
        storages=storages,
        signs=np.sign(profile.events).astype(np.int64),
        moments=moments,
        moments_of={place: event_moments[found] for place, found in events_of.items()},
        events_of=events_of,
        mark_moments=mark_moments,
        latest_marks=np.cumsum(is_mark),
        backward_start=int(mark_moments[np.flatnonzero(is_backward)[0]]),
        gradient_order=tuple(payloads[gradient_marks].tolist()),
        gradient_marks=gradient_marks,
    )


def stream_at(profile: Profile, point: Point) -> Stream:
    """The micro-step of `profile` at `point`. Its arrays are shared: they must not be changed."""
    return _stream(profile, point)


@remembered(identities=1, size=64)
def _stream(profile: Profile, point: Point) -> Stream:
    order = _order(profile)
    changes = order.signs * rounded_bytes(profile, point)[order.storages]
    live = {}
    for place in Place:
        by_moment = np.zeros(order.moments, dtype=np.int64)
        by_moment[order.moments_of[place]] = changes[order.events_of[place]]
        live[place] = np.cumsum(by_moment)
    gradients = live.pop(Place.GRADIENT)
    settled = np.zeros(order.moments, dtype=np.int64)
    at = order.mark_moments[order.gradient_marks]
    settled[at] = np.diff(gradients[at], prepend=0)
    return Stream(
        live_bytes=live,
        whole_live_bytes=sum(live.values(), np.zeros(order.moments, dtype=np.int64)),
        pending_bytes=gradients - np.cumsum(settled),
        mark_moments=order.mark_moments,
        latest_marks=order.latest_marks,
        backward_start=order.backward_start,
        gradient_order=order.gradient_order,
        gradient_marks=order.gradient_marks,
    )


def rounded_bytes(profile: Profile, point: Point) -> NDArray[np.int64]:
    """Bytes of every storage at `point`, as the device's allocator rounds them."""
    unit = ALLOCATION_BYTES[profile.request.device]
    return (profile.storage_bytes(point) + unit - 1) // unit * unit
