"""Figures of confirmed trials: by their own runs alone, with an interval over runs; and what they do to the ranking."""

from math import sqrt

import pytest
from fakes import config, measurement, ok, oom, over_limit
from scipy.stats import t as student_t

from orchestrator.contract.outcome import Health, Infra, Ok, Outcome
from orchestrator.contract.record import AttemptRecord, Purpose, TrialRecord
from orchestrator.search import ranking
from orchestrator.search.reported import reported, thrashes
from orchestrator.spec.sweep import Objective

SPEED = (Objective(),)


def trial(number: int, search: Outcome, *confirmations: Outcome | None, mfu: float | None = None) -> TrialRecord:
    built = config(micro_batch=number + 1)
    purposes = [Purpose.SEARCH, *[Purpose.CONFIRM] * len(confirmations)]
    attempts = tuple(
        AttemptRecord(
            attempt=index + 1, token=f"{number}-{index}", purpose=purpose, dispatched_s=1.0, outcome=outcome, mfu=mfu
        )
        for index, (purpose, outcome) in enumerate(zip(purposes, (search, *confirmations), strict=True))
    )
    return TrialRecord(trial=number, candidate=built.candidate, label="l", config=built, attempts=attempts, mfu=0.9)


def steady(tokens_per_second: float, peak_memory_bytes: int = 500) -> Ok:
    """A run whose steps all took the same time."""
    whole = measurement(tokens_per_second, peak_memory_bytes)
    same = {"tokens_per_second_low": tokens_per_second, "tokens_per_second_high": tokens_per_second}
    return Ok(measurement=whole.model_copy(update=same))


def thrashing(tokens_per_second: float) -> Ok:
    return ok(tokens_per_second).model_copy(update={"health": Health.THRASHING})


def order(*records: TrialRecord) -> list[int]:
    return [record.trial for record in ranking.ranked(SPEED, records)]


def test_without_a_confirmation_the_figures_are_the_search_s() -> None:
    figures = reported([trial(0, ok(100.0))])[0]
    assert (figures.runs, figures.tokens_per_second, figures.mfu) == (0, 100.0, 0.9)
    assert (figures.tokens_per_second_low, figures.tokens_per_second_high) == (99.0, 101.0)


def test_the_lucky_search_is_no_part_of_a_confirmed_figure() -> None:
    figures = reported([trial(0, ok(150.0, 700), ok(99.0, 500), ok(101.0, 600), mfu=0.4)])[0]
    assert (figures.runs, figures.tokens_per_second, figures.mfu) == (2, 100.0, 0.4)
    assert figures.peak_memory_bytes == 700, "the highest peak of all runs"


def test_the_interval_of_two_runs_is_student_s_t_over_their_means() -> None:
    figures = reported([trial(0, ok(), steady(98.0), steady(102.0))])[0]
    half = float(student_t.ppf(0.975, 1)) * sqrt(2 * 2.0**2) / sqrt(2)
    assert figures.tokens_per_second_high - figures.tokens_per_second == pytest.approx(half)
    assert figures.tokens_per_second - figures.tokens_per_second_low == pytest.approx(half)


def test_runs_of_all_confirmed_trials_tell_how_far_runs_lie_apart() -> None:
    records = [trial(0, ok(), steady(98.0), steady(102.0)), trial(1, ok(), steady(49.5), steady(50.5))]
    figures = reported(records)
    spread = sqrt((2 * 0.02**2 + 2 * 0.01**2) / 2)
    half = float(student_t.ppf(0.975, 2)) * spread / sqrt(2)
    for number, centre in ((0, 100.0), (1, 50.0)):
        assert figures[number].tokens_per_second == centre
        assert figures[number].tokens_per_second_high == pytest.approx(centre * (1 + half))


def test_the_interval_is_never_narrower_than_the_steps_within_the_runs_allow() -> None:
    """Two runs may agree by luck; each of them is known to +-1 %, so their mean to +-1 % / sqrt(2)."""
    figures = reported([trial(0, ok(), ok(100.0), ok(100.0))])[0]
    assert figures.tokens_per_second_high - 100.0 == pytest.approx(1.0 / sqrt(2))


def test_one_run_alone_has_the_interval_of_its_steps() -> None:
    figures = reported([trial(0, ok(150.0), ok(100.0), None)])[0]
    assert (figures.runs, figures.tokens_per_second_low, figures.tokens_per_second_high) == (1, 99.0, 101.0)


def test_the_lower_end_stays_above_zero() -> None:
    assert reported([trial(0, ok(), steady(10.0), steady(90.0))])[0].tokens_per_second_low > 0


def test_a_confirmed_trial_comes_before_the_search_s_luck() -> None:
    confirmed = trial(0, ok(100.0), ok(90.0), ok(91.0))
    assert order(trial(1, ok(98.0)), confirmed) == [0, 1]


@pytest.mark.parametrize("failure", [oom(), over_limit()])
def test_who_fails_when_measured_again_cannot_win(failure: Outcome) -> None:
    failed = trial(0, ok(200.0), ok(200.0), failure)
    assert failed.standing == failure
    assert failed.outcome == ok(200.0), "the search's own outcome stays"
    assert order(failed, trial(1, ok(100.0))) == [1]


def test_a_lost_node_says_nothing_against_the_trial() -> None:
    assert order(trial(0, ok(200.0), Infra(cause="bind race"), ok(200.0)), trial(1, ok(100.0))) == [0, 1]


def test_a_tie_with_the_fastest_goes_to_the_larger_headroom() -> None:
    fastest, roomier, slower = trial(0, ok(100.0, 900)), trial(1, ok(99.0, 600)), trial(2, ok(90.0, 100))
    assert order(fastest, roomier, slower) == [1, 0, 2]
    assert ranking.tied(SPEED, [fastest, roomier, slower], roomier) == {0}


def test_headroom_is_not_bought_with_speed_where_runs_scatter_widely() -> None:
    fast, small = trial(0, ok(), ok(110.0, 900), ok(90.0, 900)), trial(1, ok(), ok(99.0, 300), ok(81.0, 300))
    assert ranking.tied(SPEED, [fast, small], fast) == {1}
    assert order(fast, small) == [0, 1]


def test_peaks_that_differ_by_noise_alone_do_not_break_a_tie() -> None:
    assert order(trial(0, ok(100.0, 520)), trial(1, ok(99.0, 500))) == [0, 1]


def test_thrashing_never_wins_by_luck() -> None:
    lucky, good = trial(0, thrashing(200.0)), trial(1, ok(100.0))
    assert order(lucky, good) == [1, 0]
    assert order(lucky) == [0], "without any other it is still the best there is"


def test_a_confirmation_without_thrashing_clears_a_trial_and_one_with_convicts_it() -> None:
    cleared, good = trial(0, thrashing(200.0), ok(190.0), ok(190.0)), trial(1, ok(100.0), ok(100.0), ok(100.0))
    assert not thrashes(cleared)
    assert order(cleared, good) == [0, 1]
    convicted = trial(0, ok(200.0), ok(190.0), thrashing(190.0))
    assert thrashes(convicted)
    assert order(convicted, good) == [1, 0]


def test_the_gain_over_the_baseline_is_that_of_the_confirmation() -> None:
    assert ranking.speedup(trial(1, ok(300.0), ok(250.0), ok(250.0)), trial(0, ok(100.0))) == 2.5
