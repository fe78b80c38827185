"""From sizes at a few points to exact laws in micro-batch, sequence and rank."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import MONOMIALS, Point


class NoLaw(Exception):
    """Sizes that no sum of MONOMIALS explains."""


_EXPONENTS = {exponents: index for index, exponents in enumerate(MONOMIALS)}


def laws_of(values: Sequence[Sequence[int]], points: Sequence[Point]) -> NDArray[np.float64]:
    """One law for each column of `values` (points x columns). Raises NoLaw with the first column that has none.

    The greatest prime factor of each coordinate divides none of the model's own sizes, so that the number of times
    that it divides a size is the coordinate's exponent. What is a sum, not a product, is fitted over all points.
    """
    table = np.array(values, dtype=np.float64)
    matrix = np.array([point.monomials() for point in points])
    columns, inverse = np.unique(table, axis=1, return_inverse=True)
    laws = np.zeros((columns.shape[1], len(MONOMIALS)))
    for number in range(columns.shape[1]):
        column = columns[:, number]
        law = _product(int(column[0]), points[0])
        if law is None or not np.array_equal(np.rint(matrix @ law), column):
            law = _sum(matrix, column)
        if law is None:
            raise NoLaw(f"no law explains the sizes {column.astype(int).tolist()} at {list(points)}")
        laws[number] = law
    return laws[inverse.reshape(-1)]


def _product(value: int, point: Point) -> NDArray[np.float64] | None:
    exponents = []
    coefficient = float(value)
    for coordinate in (point.micro_batch, point.sequence_tokens, point.lora_rank):
        times, prime = 0, greatest_prime_factor(coordinate)
        while prime > 1 and value and value % prime == 0:
            value //= prime
            coefficient /= coordinate
            times += 1
        exponents.append(times)
    index = _EXPONENTS.get((exponents[0], exponents[1], exponents[2]))
    if index is None:
        return None
    law = np.zeros(len(MONOMIALS))
    law[index] = coefficient
    return law


@functools.cache
def greatest_prime_factor(number: int) -> int:
    """Of a number of at least 1; of 0, it is 0."""
    factor = 2
    while factor * factor <= number:
        if number % factor == 0:
            number //= factor
        else:
            factor += 1
    return number


def _sum(matrix: NDArray[np.float64], column: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The sum of the fewest monomials with whole coefficients; one point at least must confirm it."""
    for terms in range(2, len(column)):
        for chosen in itertools.combinations(range(len(MONOMIALS)), terms):
            part = matrix[:, chosen]
            if np.linalg.matrix_rank(part) < terms:
                continue
            solution = np.rint(np.linalg.lstsq(part, column, rcond=None)[0])
            if np.array_equal(part @ solution, column) and np.all(solution != 0):
                law = np.zeros(len(MONOMIALS))
                law[list(chosen)] = solution
                return law
    return None
