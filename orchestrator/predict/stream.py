"""A profile at one point: how many bytes of each place are alive over one micro-step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import Mark, Place, Point, Profile, StepPhase

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
    pending_bytes: NDArray[np.int64]
    mark_moments: NDArray[np.int64]
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
        row_of = np.zeros(self.moments, dtype=np.int64)
        row_of[self.mark_moments] = 1
        rows = np.cumsum(row_of)
        return np.concatenate([[0], by_mark])[rows]


def stream_at(profile: Profile, point: Point) -> Stream:
    """The micro-step of `profile` at `point`."""
    sizes = rounded_bytes(profile, point)
    storages = np.abs(profile.events) - 1
    changes = np.where(profile.events > 0, sizes[storages], -sizes[storages])
    places = profile.storage_place[storages]
    positions, kinds, payloads = profile.marks.T.astype(np.int64)
    event_moments = np.arange(len(profile.events)) + np.searchsorted(positions, np.arange(len(profile.events)), "right")
    moments = len(profile.events) + len(positions)
    mark_moments = positions + np.arange(len(positions))
    live = {}
    for place in Place:
        by_moment = np.zeros(moments, dtype=np.int64)
        by_moment[event_moments] = np.where(places == place, changes, 0)
        live[place] = np.cumsum(by_moment)
    gradients = live.pop(Place.GRADIENT)
    gradient_marks = np.flatnonzero(kinds == Mark.GRADIENT)
    settled = np.zeros(moments, dtype=np.int64)
    at = mark_moments[gradient_marks]
    settled[at] = np.diff(gradients[at], prepend=0)
    is_backward = (kinds == Mark.PHASE) & (payloads == StepPhase.BACKWARD)
    return Stream(
        live_bytes=live,
        pending_bytes=gradients - np.cumsum(settled),
        mark_moments=mark_moments,
        backward_start=int(mark_moments[np.flatnonzero(is_backward)[0]]),
        gradient_order=tuple(payloads[gradient_marks].tolist()),
        gradient_marks=gradient_marks,
    )


def rounded_bytes(profile: Profile, point: Point) -> NDArray[np.int64]:
    """Bytes of every storage at `point`, as the device's allocator rounds them."""
    unit = ALLOCATION_BYTES[profile.request.device]
    return (profile.storage_bytes(point) + unit - 1) // unit * unit
