"""Gaussian processes over configurations: how far measurements lie from predictions, and where that is likely to hold.

The kernel is a common offset, a sum over knobs and a product over knobs. Along a knob with an order, most of the
covariance is between equal levels alone and the rest falls with distance, so that a dip at one micro-batch is not
smeared over its neighbours. A knob that has no effect beside the others is a level of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Levels = NDArray[np.int64]
"""Configurations by knobs: the index of each knob's level."""

SHARE_OF_LEVEL = 0.85
"""Of the covariance along an ordered knob, between equal levels alone. 0.85 comes within 1 % of the best sooner than
0.7 on the landscapes that the other constants were chosen on. On those of `benchmarks.landscapes.simulate` 0.78 of
searches get there within 40 launches for 0.67 (seed 2), and 0.73 for 0.82 (seed 1)."""
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


class Residuals:
    """How alike the configurations of a space are, and what that says about residuals of any quantity.

    It keeps covariances with what was seen, for the next question, and no observations.
    """

    def __init__(self, levels: Levels, axes: Sequence[Axis]) -> None:
        self._levels = levels
        self._tables = [axis.table() for axis in axes]
        self._places: dict[int, int] = {}
        self._total = np.empty((0, len(levels)))
        self._product = np.empty((0, len(levels)))

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return len(self._levels)

    def fit(self, seen: Rows, residuals: Floats, choices: Sequence[Amplitudes]) -> "Process":
        """What residuals at the rows `seen` say of all; of `choices` the likeliest counts, without any the first."""
        own = self.alike(seen, seen)
        processes = [Process(self, seen, residuals, own, amplitudes) for amplitudes in choices]
        return max(processes, key=lambda process: process.log_likelihood)

    def alike(self, seen: Rows, rows: Rows | None = None) -> tuple[Floats, Floats]:
        """Of those at `seen` with those at `rows` (None: all): the sum over knobs and the product over knobs."""
        places = self._places_of(seen)
        if rows is None:
            return self._total[places], self._product[places]
        at = np.ix_(places, rows)
        return self._total[at], self._product[at]

    def prior_deviation(self, amplitudes: Amplitudes) -> float:
        """Of a residual of which nothing is known."""
        knobs = amplitudes.knob**2 * len(self._tables)
        return float(np.sqrt(amplitudes.offset**2 + knobs + amplitudes.product**2))

    def _places_of(self, seen: Rows) -> Rows:
        new = [row for row in dict.fromkeys(seen.tolist()) if row not in self._places]
        if new:
            total = np.zeros((len(new), self.size))
            product = np.ones((len(new), self.size))
            for column, table in enumerate(self._tables):
                part = table[self._levels[new, column]][:, self._levels[:, column]]
                total += part
                product *= FLOOR + (1 - FLOOR) * part
            self._places |= {row: len(self._places) + place for place, row in enumerate(new)}
            self._total = np.concatenate([self._total, total])
            self._product = np.concatenate([self._product, product])
        return np.array([self._places[row] for row in seen.tolist()], dtype=np.int64)


class Process:
    """A Gaussian process at fixed amplitudes. `log_likelihood`: of the residuals, but for a constant."""

    def __init__(
        self, space: Residuals, seen: Rows, residuals: Floats, own: tuple[Floats, Floats], amplitudes: Amplitudes
    ) -> None:
        self._space = space
        self._seen = seen
        self._amplitudes = amplitudes
        self._factor = self._root(own)
        scaled = solve_triangular(self._factor, residuals, lower=True, check_finite=False)
        self._weights = solve_triangular(self._factor, scaled, lower=True, trans="T", check_finite=False)
        self.log_likelihood = float(-0.5 * scaled @ scaled - np.log(np.diag(self._factor)).sum())

    def mean(self, rows: Rows) -> Floats:
        """The believed residuals at `rows`."""
        if not len(self._seen):
            return np.zeros(len(rows))
        return np.asarray(self._weights @ self._covariance(self._space.alike(self._seen, rows)))

    def belief(self, waiting: Rows) -> Belief:
        """The residual of every configuration. What waits is taken to come out as believed: it narrows, and moves
        nothing."""
        prior = self._space.prior_deviation(self._amplitudes)
        known = np.concatenate([self._seen, waiting])
        if not len(known):
            return Belief(np.zeros(self._space.size), np.full(self._space.size, prior))
        across = self._covariance(self._space.alike(known))
        factor = self._root(self._space.alike(known, known)) if len(waiting) else self._factor
        half = solve_triangular(factor, across, lower=True, overwrite_b=False, check_finite=False)
        variance = prior**2 - np.einsum("ij,ij->j", half, half)
        mean = self._weights @ across[: len(self._seen)]
        return Belief(np.asarray(mean), np.sqrt(np.maximum(variance, 1e-12)))

    def _root(self, own: tuple[Floats, Floats]) -> Floats:
        covariance = self._covariance(own)
        covariance[np.diag_indices_from(covariance)] += self._amplitudes.noise**2
        return np.asarray(cholesky(covariance, lower=True, check_finite=False))

    def _covariance(self, alike: tuple[Floats, Floats]) -> Floats:
        total, product = alike
        covariance = self._amplitudes.knob**2 * total
        covariance += self._amplitudes.product**2 * product
        covariance += self._amplitudes.offset**2
        return covariance
