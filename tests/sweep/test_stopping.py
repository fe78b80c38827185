"""Every stop rule by itself, then in the sweep: what ends it, what is not launched, and how it goes on."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from fakes import FakePool, FakeStrategy, candidate, config, new_ledger, ok, oom, spec

from orchestrator.contract.outcome import Health, Ok, Outcome, Rejected
from orchestrator.contract.record import AttemptRecord, SweepRecord, SweepState, TrialRecord
from orchestrator.search.cost import Price, used_device_s
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import BudgetSection, ResourcesSection, SearchSection, SweepSpec
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Launch
from orchestrator.sweep.stopping import Worth, budget_used_up, no_gain_left

DOLLARS = Price(3.6, "USD")
TRIAL_S = 10.0


def trial(number: int, outcome: Outcome | None, gain: float | None = None, devices: int = 1) -> TrialRecord:
    """A trial that took TRIAL_S, or still runs."""
    of = candidate(number + 1)
    ended_s = TRIAL_S if outcome is not None else None
    attempt = AttemptRecord(attempt=1, token=f"t{number}", dispatched_s=0.0, ended_s=ended_s, outcome=outcome)
    built = config(number + 1, world_size=devices)
    return TrialRecord(
        trial=number, candidate=of.id, label=of.label, config=built, expected_gain=gain, attempts=(attempt,)
    )


REJECTED = Rejected(probability_fits=0.01, bill={})


@pytest.mark.parametrize(
    ("budget", "price", "elapsed_s", "reason"),
    [
        (BudgetSection(), DOLLARS, 1e9, ""),
        (BudgetSection(time=60), None, 59.9, ""),
        (BudgetSection(time=60), None, 60.0, "budget used: 1m00s"),
        (BudgetSection(device_hours=0.0112), None, 0, ""),
        (BudgetSection(device_hours=0.0111), None, 0, "budget used: 0.0111 device-hours"),
        (BudgetSection(money=0.0401), DOLLARS, 0, ""),
        (BudgetSection(money=0.04), DOLLARS, 0, "budget used: 0.04 USD"),
        (BudgetSection(money=0.04), Price(3.5, "USD"), 0, ""),
    ],
)
def test_each_budget_ends_where_it_is_used_up(
    budget: BudgetSection, price: Price | None, elapsed_s: float, reason: str
) -> None:
    # 10 s on one device and 10 s so far on three: 40 device-seconds, 0.0111 hours
    records = [trial(0, ok()), trial(1, None, devices=3)]
    assert budget_used_up(budget, price, elapsed_s, used_device_s(records, now_s=10.0)) == reason


FITTED = [trial(0, ok(100.0)), trial(1, ok(90.0), gain=0.002)]


@pytest.mark.parametrize(
    ("records", "gain", "worth", "stops"),
    [
        (FITTED, 0.0029, Worth(), True),
        (FITTED, 0.003, Worth(), False),
        (FITTED, None, Worth(), False),
        (FITTED, 0.0, Worth(stop_below_gain=0), False),
        (FITTED, 0.0, Worth(stop_below_gain=0, planned_tokens=1), False),
        (FITTED, 0.0019, Worth(stop_below_gain=0.002), False),
        ([trial(0, ok()), trial(1, ok(), gain=0.01)], 0.001, Worth(), False),
        ([trial(0, ok()), trial(1, ok())], 0.001, Worth(), False),
        ([trial(0, ok(), gain=0.001)], 0.001, Worth(), True),
        ([], 0.001, Worth(), False),
        ([trial(0, oom(), gain=0.001)], 0.001, Worth(), False),
        ([trial(0, Ok(measurement=ok().measurement, health=Health.THRASHING), gain=0.0)], 0.001, Worth(), False),
        ([*FITTED, trial(2, REJECTED, gain=0.5)], 0.001, Worth(), True),
        ([FITTED[0], trial(1, ok(), gain=0.5), trial(2, REJECTED, gain=0.0)], 0.001, Worth(), False),
    ],
    ids=[
        "two below", "at the bound", "unknown gain", "never", "never, with a plan", "one before is not below its bound",
        "one before is large", "one before is unknown", "one trial", "no trial", "nothing fits", "only by luck",
        "a rejected one is passed over", "a rejected one does not count",
    ],
)  # fmt: skip
def test_two_small_gains_in_a_row_end_the_search(
    records: Sequence[TrialRecord], gain: float | None, worth: Worth, stops: bool
) -> None:
    said = "no candidate is expected to gain more than 0.3 % over the best (search.stop_below_gain)"
    assert no_gain_left(worth, records, gain) == (said if stops else "")


def test_with_a_planned_length_a_gain_has_to_save_more_than_a_trial_takes() -> None:
    # 100,000 tokens at 100 tokens/s: 1,000 s, of which a gain g saves 1000 g / (1 + g); a trial takes 10 s
    worth = Worth(planned_tokens=100_000)
    records = [trial(0, ok(100.0)), trial(1, ok(90.0), gain=0.005)]
    assert no_gain_left(worth, records, 0.0102, TRIAL_S) == ""
    assert no_gain_left(worth, records, 0.0100, TRIAL_S) == (
        "no candidate is worth its trial: one takes about 10.0s, and the next is expected to save 9.9s of the planned"
        " training, 16m40s with the best"
    )
    records[1] = trial(1, ok(), gain=0.02)
    assert no_gain_left(worth, records, 0.01, TRIAL_S) == "", "the one before was worth it"


def test_a_long_training_makes_small_gains_worth_their_trial_and_a_short_one_no_gain() -> None:
    assert no_gain_left(Worth(planned_tokens=10_000_000), FITTED, 0.001, TRIAL_S) == ""
    large = [trial(0, ok(100.0)), trial(1, ok(90.0), gain=0.9)]
    assert no_gain_left(Worth(planned_tokens=1000), large, 0.9, TRIAL_S) != "", "10 s of training save less than 10 s"


class Gains(FakeStrategy):
    """Says each of `gains` for the candidates in turn, the last one for the rest."""

    def __init__(self, gains: Sequence[float | None], records: Iterable[TrialRecord] = ()) -> None:
        records = list(records)
        super().__init__([candidate(micro_batch) for micro_batch in range(1, 9)], records)
        self._gains = list(gains)[len(records) :] or [gains[-1]]

    def ask(self) -> Candidate | None:
        self.gain = self._gains.pop(0) if len(self._gains) > 1 else self._gains[0]
        return super().ask()


def always_ok(launch: Launch) -> Outcome:
    return ok(tokens_per_second=100.0)


def run(
    home: Path, strategy: Gains, of: SweepSpec | None = None, pool: FakePool | None = None, tokens: int | None = None
) -> tuple[SweepRecord, Ledger]:
    of = of or spec()
    ledger = new_ledger(home, of)
    ledger.write_sweep(ledger.read_sweep().model_copy(update={"planned_tokens": tokens}))
    with ledger.lock():
        return run_sweep(of, ledger, Services(pool=pool or FakePool(always_ok), strategy=strategy)), ledger


GAINS = [None, 0.2, 0.002, 0.05, 0.002, 0.001]


def test_the_candidate_that_is_not_worth_its_trial_is_not_launched(tmp_path: Path) -> None:
    pool = FakePool(always_ok)
    sweep, ledger = run(tmp_path, Gains(GAINS), pool=pool)
    assert (sweep.state, sweep.exit_code) == (SweepState.FINISHED, 0)
    assert sweep.reason == "no candidate is expected to gain more than 0.3 % over the best (search.stop_below_gain)"
    assert len(pool.launched) == 5
    assert [record.expected_gain for record in ledger.read_trials()] == GAINS[:5]


def test_a_resumed_sweep_stops_at_once_unless_the_word_has_changed(tmp_path: Path) -> None:
    _, ledger = run(tmp_path, Gains(GAINS))
    pool = FakePool(always_ok)
    sweep, _ = run(tmp_path, Gains(GAINS, ledger.read_trials()), spec(budget=BudgetSection(trials=7)), pool)
    assert pool.launched == [], "a greater budget makes no gain"
    assert "search.stop_below_gain" in sweep.reason

    never = spec(search=SearchSection(stop_below_gain=0))
    sweep, ledger = run(tmp_path, Gains(GAINS, ledger.read_trials()), never)
    assert len(ledger.read_trials()) == 8
    assert sweep.reason.startswith("space exhausted")


def test_a_strategy_that_knows_no_gain_goes_on_to_the_end(tmp_path: Path) -> None:
    sweep, ledger = run(tmp_path, Gains([None]))
    assert len(ledger.read_trials()) == 8
    assert sweep.reason.startswith("space exhausted")


def test_the_planned_length_is_the_sweeps(tmp_path: Path) -> None:
    sweep, ledger = run(tmp_path, Gains([None, 0.5, 0.5]), tokens=1, pool=FakePool(always_ok, trial_s=0.03))
    assert len(ledger.read_trials()) == 2
    assert sweep.reason.startswith("no candidate is worth its trial: one takes about ")


@pytest.mark.parametrize(("second_tokens_per_second", "launched"), [(100.0, [2]), (200.0, [2, 3])])
def test_a_running_trial_that_is_faster_than_all_before_brings_the_held_one_back(
    tmp_path: Path, second_tokens_per_second: float, launched: list[int]
) -> None:
    """Two at a time: when the third candidate is held, the second still runs."""

    def second(launch: Launch) -> Outcome:
        return ok(second_tokens_per_second if launch.config.knobs.micro_batch == 2 else 100.0)

    _, ledger = run(tmp_path, Gains([None]), spec(budget=BudgetSection(trials=1)))
    pool = FakePool(second, slots=2)
    sweep, ledger = run(tmp_path, Gains([None, 0.001, 0.001], ledger.read_trials()), pool=pool)
    assert [launch.config.knobs.micro_batch for launch in pool.launched] == launched
    assert [record.trial for record in ledger.read_trials()] == list(range(1 + len(launched)))
    assert "search.stop_below_gain" in sweep.reason


def test_money_ends_the_sweep(tmp_path: Path) -> None:
    of = spec(budget=BudgetSection(money=1e-6), resources=ResourcesSection(price_per_device_hour=2, currency="EUR"))
    sweep, ledger = run(tmp_path, Gains([None]), of, FakePool(always_ok, trial_s=0.02))
    assert len(ledger.read_trials()) == 1
    assert sweep.reason == "budget used: 1e-06 EUR"
