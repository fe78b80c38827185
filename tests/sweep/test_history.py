"""What the sweep keeps up to date says the same as a look at all of its trials."""

import random

import pytest
from fakes import config, measurement, oom, spec

from orchestrator.contract.outcome import Health, Infra, Ok, Outcome, OverLimit, Rejected
from orchestrator.contract.record import AttemptRecord, Purpose, TrialRecord
from orchestrator.search.cost import median_trial_s, used_device_s
from orchestrator.spec.sweep import ConfirmSection, Objective
from orchestrator.sweep.confirmation import next_confirmation, whole_confirmation_s
from orchestrator.sweep.history import History
from orchestrator.sweep.racing import tokens_per_second_to_beat
from orchestrator.sweep.stopping import Worth, fastest_tokens_per_second, no_gain_left

SPEED = (Objective(),)
TRIALS = 80


def outcome(dice: random.Random) -> Outcome:
    """Speeds that crowd at the top, some with wide intervals, some lossy, some thrashing, some that failed."""
    speed = 100 - dice.expovariate(1 / 20)
    half = dice.choice([0.001, 0.01, 0.02, 0.5])
    measured = measurement(max(speed, 1.0)).model_copy(
        update={
            "tokens_per_second_low": max(speed, 1.0) * (1 - half),
            "tokens_per_second_high": max(speed, 1.0) * (1 + half),
            "eval_loss": dice.choice([None, 1.0, 1.05, 1.5]),
        }
    )
    health = Health.THRASHING if dice.random() < 0.2 else Health.GOOD
    return dice.choices(
        [Ok(measurement=measured, health=health), OverLimit(measurement=measured), oom(), Infra(cause="busy")],
        [6, 1, 1, 1],
    )[0]


def changed(records: dict[int, TrialRecord], dice: random.Random) -> TrialRecord:
    """What happens next: a trial is launched, rejected or ends, or one of the fast ones is measured again."""
    number = len(records)
    running = [record for record in records.values() if record.running is not None]
    if running and (number == TRIALS or dice.random() < 0.5):
        record = dice.choice(running)
        ended_s = record.attempts[-1].dispatched_s + dice.uniform(1, 20)
        last = record.attempts[-1].model_copy(update={"outcome": outcome(dice), "ended_s": ended_s})
        return record.model_copy(update={"attempts": (*record.attempts[:-1], last)})
    able = [record for record in records.values() if record.running is None and isinstance(record.outcome, Ok)]
    if able and (number == TRIALS or dice.random() < 0.1):
        record = max(dice.sample(able, min(8, len(able))), key=lambda each: each.outcome.measurement.tokens_per_second)
        return record.model_copy(update={"attempts": (*record.attempts, attempt(record, dice, Purpose.CONFIRM))})
    built = config(number + 1, world_size=dice.choice([1, 2, 4]))
    record = TrialRecord(
        trial=number,
        candidate=built.candidate,
        label=f"mb{number + 1}",
        config=built,
        is_baseline=number == 3,
        expected_gain=dice.random(),
    )
    first = attempt(record, dice, Purpose.SEARCH)
    if dice.random() < 0.1:
        first = first.model_copy(update={"outcome": Rejected(probability_fits=0.0, bill={}), "ended_s": 1.0})
    return record.model_copy(update={"attempts": (first,)})


def attempt(record: TrialRecord, dice: random.Random, purpose: Purpose) -> AttemptRecord:
    number = len(record.attempts) + 1
    return AttemptRecord(
        attempt=number, token=f"{record.trial}-{number}", purpose=purpose, dispatched_s=dice.uniform(0, 100)
    )


@pytest.mark.parametrize("within", [None, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_trials_in_view_answer_as_all_of_them_would(seed: int, within: float | None) -> None:
    dice = random.Random(seed)
    of = spec(limits={"eval_loss_within": within} if within else {})
    of = of.model_copy(update={"measure": of.measure.model_copy(update={"racing": True})})
    confirm = ConfirmSection(top=3, repeats=2)
    worth = Worth(planned_tokens=1000, eval_loss_within=within)
    history, records = History(eval_loss_within=within, confirmed=confirm.top), dict[int, TrialRecord]()
    beaten = due = 0
    for _ in range(5 * TRIALS):
        record = changed(records, dice)
        records[record.trial] = record
        history.put(record)
        everything, view = [records[trial] for trial in sorted(records)], history.in_view()
        to_beat = tokens_per_second_to_beat(of, record, everything)
        assert tokens_per_second_to_beat(of, record, view) == to_beat
        assert fastest_tokens_per_second(view, within) == fastest_tokens_per_second(everything, within)
        assert next_confirmation(SPEED, confirm, view, within) == next_confirmation(SPEED, confirm, everything, within)
        whole_s = whole_confirmation_s(SPEED, confirm, everything, within)
        assert whole_confirmation_s(SPEED, confirm, view, within) == pytest.approx(whole_s)
        assert no_gain_left(worth, view, 0.01, 5.0) == no_gain_left(worth, everything, 0.01, 5.0)
        assert history.median_trial_s == median_trial_s(everything)
        assert history.used_device_s(120.0) == pytest.approx(used_device_s(everything, 120.0))
        assert list(history) == everything
        assert history.launched == sum(not isinstance(each.outcome, Rejected) for each in everything)
        beaten += to_beat is not None
        due += next_confirmation(SPEED, confirm, view, within) is not None
    assert beaten > TRIALS
    assert due > TRIALS


def test_a_sweep_taken_up_again_is_seen_as_it_was() -> None:
    dice, records, history = random.Random(7), dict[int, TrialRecord](), History(confirmed=3)
    for _ in range(4 * TRIALS):
        record = changed(records, dice)
        records[record.trial] = record
        history.put(record)
    again = History(records.values(), confirmed=3)
    assert again.in_view() == history.in_view()
    assert again.next_number == history.next_number == TRIALS
    assert again.median_trial_s == history.median_trial_s
    assert len(history.in_view()) < TRIALS
