"""Where a space that is too large to list is fastest by prediction: those candidates are listed beside the drawn ones.

From the best drawn candidates one knob after another moves to its best choice until none improves. What is listed is
each place so found with all its neighbours, those that differ from it in one knob, and around the best of all also
those that differ in two, so that a search whose prediction is wrong about a knob or two finds the true best there.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.placement.forecast import Forecast, Forecaster
from orchestrator.space.candidates import Candidate, Space
from orchestrator.space.dimensions import Choice

STARTS = 8
ODDS_POWER = 4.0
"""Of the odds of fitting, in what a climb looks for: a launch that runs out teaches less than one that fits."""
_LEAST_GAIN = 1e-6
"""In log units: choices of which none is better leave a knob where it is."""

Chosen = dict[str, Choice]


@dataclass(frozen=True)
class _Place:
    chosen: Chosen
    """One choice of every dimension, those without an effect too."""
    merit: float


def with_promising(space: Space, forecaster: Forecaster) -> Space:
    """`space`, if it was drawn, with the candidates that are predicted best and their neighbours.

    `forecaster` is prepared for the drawn ones; structures that they do not have are left out.
    """
    if not space.is_sampled or not space.candidates:
        return space
    climb = _Climb(space, forecaster)
    places = climb.starts()
    if not places:
        return space
    found = {tuple(place.chosen.values()): place for place in map(climb.from_place, places)}
    tops = sorted(found.values(), key=lambda place: -place.merit)
    points = [place.chosen for place in tops]
    points += [near for place in tops for near in climb.neighbours(place.chosen)]
    points += climb.second_neighbours(tops[0].chosen)
    return space.including(point for point in points if climb.is_known(point))


def merit(forecast: Forecast) -> float:
    """By what a search prefers it before anything was measured: log of tokens/s times a power of the odds."""
    odds = 1.0 if forecast.probability_fits is None else forecast.probability_fits
    return math.log(max(forecast.tokens_per_second, 1e-9)) + ODDS_POWER * math.log(max(odds, 1e-12))


class _Climb:
    def __init__(self, space: Space, forecaster: Forecaster) -> None:
        self._space = space
        self._forecaster = forecaster
        self._first: Chosen = {dimension.name: dimension.choices[0] for dimension in space.dimensions}

    def starts(self) -> list[_Place]:
        """The best drawn candidates; none where no speed is predicted."""
        forecasts = {each.id: self._forecaster.forecast(each.config, replays=False) for each in self._space.candidates}
        if any(forecast.time is None for forecast in forecasts.values()):
            return []
        ranked = sorted(self._space.candidates, key=lambda each: (-merit(forecasts[each.id]), each.id))
        places = []
        for candidate in ranked:
            chosen = self._space.choices_of(candidate)
            if chosen is not None:
                places.append(_Place({**self._first, **chosen}, merit(forecasts[candidate.id])))
            if len(places) == STARTS:
                break
        return places

    def from_place(self, place: _Place) -> _Place:
        """The best place that moves of single knobs lead to, each uphill."""
        while True:
            before = place
            for dimension in self._space.dimensions:
                others = (
                    {**place.chosen, dimension.name: choice}
                    for choice in dimension.choices
                    if choice != place.chosen[dimension.name]
                )
                places = [found for other in others if (found := self._place(other)) is not None]
                best = max(places, key=lambda found: found.merit, default=place)
                if best.merit > place.merit + _LEAST_GAIN:
                    place = best
            if place is before:
                return place

    def neighbours(self, chosen: Chosen) -> Iterator[Chosen]:
        """All that differ from `chosen` in one dimension."""
        for dimension in self._space.dimensions:
            for choice in dimension.choices:
                yield {**chosen, dimension.name: choice}

    def second_neighbours(self, chosen: Chosen) -> Iterator[Chosen]:
        """All that differ from `chosen` in at most two dimensions."""
        for one, other in itertools.combinations(self._space.dimensions, 2):
            for choices in itertools.product(one.choices, other.choices):
                yield {**chosen, one.name: choices[0], other.name: choices[1]}

    def is_known(self, chosen: Chosen) -> bool:
        """Whether it is legal and its structure traced."""
        candidate = self._space.resolve(chosen)
        return isinstance(candidate, Candidate) and self._forecaster.is_traced(candidate.config)

    def _place(self, chosen: Chosen) -> _Place | None:
        candidate = self._space.resolve(chosen)
        if not isinstance(candidate, Candidate) or not self._forecaster.is_traced(candidate.config):
            return None
        return _Place(chosen, merit(self._forecaster.forecast(candidate.config, replays=False)))
