"""Gaussian processes over configurations: how far measurements lie from predictions, and where that is likely to hold.

The kernel is a common offset, a sum over knobs and a product over knobs. Along a knob with an order, most of the
covariance is between equal levels alone and the rest falls with distance, so that a dip at one micro-batch is not
smeared over its neighbours. A knob that has no effect beside the others is a level of its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Levels = NDArray[np.int64]
"""Configurations by knobs: the index of each knob's level."""

SHARE_OF_LEVEL = 0.7
"""Of the covariance along an ordered knob, between equal levels alone."""
LENGTH = 0.3
"""Over which the rest falls, as a share of the knob's range."""
FLOOR = 0.3
"""Of a knob's factor in the product, where levels differ."""


@dataclass(frozen=True)
class Amplitudes:
    """Standard deviations, in log units, of what the kernel's parts explain."""

    offset: float
    knob: float
    product: float
    noise: float


@dataclass(frozen=True)
class Axis:
    """A knob of so many `levels`. `positions` (0 to 1) order the first of them; levels past them have no place in the
    order, since the knob has no effect there. Without positions no level is nearer to one than to another."""

    levels: int
    positions: tuple[float, ...] = ()

    def table(self) -> Floats:
        """Covariance between levels, 1 on the diagonal."""
        table = np.eye(self.levels)
        known = len(self.positions)
        at = np.array(self.positions)
        smooth = np.exp(-0.5 * ((at[:, None] - at[None, :]) / LENGTH) ** 2)
        table[:known, :known] = SHARE_OF_LEVEL * np.eye(known) + (1 - SHARE_OF_LEVEL) * smooth
        return table


@dataclass(frozen=True)
class Belief:
    """Mean and standard deviation of a log quantity at every configuration."""

    mean: Floats
    deviation: Floats


@dataclass(frozen=True, eq=False)
class Geometry:
    """How alike configurations are: `total` over single knobs (0 to 1), and `product` over all of them."""

    total: Floats
    product: Floats

    def covariance(self, amplitudes: Amplitudes) -> Floats:
        """One row for each configuration, one column for each that was seen."""
        return amplitudes.offset**2 + amplitudes.knob**2 * self.total + amplitudes.product**2 * self.product


def geometry(levels: Levels, seen: Rows, axes: tuple[Axis, ...]) -> Geometry:
    """Of all configurations (rows of `levels`) with those at the rows `seen`."""
    total = np.zeros((len(levels), len(seen)))
    product = np.ones((len(levels), len(seen)))
    for column, axis in enumerate(axes):
        part = axis.table()[levels[:, column][:, None], levels[seen, column][None, :]]
        total += part
        product *= FLOOR + (1 - FLOOR) * part
    return Geometry(total, product)


def fit(
    levels: Levels, seen: Rows, residuals: Floats, axes: tuple[Axis, ...], choices: tuple[Amplitudes, ...]
) -> Belief:
    """The belief about residuals at all `levels`, from those at the rows `seen`; of `choices` the likeliest counts."""
    if not len(seen):
        return Belief(np.zeros(len(levels)), np.full(len(levels), _prior_deviation(axes, choices[0])))
    near = geometry(levels, seen, axes)
    processes = [_Process(near, seen, residuals, amplitudes) for amplitudes in choices]
    return max(processes, key=lambda process: process.log_likelihood).predict(axes)


def _prior_deviation(axes: tuple[Axis, ...], amplitudes: Amplitudes) -> float:
    return float(np.sqrt(amplitudes.offset**2 + amplitudes.knob**2 * len(axes) + amplitudes.product**2))


class _Process:
    """A Gaussian process at fixed amplitudes."""

    def __init__(self, near: Geometry, seen: Rows, residuals: Floats, amplitudes: Amplitudes) -> None:
        self._amplitudes = amplitudes
        self._cross = near.covariance(amplitudes)
        own = self._cross[seen] + amplitudes.noise**2 * np.eye(len(seen))
        self._factor = cholesky(own, lower=True)
        self._scaled = solve_triangular(self._factor, residuals, lower=True)
        self.log_likelihood = float(-0.5 * self._scaled @ self._scaled - np.log(np.diag(self._factor)).sum())

    def predict(self, axes: tuple[Axis, ...]) -> Belief:
        half = solve_triangular(self._factor, self._cross.T, lower=True)
        variance = _prior_deviation(axes, self._amplitudes) ** 2 - np.einsum("ij,ij->j", half, half)
        return Belief(self._scaled @ half, np.sqrt(np.maximum(variance, 1e-12)))
