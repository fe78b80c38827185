"""Whether a GPU is free of what others, or a trial before, left on it."""

import time
from collections.abc import Callable

from orchestrator.contract.units import MIB, format_bytes
from orchestrator.placement.local_devices import LocalDevice, gpus

CLEAN_DEADLINE_S = 60.0
"""How long memory of an ended process may take to come back; the driver tears a context down in seconds."""
LOOK_AGAIN_S = 0.5
_SLACK_BYTES = 512 * MIB
"""More than what was in use before the first trial: a CUDA context of somebody else takes 300 to 500 MiB."""
_RESTING_SHARE = 0.1
"""Of a card's memory, that a desktop may take for good."""


class DirtWatch:
    """Looks at the GPUs that a CUDA_VISIBLE_DEVICES value names, first before any trial ran on them.

    `look`: see `orchestrator.placement.local_devices.gpus`.
    """

    def __init__(self, visible: str | None, look: Callable[[str | None], list[LocalDevice]] = gpus) -> None:
        self._visible = visible
        self._look = look
        self._resting_bytes = {gpu.index: self._at_rest_bytes(gpu) for gpu in self._gpus()}

    def dirt(self) -> tuple[str, ...]:
        """What makes them unfit for a trial, in words; empty when they are clean."""
        return tuple(words for gpu in self._gpus() for words in self._dirt_on(gpu))

    def _gpus(self) -> list[LocalDevice]:
        return self._look(self._visible) if self._visible else []

    def _dirt_on(self, gpu: LocalDevice) -> tuple[str, ...]:
        if gpu.occupants:
            return gpu.occupants
        if gpu.used_bytes is None or gpu.used_bytes <= self._resting_bytes.get(gpu.index, 0) + _SLACK_BYTES:
            return ()
        return (f"GPU {gpu.index}: {format_bytes(gpu.used_bytes)} are in use though no process is seen",)

    @staticmethod
    def _at_rest_bytes(gpu: LocalDevice) -> int:
        return min(gpu.used_bytes or 0, round(_RESTING_SHARE * (gpu.memory_bytes or 0)))


class CleanWait:
    """Waits, without blocking, until a device is clean; made when a rank is to begin on it."""

    def __init__(self, watch: DirtWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._watch = watch
        self._clock = clock
        self._since_s = self._looked_s = clock()
        self.dirt = watch.dirt()

    @property
    def is_over(self) -> bool:
        """Whether it is clean, or was waited for long enough."""
        now_s = self._clock()
        if self.dirt and now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s = now_s
            self.dirt = self._watch.dirt()
        return not self.dirt or now_s - self._since_s > CLEAN_DEADLINE_S
