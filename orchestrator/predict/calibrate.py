"""Fit the clock's constants and the bill's residuals to what a sweep has measured, starting from stated priors.

Both fits are robust least squares on log errors with a Gaussian prior at the defaults, so that one observation moves
the constants a little and many decide them. Spreads are standard deviations of log errors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, hypot, log, sqrt

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.units import MIB
from orchestrator.predict.constants import CUDA_CLOCK, ClockConstants
from orchestrator.predict.machine import Links, Processor
from orchestrator.predict.time import priced
from orchestrator.predict.work import StepWork

TIME_NOISE = 0.1
"""Log error of one step time by a well fitted clock: what its rules leave out, beside the 1-3 % by which runs of one
configuration differ on a quiet device. Of 0.03, 0.1 and 0.2 the one with which fits to 3 to 16 of half of 239 trials on
one core of an EPYC foretold the other half best."""
_PRIOR_DEGREES = 4.0
"""How many observations the stated spread counts for."""
_ROBUST_SCALE = 3.0
"""Residuals beyond this many standard deviations pull linearly, not squared."""

TIME_SPREAD = 0.2
"""Log error of the clock before anything was measured. Assumed; the published rows give each user a better one."""

_RATES: dict[str, tuple[tuple[str, ...], float]] = {
    "compute": (("compute_efficiency", "attention_efficiency", "plain_attention_efficiency"), 0.15),
    "memory": (("memory_efficiency",), 0.25),
    "fresh": (("fresh_bytes_per_s",), 0.40),
    "link": (("link_efficiency", "host_link_efficiency"), 0.40),
    "host": (("host_optimizer_efficiency", "host_core_bytes_per_s"), 0.50),
    "overhead": (("overhead_factor",), 0.50),
}
"""What is fitted: the constants that share a factor, and the prior's standard deviation of its log."""
_TIMES = frozenset({"overhead_factor"})
"""Of those constants, the ones that say how long something takes; the others say how fast it goes."""
_COMMON_SPREAD = 0.5
"""Of the factor that all of them share: a machine that is as slow in everything shows in the first trial."""


@dataclass(frozen=True)
class TimeObservation:
    """A measured step of known work on a known machine."""

    work: StepWork
    processor: Processor
    links: Links
    step_s: float


@dataclass(frozen=True)
class ClockFit:
    """`spread`: of the next prediction's log error."""

    constants: ClockConstants
    spread: float


def calibrate(
    observations: Sequence[TimeObservation],
    start: ClockConstants = CUDA_CLOCK,
    start_spread: float = TIME_SPREAD,
    noise: float = TIME_NOISE,
) -> ClockFit:
    """The constants that explain `observations` best without leaving `start` for nothing. `noise`: of one log error."""
    if not observations:
        return ClockFit(start, start_spread)
    scales = np.array([_COMMON_SPREAD, *(spread for _, spread in _RATES.values())])

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = _scaled(start, logs)
        return np.array(
            [
                log(priced(seen.work, seen.processor, seen.links, constants).step_s / seen.step_s)
                for seen in observations
            ]
        )

    logs, spread = _fit(errors, np.zeros(len(scales)), scales, noise, start_spread)
    return ClockFit(_scaled(start, logs), spread)


def _scaled(start: ClockConstants, logs: NDArray[np.float64]) -> ClockConstants:
    """`start` with all times `exp(logs[0])` as long, and those of each of `_RATES` once more by its own factor."""
    changes: dict[str, float] = {}
    for (names, _), own in zip(_RATES.values(), logs[1:], strict=True):
        slower = exp(logs[0] + own)
        for name in names:
            value = getattr(start, name)
            changes[name] = value * slower if name in _TIMES else value / slower
    return replace(start, **changes)


@dataclass(frozen=True)
class MemoryObservation:
    """A measured peak beside its prediction, in bytes. `is_lower_bound`: the run failed when it had so much."""

    structure: str
    """What is traced once: runs of one structure share an error."""
    predicted_bytes: float
    measured_bytes: float
    is_lower_bound: bool = False


@dataclass(frozen=True)
class MemoryCalibration:
    """`measured = base + ratio of the structure * predicted`, and how far that is off."""

    base_bytes: float
    common_ratio: float
    spread: float
    """Of a log error within a known structure."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    between_spread: float = 0.0
    """Of the structures' log ratios among each other."""

    def corrected_bytes(self, structure: str, predicted_bytes: float) -> float:
        """The best guess of what would be measured."""
        return self.base_bytes + self.ratios.get(structure, self.common_ratio) * predicted_bytes

    def log_spread(self, structure: str) -> float:
        """Standard deviation of the guess's log error: wider where the structure was never measured."""
        return self.spread if structure in self.ratios else hypot(self.spread, self.between_spread)


@dataclass(frozen=True)
class MemoryPrior:
    """What is believed before a sweep. `spread` comes from published rows; the rest is assumed."""

    spread: float
    base_bytes: float = 0.0
    base_spread_bytes: float = 512 * MIB
    """A device's context and libraries differ by driver by about so much."""
    common_spread: float = 0.08
    structure_spread: float = 0.04
    noise: float = 0.02
    """Log error of one measured peak; 0.06 for address space on CPU."""


def calibrate_memory(observations: Sequence[MemoryObservation], prior: MemoryPrior) -> MemoryCalibration:
    """Base and ratios that explain the measured peaks."""
    if not observations:
        return MemoryCalibration(prior.base_bytes, 1.0, prior.spread)
    names = sorted({seen.structure for seen in observations})
    index = np.array([names.index(seen.structure) for seen in observations])
    predicted = np.array([seen.predicted_bytes for seen in observations])
    measured = np.array([seen.measured_bytes for seen in observations])
    is_bound = np.array([seen.is_lower_bound for seen in observations])

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """`values`: base in units of its spread, log of the common ratio, and each structure's deviation from it."""
        base = prior.base_bytes + values[0] * prior.base_spread_bytes
        guess = np.maximum(base + np.exp(values[1] + values[2 + index]) * predicted, 1.0)
        found: NDArray[np.float64] = np.log(guess / measured)
        found[is_bound] = np.minimum(found[is_bound], 0.0)
        return found

    scales = np.array([1.0, prior.common_spread, *[prior.structure_spread] * len(names)])
    values, spread = _fit(errors, np.zeros(len(scales)), scales, prior.noise, prior.spread)
    deviations = values[2:]
    return MemoryCalibration(
        base_bytes=prior.base_bytes + float(values[0]) * prior.base_spread_bytes,
        common_ratio=exp(values[1]),
        spread=spread,
        ratios={name: exp(values[1] + deviation) for name, deviation in zip(names, deviations, strict=True)},
        between_spread=sqrt(float(np.mean(deviations**2))),
    )


def _fit(
    errors: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    start: NDArray[np.float64],
    scales: NDArray[np.float64],
    noise: float,
    start_spread: float,
) -> tuple[NDArray[np.float64], float]:
    """The posterior's mode, and the spread of a new log error. Residuals count by the freedom that the fit left."""
    from scipy.optimize import least_squares  # takes 0.2 s to import: only a sweep pays it

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([errors(values) / noise, (values - start) / scales])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=_ROBUST_SCALE)
    left = errors(found.x)
    slopes = found.jac[: len(left)]
    spent = float(np.trace(slopes @ np.linalg.solve(found.jac.T @ found.jac, slopes.T)))
    freedom = max(0.0, len(left) - spent)
    variance = (_PRIOR_DEGREES * start_spread**2 + float(left @ left)) / (_PRIOR_DEGREES + freedom)
    return found.x, sqrt(variance)
