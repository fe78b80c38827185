"""Trials that wait for devices, and which of them starts next. Pure.

First come, first served, but for this: a trial without room may be overtaken by later ones that have room, so that
devices do not stand idle until as many are free as it needs. A stream of small trials could keep it waiting for ever;
so those that overtake it may have as many devices as it has itself, all together. After that nothing starts before it
does: running trials end, none takes their devices, and its turn comes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.contract.record import TrialRecord

LONGEST = 4
"""While so many wait, nothing new is asked for: a candidate is chosen best by what is known when it starts."""


@dataclass
class _Waiting:
    record: TrialRecord
    overtaken_devices: int = 0

    def lets_pass(self, devices: int) -> bool:
        return self.overtaken_devices + devices <= self.record.config.world_size


class Line:
    """The trials that wait, first come first."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> TrialRecord | None:
        """The one whose turn it is; None: nobody waits."""
        return self._waiting[0].record if self._waiting else None

    @property
    def new(self) -> int:
        """How many were never launched."""
        return sum(not each.record.attempts for each in self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether a trial that is yet to be chosen could start before those that wait."""
        return len(self._waiting) < LONGEST and all(each.lets_pass(1) for each in self._waiting)

    def join(self, record: TrialRecord) -> None:
        """Go to the end of the line."""
        self._waiting.append(_Waiting(record))

    def leave(self, room_for: Callable[[TrialRecord], bool]) -> TrialRecord | None:
        """The first that may start, which leaves the line; None: nobody may."""
        for position, each in enumerate(self._waiting):
            devices = each.record.config.world_size
            if not all(before.lets_pass(devices) for before in self._waiting[:position]):
                continue
            if room_for(each.record):
                self._overtake(position, devices)
                del self._waiting[position]
                return each.record
        return None

    def passes(self, record: TrialRecord) -> bool:
        """Whether `record`, for which there is room, may start before all that wait; counts as done when it may."""
        devices = record.config.world_size
        if not all(each.lets_pass(devices) for each in self._waiting):
            return False
        self._overtake(len(self._waiting), devices)
        return True

    def _overtake(self, position: int, devices: int) -> None:
        for before in self._waiting[:position]:
            before.overtaken_devices += devices
