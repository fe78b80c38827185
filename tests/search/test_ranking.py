import pytest
from fakes import config, measurement, ok, oom, over_limit

from orchestrator.contract.outcome import Outcome
from orchestrator.contract.record import AttemptRecord, Purpose, TrialRecord
from orchestrator.search import ranking
from orchestrator.spec.sweep import Objective

SPEED = (Objective(),)
SPEED_AND_PEAK = (Objective(), Objective(metric="peak_memory_bytes", goal="minimize"))


def trial(number: int, outcome: Outcome | None, mfu: float | None = None) -> TrialRecord:
    built = config(micro_batch=number + 1)
    attempt = AttemptRecord(attempt=1, token=f"t{number}", dispatched_s=1.0, outcome=outcome)
    return TrialRecord(trial=number, candidate=built.candidate, label="l", config=built, attempts=(attempt,), mfu=mfu)


def numbers(records: list[TrialRecord]) -> list[int]:
    return [record.trial for record in records]


def test_the_fastest_that_fits_is_first_and_the_rest_is_left_out() -> None:
    records = [trial(0, ok(10.0)), trial(1, over_limit(99.0)), trial(2, oom()), trial(3, ok(30.0)), trial(4, None)]
    assert numbers(ranking.ranked(SPEED, records)) == [3, 0]
    best = ranking.best(SPEED, records)
    assert best is not None
    assert best.trial == 3


def test_with_more_devices_a_trial_is_faster_and_each_device_may_be_slower() -> None:
    wide = trial(1, ok(30.0))
    wide = wide.model_copy(update={"config": config(world_size=4)})
    records = [trial(0, ok(10.0)), wide]
    per_device = (Objective(metric="tokens_per_second_per_device"),)
    assert numbers(ranking.ranked(SPEED, records)) == [1, 0]
    assert numbers(ranking.ranked(per_device, records)) == [0, 1]
    assert ranking.objective_values(per_device, wide) == (7.5,)


def test_ties_go_to_the_smaller_peak_then_to_the_earlier_trial() -> None:
    records = [trial(0, ok(10.0, 900)), trial(1, ok(10.0, 500)), trial(2, ok(10.0, 500))]
    assert numbers(ranking.ranked(SPEED, records)) == [1, 2, 0]


def test_lower_is_better_when_the_goal_says_so() -> None:
    goal = (Objective(metric="peak_memory_bytes", goal="minimize"),)
    records = [trial(0, ok(10.0, 900)), trial(1, ok(1.0, 500))]
    assert numbers(ranking.ranked(goal, records)) == [1, 0]


def test_confirmed_trials_come_first_only_where_the_best_are_confirmed() -> None:
    """An extended sweep has confirmed trials of an earlier objective, and whatever is tried now is not confirmed."""
    run = AttemptRecord(attempt=2, token="again", purpose=Purpose.CONFIRM, dispatched_s=2.0, outcome=ok(10.0, 900))
    confirmed = trial(0, ok(11.0, 900))
    confirmed = confirmed.model_copy(update={"attempts": (*confirmed.attempts, run)})
    records = [confirmed, trial(1, ok(20.0, 500))]
    assert numbers(ranking.ranked(SPEED, records)) == [0, 1]
    assert numbers(ranking.ranked(SPEED_AND_PEAK[1:], records)) == [1, 0]
    assert numbers(ranking.ranked(SPEED_AND_PEAK[::-1], records)) == [1, 0]


def test_pareto_front_and_fronts_behind_it() -> None:
    fast, small, between = trial(0, ok(100.0, 900)), trial(1, ok(10.0, 100)), trial(2, ok(50.0, 500))
    beaten, beaten_twice = trial(3, ok(40.0, 600)), trial(4, ok(30.0, 700))
    records = [beaten_twice, beaten, between, small, fast]
    assert numbers(ranking.pareto_front(SPEED_AND_PEAK, records)) == [0, 2, 1]
    assert numbers(ranking.ranked(SPEED_AND_PEAK, records)) == [0, 2, 1, 3, 4]


def test_equal_points_are_on_the_front_together() -> None:
    records = [trial(0, ok(10.0, 500)), trial(1, ok(10.0, 500))]
    assert numbers(ranking.pareto_front(SPEED_AND_PEAK, records)) == [0, 1]


def test_step_time_is_the_median_step() -> None:
    (goal,) = (Objective(metric="step_s", goal="minimize"),)
    assert measurement().step_s == (0.3, 0.2, 0.4)
    assert ranking.objective_value(goal, trial(0, ok())) == 0.3


@pytest.mark.parametrize("mfu", [None, float("nan"), float("inf")])
def test_a_trial_without_a_finite_number_is_not_ranked(mfu: float | None) -> None:
    goals = (Objective(metric="mfu"),)
    records = [trial(0, ok()).model_copy(update={"mfu": mfu}), trial(1, ok(), mfu=0.3)]
    assert numbers(ranking.ranked(goals, records)) == [1]
    assert ranking.objective_values(goals, records[0]) is None


def test_speedup_needs_both_to_have_run() -> None:
    assert ranking.speedup(trial(1, ok(30.0)), trial(0, ok(10.0))) == 3.0
    assert ranking.speedup(trial(1, ok(30.0)), trial(0, over_limit(10.0))) == 3.0
    assert ranking.speedup(trial(1, ok(30.0)), trial(0, oom())) is None
