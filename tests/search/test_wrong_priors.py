"""A prediction that is wrong costs few launches, or is noticed and dropped."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from made_landscapes import landscapes

from benchmarks.landscapes.table import Landscape
from benchmarks.search_factory import Asked, guided_of
from benchmarks.strategies.guided import FactoryStrategy, guided
from benchmarks.strategies.play import Factory, Run, Strategy, play
from benchmarks.wrong_priors import MEMORY, SPEED, Spoil, as_predicted, bent, inverted, scaled, spoiled, unpredicted

LANDSCAPES, BUDGET = 12, 40
NEAR = 0.03
NOTICED = 5
"""Launches that ran, within which a prediction that misleads is given up."""


def searches(spoil: Spoil, strategy: Factory = guided) -> list[Run]:
    """One for each landscape, each spoilt anew."""
    return [
        play(spoiled(each, spoil, number), strategy, number, BUDGET)
        for number, each in enumerate(landscapes(LANDSCAPES))
    ]


def launches(runs: Sequence[Run]) -> list[int]:
    """Until within 3 % of the best; one more than the budget where it never was."""
    return [run.launches_to(NEAR) or BUDGET + 1 for run in runs]


def solved(runs: Sequence[Run]) -> float:
    """The share that came within 3 % of the best."""
    return float(np.mean([run.launches_to(NEAR) is not None for run in runs]))


@cache
def as_it_is() -> list[int]:
    """Launches with the prediction as it is."""
    return launches(searches(as_predicted))


@cache
def without() -> list[int]:
    """Launches of the same sampler without predicted speeds."""
    return launches(searches(as_predicted, unpredicted))


def test_these_landscapes_need_a_search() -> None:
    """Else the other tests show nothing: the prediction helps, and does not give the answer away."""
    assert np.median(as_it_is()) < np.median(without())
    assert max(as_it_is()) > 2


@pytest.mark.parametrize("factor", [0.7, 2.0])
@pytest.mark.parametrize("figure", [MEMORY, SPEED])
def test_a_constant_factor_costs_at_most_three_launches(figure: str, factor: float) -> None:
    assert np.median(launches(searches(scaled(figure, factor)))) <= np.median(as_it_is()) + 3


@pytest.mark.parametrize("figure", [MEMORY, SPEED])
def test_an_error_by_knobs_and_pairs_of_knobs_is_learnt(figure: str) -> None:
    assert solved(searches(bent(figure, 0.2))) >= 0.85


class Watched:
    """Keeps, after each launch, how many ran so far and whether predicted speeds still lead."""

    first_launches = 0

    def __init__(self, landscape: Landscape, diary: list[tuple[int, bool]]) -> None:
        self._asked = Asked(guided_of(landscape.candidates, landscape.knobs, landscape.prior, landscape.limits))
        self._inner = FactoryStrategy(self._asked)
        self._diary = diary
        self._ran = 0

    def ask(self) -> int | None:
        return self._inner.ask()

    def tell(self, candidate: int, result: object) -> None:
        self._inner.tell(candidate, result)
        self._ran += result.is_ok
        self._diary.append((self._ran, self._asked.is_led))


def ran_when_dropped(spoil: Spoil) -> list[int | None]:
    """For each landscape: how many launches had run when the prediction was dropped; None: never."""
    found = []
    for number, each in enumerate(landscapes(LANDSCAPES)):
        diary: list[tuple[int, bool]] = []

        def watched(landscape: Landscape, seed: int, diary: list[tuple[int, bool]] = diary) -> Strategy:
            return Watched(landscape, diary)

        play(spoiled(each, spoil, number), watched, number, 15)
        found.append(next((ran for ran, is_led in diary if not is_led), None))
    return found


def test_an_inverted_prediction_is_dropped_within_five_launches_and_then_does_no_harm() -> None:
    dropped = ran_when_dropped(inverted)
    assert all(ran is not None and ran <= NOTICED for ran in dropped)
    runs = searches(inverted)
    assert np.median(launches(runs)) <= np.median(without()) + NOTICED
    assert np.mean([count <= BUDGET for count in launches(runs)]) >= np.mean([count <= BUDGET for count in without()])


def constant(landscape: Landscape, dice: np.random.Generator) -> dict[str, np.ndarray]:
    """Every speed is predicted alike: no guide at all."""
    return {**landscape.prior, SPEED: np.full(len(landscape.candidates), 1000.0)}


def test_a_prediction_that_says_nothing_is_as_none() -> None:
    assert launches(searches(constant)) == without()


def test_a_prediction_that_is_right_is_kept() -> None:
    assert ran_when_dropped(as_predicted) == [None] * LANDSCAPES
    assert ran_when_dropped(scaled(SPEED, 0.5)) == [None] * LANDSCAPES
