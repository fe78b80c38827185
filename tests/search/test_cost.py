"""Device-hours, money, the whole training and what a sweep pays back, by hand-made records with known sums."""

import pytest
from fakes import candidate, config, ok, oom

from orchestrator.contract.facts import DataFacts
from orchestrator.contract.outcome import Cancelled, LostNode, Outcome, Rejected
from orchestrator.contract.record import AttemptRecord, Purpose, TrialRecord
from orchestrator.search.cost import (
    Price,
    median_trial_s,
    planned_tokens,
    price_of,
    sweep_cost,
    training_cost,
    used_device_s,
)
from orchestrator.spec.sweep import ResourcesSection, TrainSection

PRICE = Price(3.0, "EUR")


def attempt(outcome: Outcome | None, duration_s: float, purpose: Purpose = Purpose.SEARCH) -> AttemptRecord:
    ended_s = 1000.0 + duration_s if outcome is not None else None
    return AttemptRecord(attempt=1, token="t", purpose=purpose, dispatched_s=1000.0, ended_s=ended_s, outcome=outcome)


def trial(number: int, *attempts: AttemptRecord, devices: int = 1, is_baseline: bool = False) -> TrialRecord:
    of = candidate(number + 1)
    built = config(number + 1, world_size=devices)
    return TrialRecord(
        trial=number, candidate=of.id, label=of.label, is_baseline=is_baseline, config=built, attempts=attempts
    )


REJECTED = Rejected(probability_fits=0.01, bill={})


def test_device_seconds_are_of_every_attempt_on_all_of_its_devices() -> None:
    retried = trial(0, attempt(LostNode(node="n"), 5.0), attempt(ok(), 20.0), devices=2)
    confirmed = trial(1, attempt(ok(), 10.0), attempt(ok(), 12.0, Purpose.CONFIRM))
    running = trial(2, attempt(None, 0.0), devices=4)
    records = [retried, confirmed, running, trial(3, attempt(REJECTED, 0.0))]
    assert used_device_s(records) == 2 * 25 + 22
    assert used_device_s(records, now_s=1003.0) == 2 * 25 + 22 + 4 * 3


def test_a_trial_takes_as_long_as_its_search() -> None:
    retried = trial(0, attempt(LostNode(node="n"), 5.0), attempt(ok(), 20.0))
    confirmed = trial(1, attempt(oom(), 4.0), attempt(ok(), 99.0, Purpose.CONFIRM))
    others = [trial(2, attempt(REJECTED, 0.0)), trial(3, attempt(Cancelled(), 50.0)), trial(4, attempt(None, 0.0))]
    assert median_trial_s([retried, confirmed, *others]) == (25 + 4) / 2
    assert median_trial_s(others) is None


def test_a_training_costs_its_tokens_at_the_measured_speed_on_all_devices() -> None:
    cost = training_cost(7_200_000, 1000.0, 4, PRICE)
    assert cost is not None
    assert (cost.training_s, cost.device_hours, cost.money) == (7200.0, 8.0, 24.0)
    free = training_cost(7_200_000, 1000.0, 4, None)
    assert free is not None
    assert free.money is None
    assert training_cost(None, 1000.0, 4, PRICE) is None
    assert training_cost(7_200_000, None, 4, PRICE) is None


def test_the_planned_length_is_tokens_or_passes_over_the_data() -> None:
    data = DataFacts(
        directory="", digest="", format="text", rows=3, tokens=1001, longest_row_tokens=1, mean_row_tokens=1,
        median_row_tokens=1, truncated_rows=0, vocab_size=1, pad_token_id=0, tokenizer="",
    )  # fmt: skip
    plain = TrainSection(global_batch=1, learning_rate=1)
    assert planned_tokens(plain, data) is None
    assert planned_tokens(plain.model_copy(update={"planned_tokens": 5}), data) == 5
    assert planned_tokens(plain.model_copy(update={"planned_epochs": 2.5}), data) == 2502
    assert planned_tokens(plain.model_copy(update={"planned_epochs": 1e-9}), data) == 1


def test_a_price_is_per_device_hour() -> None:
    assert price_of(ResourcesSection()) is None
    price = price_of(ResourcesSection(price_per_device_hour=3, currency="EUR"))
    assert price == PRICE
    assert PRICE.of(7200.0) == 6.0


def test_the_account_of_a_sweep() -> None:
    baseline = trial(0, attempt(ok(100.0), 30.0), devices=2, is_baseline=True)
    winner = trial(1, attempt(ok(200.0), 20.0), devices=2)
    rejected = [trial(number, attempt(REJECTED, 0.0), devices=2) for number in (2, 3)]
    cost = sweep_cost([baseline, winner, *rejected], winner, baseline, PRICE, 3_600_000)
    assert cost.device_hours == pytest.approx(2 * 50 / 3600)
    assert cost.money == pytest.approx(3 * 2 * 50 / 3600)
    assert cost.currency == "EUR"
    assert cost.not_launched_device_hours == pytest.approx(2 * 2 * 25 / 3600), "as long as a trial in median"
    assert cost.best is not None
    assert cost.baseline is not None
    assert (cost.best.training_s, cost.baseline.training_s) == (18_000, 36_000)
    assert (cost.baseline.device_hours, cost.baseline.money) == (20, 60)
    assert cost.saved_device_hours == pytest.approx(10)
    assert cost.saved_money == pytest.approx(30)
    assert cost.break_even_tokens == pytest.approx(3_600_000 * cost.device_hours / 10)


def test_without_a_gain_nothing_is_paid_back() -> None:
    baseline = trial(0, attempt(ok(100.0), 30.0), is_baseline=True)
    same = sweep_cost([baseline], baseline, baseline, None, 3_600_000)
    assert (same.saved_device_hours, same.break_even_tokens, same.money, same.currency) == (0, None, None, None)
    slower = trial(1, attempt(ok(50.0), 30.0))
    lost = sweep_cost([baseline, slower], slower, baseline, None, 3_600_000)
    assert lost.saved_device_hours == pytest.approx(-10)
    assert lost.break_even_tokens is None


def test_without_a_planned_length_there_is_still_a_break_even() -> None:
    baseline = trial(0, attempt(ok(100.0), 30.0), is_baseline=True)
    winner = trial(1, attempt(ok(200.0), 20.0))
    cost = sweep_cost([baseline, winner], winner, baseline, None, None)
    assert (cost.best, cost.baseline, cost.saved_device_hours) == (None, None, None)
    assert cost.break_even_tokens == pytest.approx(50 / (1 / 100 - 1 / 200))
    nothing = sweep_cost([trial(0, attempt(oom(), 3.0), is_baseline=True)], None, None, None, 100)
    assert (nothing.best, nothing.saved_device_hours, nothing.break_even_tokens) == (None, None, None)
