"""The guided sampler on a small space whose truth is known: what it tries first, what it learns, what it leaves."""

import itertools

import numpy as np
import pytest

from orchestrator.search.guided import Guided, Limits, Observation, Prediction
from orchestrator.search.residuals import Axis

STAGES, BATCHES = 3, 8
POINTS = list(itertools.product(range(STAGES), range(BATCHES)))
LIMIT = np.log(20.0)


def predicted_speed() -> np.ndarray:
    return np.array([np.log(100 * (1 + batch) / (1 + 0.2 * batch)) - 0.1 * stage for stage, batch in POINTS])


def predicted_need() -> np.ndarray:
    return np.array([np.log(16 - 4 * stage + 2.0 * batch) for stage, batch in POINTS])


def sampler(speed: np.ndarray | None = None, need: np.ndarray | None = None) -> Guided:
    return Guided(
        levels=np.array(POINTS),
        axes=(Axis(STAGES), Axis(BATCHES, tuple(np.linspace(0, 1, BATCHES)))),
        prediction=Prediction(
            predicted_speed() if speed is None else speed, predicted_need() if need is None else need
        ),
        limits=Limits(LIMIT),
        monotone=(1,),
    )


def search(of: Guided, speed: np.ndarray, need: np.ndarray, launches: int) -> list[Observation]:
    """Run the sampler against a truth."""
    seen: list[Observation] = []
    for _ in range(launches):
        suggestion = of.ask(seen)
        if suggestion is None:
            break
        chosen = suggestion.candidate
        fits = need[chosen] <= LIMIT
        seen.append(
            Observation(chosen, "ok", speed[chosen], need[chosen]) if fits else Observation(chosen, "oom_device")
        )
    return seen


def best(seen: list[Observation]) -> float:
    return max(each.log_speed for each in seen if each.outcome == "ok")


def test_the_first_is_the_fastest_that_is_likely_to_fit() -> None:
    suggestion = sampler().ask([])
    assert suggestion is not None
    fits = predicted_need() <= LIMIT - 0.05
    assert predicted_speed()[suggestion.candidate] >= predicted_speed()[fits].max() - 0.2
    assert suggestion.probability_fits > 0.5


def test_a_prediction_that_is_wrong_about_one_stage_is_unlearnt() -> None:
    speed = predicted_speed() - np.array([0.7 if stage == 2 else 0.0 for stage, _ in POINTS])
    need = predicted_need()
    seen = search(sampler(), speed, need, launches=8)
    assert best(seen) == pytest.approx(speed[need <= LIMIT].max())


def test_a_need_that_is_higher_than_predicted_costs_few_launches() -> None:
    need = predicted_need() + 0.25
    speed = predicted_speed()
    seen = search(sampler(), speed, need, launches=10)
    assert sum(each.outcome != "ok" for each in seen) <= 3
    assert best(seen) == pytest.approx(speed[need <= LIMIT].max())


def test_a_larger_micro_batch_than_one_that_ran_out_is_never_tried() -> None:
    ran_out = POINTS.index((1, 4))
    seen = [Observation(ran_out, "oom_device")]
    tried = set()
    while (suggestion := sampler().ask(seen)) is not None:
        tried.add(POINTS[suggestion.candidate])
        seen.append(Observation(suggestion.candidate, "ok", 1.0, 1.0))
    assert tried == {(stage, batch) for stage, batch in POINTS if stage != 1 or batch < 4}


def test_what_runs_is_not_asked_for_again_and_an_answer_follows_from_what_was_seen() -> None:
    first = sampler().ask([])
    assert first is not None
    running = [first.candidate]
    for _ in range(4):
        suggestion = sampler().ask([], running)
        assert suggestion is not None
        assert suggestion == sampler().ask([], running)
        assert suggestion.candidate not in running
        running.append(suggestion.candidate)
    assert len({POINTS[each] for each in running}) == 5


def test_an_exhausted_space_has_no_suggestion() -> None:
    seen = [Observation(number, "ok", 1.0, 1.0) for number in range(len(POINTS))]
    assert sampler().ask(seen) is None


def test_gains_shrink_as_the_space_becomes_known() -> None:
    of, speed, need = sampler(), predicted_speed(), predicted_need()
    early, late = of.ask(search(of, speed, need, 1)), of.ask(search(of, speed, need, 12))
    assert early is not None
    assert early.expected_gain is not None
    assert late is not None
    assert late.expected_gain is not None
    assert late.expected_gain < early.expected_gain


def test_an_impossible_host_need_counts_as_not_fitting() -> None:
    of = sampler()
    host = np.where(predicted_speed() == predicted_speed().max(), LIMIT + 1, LIMIT - 1)
    with_host = Guided(
        of.levels,
        of.axes,
        Prediction(of.prediction.log_speed, of.prediction.log_device - 5, host),
        Limits(LIMIT, log_host=LIMIT),
    )
    suggestion = with_host.ask([])
    assert suggestion is not None
    assert host[suggestion.candidate] < LIMIT
