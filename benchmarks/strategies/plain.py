"""Strategies that learn nothing: chance, the order of the table, the order of the prediction."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Script, Scripted


def _in_order(order: Iterable[int]) -> Script:
    for candidate in order:
        yield int(candidate)


def predicted_to_fit(landscape: Landscape) -> NDArray[np.bool_]:
    """Those whose predicted needs are below the limits."""
    device = landscape.prior["peak_gib"] <= landscape.limits["peak_gib"]
    return np.asarray(device & (landscape.prior["host_gib"] <= landscape.limits["host_gib"]))


def grid(landscape: Landscape, seed: int) -> Scripted:
    """All candidates as the table has them."""
    return Scripted(_in_order(range(len(landscape.candidates))))


def random(landscape: Landscape, seed: int) -> Scripted:
    """All candidates in random order."""
    return Scripted(_in_order(np.random.default_rng(seed).permutation(len(landscape.candidates)).tolist()))


def random_fit(landscape: Landscape, seed: int) -> Scripted:
    """Those that are predicted to fit, in random order, then the others."""
    rng, fits = np.random.default_rng(seed), predicted_to_fit(landscape)
    return Scripted(_in_order([*rng.permutation(np.flatnonzero(fits)), *rng.permutation(np.flatnonzero(~fits))]))


def prior_order(landscape: Landscape, seed: int) -> Scripted:
    """Those that are predicted to fit from the fastest down, then the others from the smallest up."""
    fits = predicted_to_fit(landscape)
    speeds, needs = landscape.prior["tokens_per_s"], landscape.prior["peak_gib"]
    first: Sequence[int] = sorted(np.flatnonzero(fits).tolist(), key=lambda row: -speeds[row])
    return Scripted(_in_order([*first, *sorted(np.flatnonzero(~fits).tolist(), key=lambda row: needs[row])]))
