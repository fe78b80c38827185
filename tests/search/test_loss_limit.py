"""A trial that loses too much against the baseline cannot win by being fast or small."""

import pytest
from fakes import config, measurement, oom

from orchestrator.contract.outcome import Ok, Outcome, OverLimit
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.search import ranking
from orchestrator.search.quality import loss_limit, lossy
from orchestrator.spec.sweep import Objective

SPEED = (Objective(),)
ALL_THREE = (
    Objective(),
    Objective(metric="eval_loss", goal="minimize"),
    Objective(metric="peak_memory_bytes", goal="minimize"),
)


def ran(speed: float, loss: float | None, peak_bytes: int = 500) -> Ok:
    return Ok(measurement=measurement(speed, peak_bytes).model_copy(update={"eval_loss": loss}))


def trial(number: int, outcome: Outcome | None, is_baseline: bool = False) -> TrialRecord:
    built = config(micro_batch=number + 1)
    attempt = AttemptRecord(attempt=1, token=f"t{number}", dispatched_s=1.0, outcome=outcome)
    return TrialRecord(
        trial=number,
        candidate=built.candidate,
        label="l",
        config=built,
        attempts=(attempt,),
        is_baseline=is_baseline,
    )


def numbers(records: list[TrialRecord]) -> list[int]:
    return [record.trial for record in records]


BASELINE = trial(0, ran(10.0, 4.0), is_baseline=True)


def test_the_fastest_within_the_loss_wins_and_the_rest_stands_behind() -> None:
    records = [BASELINE, trial(1, ran(90.0, 4.09)), trial(2, ran(50.0, 4.07)), trial(3, ran(99.0, 5.0))]
    assert numbers(ranking.ranked(SPEED, records, 0.02)) == [2, 0, 3, 1]
    assert numbers(ranking.ranked(SPEED, records)) == [3, 1, 2, 0]
    best = ranking.best(SPEED, records, 0.02)
    assert best is not None
    assert best.trial == 2
    assert lossy(0.02, records) == {1: pytest.approx(0.0225), 3: pytest.approx(0.25)}


def test_a_loss_exactly_at_the_limit_and_one_below_the_baseline_s_may_win() -> None:
    records = [BASELINE, trial(1, ran(20.0, 5.0)), trial(2, ran(30.0, 3.0))]
    assert lossy(0.25, records) == {}
    assert lossy(0.0, records) == {1: pytest.approx(0.25)}


def test_a_loss_that_was_not_taken_cannot_win() -> None:
    records = [BASELINE, trial(1, ran(90.0, None))]
    assert numbers(ranking.ranked(SPEED, records, 0.02)) == [0, 1]
    assert lossy(0.02, records) == {1: None}


@pytest.mark.parametrize("outcome", [oom(), None, ran(1.0, None)])
def test_without_the_baseline_s_loss_nothing_is_compared(outcome: Outcome | None) -> None:
    records = [trial(0, outcome, is_baseline=True), trial(1, ran(90.0, 9.0)), trial(2, ran(50.0, 1.0))]
    assert loss_limit(0.02, records) is None
    assert numbers(ranking.ranked(SPEED, records, 0.02))[:2] == [1, 2]


def test_a_baseline_that_leaves_too_little_headroom_is_compared_with_all_the_same() -> None:
    over = OverLimit(measurement=ran(10.0, 4.0).measurement)
    records = [trial(0, over, is_baseline=True), trial(1, ran(90.0, 9.0)), trial(2, ran(50.0, 4.0))]
    assert numbers(ranking.ranked(SPEED, records, 0.02)) == [2, 1]


def test_nothing_wins_where_all_that_fits_loses_too_much() -> None:
    over = OverLimit(measurement=ran(10.0, 4.0).measurement)
    records = [trial(0, over, is_baseline=True), trial(1, ran(90.0, 9.0))]
    assert ranking.best(SPEED, records, 0.02) is None
    assert numbers(ranking.ranked(SPEED, records, 0.02)) == [1]


def test_pareto_over_speed_loss_and_memory() -> None:
    fast, good, small = trial(1, ran(90.0, 6.0, 900)), trial(2, ran(40.0, 3.0, 800)), trial(3, ran(20.0, 5.0, 100))
    beaten = trial(4, ran(30.0, 3.5, 850))
    records = [beaten, fast, good, small]
    assert numbers(ranking.pareto_front(ALL_THREE, records)) == [1, 2, 3]
    assert numbers(ranking.ranked(ALL_THREE, records)) == [1, 2, 3, 4]
    assert numbers(ranking.pareto_front(ALL_THREE, [BASELINE, *records], 0.3)) == [2, 3, 0]


def test_a_trial_without_the_loss_has_no_place_among_objectives_that_name_it() -> None:
    assert ranking.ranked(ALL_THREE, [trial(1, ran(1.0, None))]) == []
