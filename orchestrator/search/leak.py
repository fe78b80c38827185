"""Memory that grows with every step: a trial of some twenty steps ends well where a training of thousands runs out."""

from dataclasses import dataclass

import numpy as np

from orchestrator.contract.outcome import Measurement

LEAST_STEPS = 5
"""Measured steps that it takes: of fewer, two or three that happen to rise would pass for a trend."""
TRAINING_STEPS = 1000
"""Optimizer steps of a short fine-tuning: growth that would not fill the device by then is left unsaid."""
_LEAST_SHARE = 0.002
"""Of the peak, that is to be added over the measured steps: heaps of a process on CPU gain and lose less."""
_LEAST_BYTES = 2**20
"""The same where the peak is small: an allocator takes memory by the block."""
_SURE = 4.0
"""Standard errors of the slope that it must lie above nothing."""
_RISING = 0.75
"""Share of steps after which more is held than before: what is kept once, as a cache is, rises once."""


@dataclass(frozen=True)
class Leak:
    """Bytes that each optimizer step leaves behind, and after how many steps the limit is met (None: no limit)."""

    bytes_per_step: float
    steps_to_limit: int | None


def leak_of(measurement: Measurement) -> Leak | None:
    """The leak of the rank that grows fastest; None where memory does not grow, or not enough to end a training: to
    meet the limit within TRAINING_STEPS, or without a limit to double the peak."""
    found = (_bytes_per_step(rank.held_bytes, rank.peak_memory_bytes) for rank in measurement.ranks)
    bytes_per_step = max((each for each in found if each is not None), default=None)
    if bytes_per_step is None:
        return None
    limit_bytes, peak_bytes = measurement.limit_bytes, measurement.peak_memory_bytes
    room_bytes = peak_bytes if limit_bytes is None else limit_bytes - peak_bytes
    steps = max(0, int(room_bytes / bytes_per_step))
    return Leak(bytes_per_step, None if limit_bytes is None else steps) if steps < TRAINING_STEPS else None


def _bytes_per_step(held_bytes: tuple[int, ...], peak_bytes: int) -> float | None:
    """Least squares over what was held after each step; None where it is not clearly above nothing."""
    count = len(held_bytes)
    if count < LEAST_STEPS:
        return None
    held, steps = np.array(held_bytes, dtype=np.float64), np.arange(count) - (count - 1) / 2
    slope = float(steps @ held / (steps @ steps))
    rest = held - held.mean() - slope * steps
    error = float(np.sqrt(rest @ rest / (count - 2) / (steps @ steps)))
    is_much = slope * (count - 1) > max(_LEAST_BYTES, _LEAST_SHARE * peak_bytes)
    is_steady = float(np.mean(np.diff(held) > 0)) >= _RISING
    return slope if is_much and is_steady and slope > _SURE * error else None
