"""How long `guided` takes to answer: `python -m benchmarks.ask_time [--candidates 5000] [--trials 200]`.

A made-up space and made-up trials; only the clocks are real. Prints wall and processor time of some answers, for a
session that has asked before and for one that has just resumed. They differ by what else the machine does.
"""

import argparse
import itertools
import time
from statistics import median

import numpy as np

from benchmarks.arguments import positive
from orchestrator.search.guided import Guided, Limits, Observation, Prediction
from orchestrator.search.residuals import Axis

KNOBS = (2, 5, 4, 2, 2, 3, 3, 16)
"""Levels of each knob: a space like those of `experiments/`, more than is asked for."""
ANSWERS = 9


def space(candidates: int, dice: np.random.Generator) -> Guided:
    """A sampler over so many candidates, drawn of all combinations."""
    everything = np.array(list(itertools.product(*(range(levels) for levels in KNOBS))))
    levels = everything[dice.permutation(len(everything))[:candidates]]
    effects = [dice.normal(0, 0.2, count) for count in KNOBS]
    speed = np.asarray(sum(effect[levels[:, column]] for column, effect in enumerate(effects)))
    need = np.log(0.4 + 0.05 * levels[:, -1])
    axes = (*(Axis(count) for count in KNOBS[:-1]), Axis(KNOBS[-1], tuple(np.linspace(0, 1, KNOBS[-1]).tolist())))
    return Guided(levels, axes, Prediction(speed, need), Limits(0.0))


def trials(of: Guided, count: int, dice: np.random.Generator) -> list[Observation]:
    """So many candidates at random, as they were predicted but for noise; one in ten ran out of memory."""
    assert of.prediction.log_speed is not None
    drawn = dice.permutation(len(of.levels))[:count]
    return [
        Observation(int(each), "oom_device")
        if number % 10 == 9
        else Observation(
            int(each), "ok", of.prediction.log_speed[each] + dice.normal(0, 0.1), of.prediction.log_device[each]
        )
        for number, each in enumerate(drawn)
    ]


def answer_ms(of: Guided, seen: list[Observation]) -> tuple[float, float]:
    """Wall and processor milliseconds of one answer."""
    wall_s, busy_s = time.perf_counter(), time.process_time()
    of.ask(seen)
    return 1e3 * (time.perf_counter() - wall_s), 1e3 * (time.process_time() - busy_s)


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=positive, default=5000)
    parser.add_argument("--trials", type=positive, default=200)
    given = parser.parse_args()
    dice = np.random.default_rng(0)
    of = space(given.candidates, dice)
    seen = trials(of, given.trials + ANSWERS, dice)
    first = answer_ms(of, seen[: given.trials])
    rest = [answer_ms(of, seen[: given.trials + number]) for number in range(1, ANSWERS + 1)]
    print(f"{len(of.levels):,} candidates, {given.trials} trials: milliseconds of an answer")
    for name, number in (("wall", 0), ("processor", 1)):
        times = [each[number] for each in rest]
        print(f"{name:9s}  median {median(times):5.0f}  longest {max(times):5.0f}  first answer {first[number]:5.0f}")


if __name__ == "__main__":
    main()
