"""What wrong predictions cost the search: `python -m benchmarks.wrong_priors DIR [--seeds 4] [--budget 40]`.

DIR holds landscapes (`benchmarks/landscapes`). Each row spoils what was predicted beforehand in one way and searches
again; the truth stays as it is.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.arguments import positive
from benchmarks.landscapes.table import Floats, Landscape, read_landscape
from benchmarks.search_factory import Asked, guided_of
from benchmarks.strategies.__main__ import print_table
from benchmarks.strategies.guided import FactoryStrategy, guided
from benchmarks.strategies.play import Factory, Run, Strategy, play
from benchmarks.strategies.scores import scores

Prior = dict[str, Floats]
Spoil = Callable[[Landscape, np.random.Generator], Prior]

SPEED, MEMORY = "tokens_per_s", "peak_gib"
FACTORS = (0.7, 0.85, 1.2, 1.5, 2.0)
DEVIATIONS = (0.1, 0.2)


def as_predicted(landscape: Landscape, dice: np.random.Generator) -> Prior:
    """Not spoilt."""
    return dict(landscape.prior)


def scaled(figure: str, factor: float) -> Spoil:
    """Wrong by a constant factor."""
    return lambda landscape, dice: {**landscape.prior, figure: landscape.prior[figure] * factor}


def bent(figure: str, deviation: float) -> Spoil:
    """Wrong by knobs and by pairs of knobs, half of the variance each; `deviation` of the logarithm, over the space."""

    def spoil(landscape: Landscape, dice: np.random.Generator) -> Prior:
        columns = [_levels([each[name] for each in landscape.candidates]) for name in landscape.knobs]
        single = _unit(sum(dice.normal(size=column.max() + 1)[column] for column in columns))
        pairs = [(one, other) for number, one in enumerate(columns) for other in columns[:number]]
        double = _unit(
            sum(dice.normal(size=(one.max() + 1, other.max() + 1))[one, other] for one, other in pairs)
            if pairs
            else single
        )
        error = deviation * _unit(single + double)
        return {**landscape.prior, figure: landscape.prior[figure] * np.exp(error)}

    return spoil


def inverted(landscape: Landscape, dice: np.random.Generator) -> Prior:
    """The fastest is predicted to be the slowest, within the same range."""
    speed = landscape.prior[SPEED]
    return {**landscape.prior, SPEED: speed.max() * speed.min() / speed}


def shuffled(landscape: Landscape, dice: np.random.Generator) -> Prior:
    """Predicted speeds say nothing."""
    return {**landscape.prior, SPEED: dice.permutation(landscape.prior[SPEED])}


def unpredicted(landscape: Landscape, seed: int) -> Strategy:
    """Brimful's sampler, to which no speed is predicted; the memory is."""
    sampler = guided_of(landscape.candidates, landscape.knobs, landscape.prior, landscape.limits)
    return FactoryStrategy(Asked(replace(sampler, prediction=replace(sampler.prediction, log_speed=None))))


def spoiled(landscape: Landscape, spoil: Spoil, seed: int) -> Landscape:
    """The same truth, another prediction. Equal seeds spoil equally."""
    return replace(landscape, prior=spoil(landscape, np.random.default_rng(seed)))


def searches(
    landscapes: Sequence[Landscape], spoil: Spoil, seeds: int, budget: int, strategy: Factory = guided
) -> list[Run]:
    """A search for each landscape and seed, each with an error of its own."""
    return [play(spoiled(each, spoil, seed), strategy, seed, budget) for each in landscapes for seed in range(seeds)]


def _levels(values: Sequence[object]) -> np.ndarray:
    return np.unique([str(value) for value in values], return_inverse=True)[1]


def _unit(values: Floats) -> Floats:
    centred = values - values.mean()
    return centred / max(float(centred.std()), 1e-12)


KINDS: dict[str, tuple[Spoil, Factory]] = {
    "as predicted": (as_predicted, guided),
    **{f"memory x {factor}": (scaled(MEMORY, factor), guided) for factor in FACTORS},
    **{f"speed x {factor}": (scaled(SPEED, factor), guided) for factor in FACTORS},
    **{f"memory, log error of {deviation}": (bent(MEMORY, deviation), guided) for deviation in DEVIATIONS},
    **{f"speed, log error of {deviation}": (bent(SPEED, deviation), guided) for deviation in DEVIATIONS},
    "speed inverted": (inverted, guided),
    "speed shuffled": (shuffled, guided),
    "no speed predicted": (as_predicted, unpredicted),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=positive, default=4, help="runs for each landscape and row")
    parser.add_argument("--budget", type=positive, default=40, help="launches")
    parser.add_argument("--only", nargs="*", help="rows whose names hold one of these words")
    given = parser.parse_args()
    landscapes = [read_landscape(path) for path in sorted(given.folder.glob("*.csv"))]
    if not landscapes:
        parser.error(f"{given.folder}: there is no landscape (NAME.csv with NAME.json) in it")
    chosen = [name for name in KINDS if not given.only or any(word in name for word in given.only)]
    if not chosen:
        parser.error(f"--only {' '.join(given.only)}: no row of this name; there are: {', '.join(KINDS)}")
    rows = {}
    for name in chosen:
        spoil, strategy = KINDS[name]
        rows[name] = scores(searches(landscapes, spoil, given.seeds, given.budget, strategy))
        print(f"{name}: done", file=sys.stderr, flush=True)
    title = f"{len(landscapes)} landscapes, {given.seeds} seeds"
    print_table(title, rows, given.budget, Console(width=180))


if __name__ == "__main__":
    main()
