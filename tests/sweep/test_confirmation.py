"""The best few are measured again, in turns, before a winner is declared; the search races what cannot win."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import FakePool, FakeStrategy, candidate, measurement, new_ledger, ok, oom, spec

from orchestrator.contract.config import MeasureSettings, QualitySettings
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Health, Infra, Ok, Outcome
from orchestrator.contract.record import AttemptRecord, Purpose, SweepRecord, SweepState, TrialRecord
from orchestrator.search.ranking import best, ranked
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import BudgetSection, ConfirmSection, LimitsSection, MeasureSection, Objective, SweepSpec
from orchestrator.sweep import messages
from orchestrator.sweep.confirmation import chosen_trials, next_confirmation, whole_confirmation_s
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Interrupt, Services, run_sweep
from orchestrator.sweep.messages import Ask, AttemptEnded, Finish, Proposed, StopCause, Tick
from orchestrator.sweep.ports import Ended, Launch
from orchestrator.sweep.state import Efficiency, Setting, SweepMachine

Script = Callable[[Launch], Outcome | None]
CANDIDATES = [candidate(micro_batch) for micro_batch in range(1, 7)]
WITH_BASELINE = [candidate(micro_batch, is_baseline=micro_batch == 1) for micro_batch in range(1, 7)]
SPEED = (Objective(),)
CONFIRMED = MeasureSection(racing=False, confirm=ConfirmSection())


def micro_batch(launch: Launch) -> int:
    return launch.config.knobs.micro_batch


def faster_when_larger(launch: Launch) -> Outcome:
    return ok(tokens_per_second=100.0 * micro_batch(launch))


def attempt_of(launch: Launch) -> int:
    return int(launch.directory.name.removeprefix("attempt-"))


def run(
    home: Path, pool: FakePool, budget: BudgetSection | None = None, of: SweepSpec | None = None, **services: object
) -> tuple[SweepRecord, Ledger]:
    of = of or spec(budget=budget, measure=CONFIRMED)
    ledger = new_ledger(home, of)
    strategy = services.pop("strategy", None) or FakeStrategy(CANDIDATES, ledger.read_trials())
    with ledger.lock():
        return run_sweep(of, ledger, Services(pool=pool, strategy=strategy, **services)), ledger  # type: ignore[arg-type]


def confirmations(ledger: Ledger) -> dict[int, list[str]]:
    """Outcomes of the confirmation's attempts by micro-batch."""
    return {
        record.config.knobs.micro_batch: [each.outcome.kind for each in record.confirmations if each.outcome]
        for record in ledger.read_trials()
        if record.confirmations
    }


def test_the_best_three_run_twice_more_in_turns_and_alone(tmp_path: Path) -> None:
    pool = FakePool(faster_when_larger, slots=4)
    sweep, ledger = run(tmp_path, pool, BudgetSection(trials=6))
    assert [micro_batch(launch) for launch in pool.launched[6:]] == [6, 5, 4, 6, 5, 4]
    assert (sweep.state, sweep.exit_code, sweep.reason) == (SweepState.FINISHED, 0, "budget used: 6 trials")
    assert confirmations(ledger) == {6: ["ok"] * 2, 5: ["ok"] * 2, 4: ["ok"] * 2}
    ran = sorted((a.dispatched_s, a.ended_s or 0.0) for r in ledger.read_trials() for a in r.confirmations)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(ran))


def test_the_baseline_is_measured_again_too_and_is_ranked_by_its_speed(tmp_path: Path) -> None:
    pool = FakePool(faster_when_larger)
    _, ledger = run(tmp_path, pool, strategy=FakeStrategy(WITH_BASELINE))
    assert [micro_batch(launch) for launch in pool.launched[6:]] == [6, 5, 4, 1, 6, 5, 4, 1]
    trials = ledger.read_trials()
    assert [trial.config.knobs.micro_batch for trial in ranked(SPEED, trials)] == [6, 5, 4, 3, 2, 1]
    assert next_confirmation(SPEED, ConfirmSection(), trials) is None


def test_the_strategy_never_hears_of_it(tmp_path: Path) -> None:
    of = spec(measure=CONFIRMED)
    ledger, strategy = new_ledger(tmp_path, of), FakeStrategy(CANDIDATES)
    with ledger.lock():
        run_sweep(of, ledger, Services(pool=FakePool(faster_when_larger), strategy=strategy))
    assert Counter(told[0].id for told in strategy.told) == Counter(each.id for each in CANDIDATES)


@pytest.mark.parametrize("confirm", [ConfirmSection(top=0), ConfirmSection(repeats=0)])
def test_it_can_be_switched_off(tmp_path: Path, confirm: ConfirmSection) -> None:
    _, ledger = run(tmp_path, FakePool(faster_when_larger), of=spec(measure=MeasureSection(confirm=confirm)))
    assert confirmations(ledger) == {}


def test_only_speed_is_confirmed(tmp_path: Path) -> None:
    smallest = (Objective(metric="peak_memory_bytes", goal="minimize"), Objective())
    _, ledger = run(tmp_path, FakePool(faster_when_larger), of=spec(measure=CONFIRMED, objective=smallest))
    assert confirmations(ledger) == {}


def test_whoever_cannot_be_told_from_the_best_is_measured_again_too_up_to_five() -> None:
    def wide(launch: Launch) -> Ok:
        whole = measurement(100.0 + micro_batch(launch))
        return Ok(measurement=whole.model_copy(update={"tokens_per_second_low": 60.0, "tokens_per_second_high": 150.0}))

    records = _records(lambda launch: wide(launch) if micro_batch(launch) != 4 else ok(30.0))
    assert [record.config.knobs.micro_batch for record in chosen_trials((Objective(),), 3, records)] == [6, 5, 3, 2, 1]
    assert len(chosen_trials((Objective(),), 1, records)) == 5


def test_a_thrashing_trial_that_seems_fastest_gets_the_chance_to_prove_it(tmp_path: Path) -> None:
    def script(launch: Launch) -> Outcome:
        thrashes = micro_batch(launch) == 6 and attempt_of(launch) == 1
        return faster_when_larger(launch).model_copy(update={"health": Health.THRASHING if thrashes else Health.GOOD})

    _, ledger = run(tmp_path, FakePool(script))
    assert confirmations(ledger) == {5: ["ok"] * 2, 4: ["ok"] * 2, 3: ["ok"] * 2, 6: ["ok"] * 2}
    winner = best((Objective(),), ledger.read_trials())
    assert winner is not None
    assert winner.config.knobs.micro_batch == 6


def test_an_out_of_memory_in_the_confirmation_costs_the_win_and_the_next_one_takes_the_place(tmp_path: Path) -> None:
    def script(launch: Launch) -> Outcome:
        return oom() if micro_batch(launch) == 6 and attempt_of(launch) == 3 else faster_when_larger(launch)

    sweep, ledger = run(tmp_path, FakePool(script))
    assert confirmations(ledger) == {6: ["ok", "oom_device"], 5: ["ok"] * 2, 4: ["ok"] * 2, 3: ["ok"] * 2}
    winner = best((Objective(),), ledger.read_trials())
    assert winner is not None
    assert winner.config.knobs.micro_batch == 5
    assert sweep.exit_code == 0


def test_a_sweep_whose_every_trial_fails_its_confirmation_fits_nothing(tmp_path: Path) -> None:
    sweep, _ = run(tmp_path, FakePool(lambda launch: oom() if attempt_of(launch) > 1 else ok()))
    assert (sweep.state, sweep.exit_code) == (SweepState.FINISHED, 3)


def test_causes_outside_the_trial_are_retried_and_then_given_up(tmp_path: Path) -> None:
    def script(launch: Launch) -> Outcome:
        is_bad = micro_batch(launch) == 6 and attempt_of(launch) > 1
        return Infra(cause="bind race") if is_bad else faster_when_larger(launch)

    sweep, ledger = run(tmp_path, FakePool(script))
    assert confirmations(ledger) == {6: ["infra"] * 4, 5: ["ok"] * 2, 4: ["ok"] * 2}
    assert sweep.exit_code == 0


def test_budgets_of_time_and_device_hours_end_it_and_that_of_trials_does_not(tmp_path: Path) -> None:
    hours = BudgetSection(trials=2, device_hours=0.02 / 3600)
    sweep, ledger = run(tmp_path, FakePool(faster_when_larger, trial_s=0.02), hours)
    assert confirmations(ledger) == {}
    assert sweep.state is SweepState.FINISHED


def stop_at(launches: int, interrupt: Interrupt) -> Callable[[FakePool], None]:
    def press(pool: FakePool) -> None:
        if len(pool.launched) == launches:
            interrupt.cause = StopCause.INTERRUPT

    return press


@pytest.mark.parametrize("launches", range(6, 13))
def test_stopped_and_resumed_nothing_is_measured_twice(tmp_path: Path, launches: int) -> None:
    """Ctrl-C while launch number `launches` runs, the sixth being the search's last."""
    interrupt = Interrupt()

    def script(launch: Launch) -> Outcome | None:
        return None if len(pool.launched) == launches else faster_when_larger(launch)

    pool = FakePool(script, on_wait=stop_at(launches, interrupt))
    sweep, ledger = run(tmp_path, pool, interrupt=interrupt)
    assert sweep.state is SweepState.STOPPED
    before = {a.token: a for r in ledger.read_trials() for a in r.attempts if a.outcome and a.outcome.kind == "ok"}

    again = FakePool(faster_when_larger)
    sweep, ledger = run(tmp_path, again)
    assert sweep.state is SweepState.FINISHED
    after = {a.token: a for r in ledger.read_trials() for a in r.attempts}
    assert all(after[token] == attempt for token, attempt in before.items())
    assert len(before) + len(again.launched) == 12
    finished = {mb: [kind for kind in kinds if kind == "ok"] for mb, kinds in confirmations(ledger).items()}
    assert finished == {6: ["ok"] * 2, 5: ["ok"] * 2, 4: ["ok"] * 2}


def test_a_dead_driver_s_run_of_the_confirmation_counts_when_its_outcome_is_whole(tmp_path: Path) -> None:
    class DriverDies(Exception):
        pass

    def die(pool: FakePool) -> None:
        if len(pool.launched) == 8:
            raise DriverDies

    with pytest.raises(DriverDies):
        run(tmp_path, FakePool(faster_when_larger, on_wait=die))
    ledger = Ledger(tmp_path, "sweep")
    (left,) = [record for record in ledger.read_trials() if record.running is not None]
    assert left.config.knobs.micro_batch == 5
    ledger.attempt(left.trial, 2).write_outcome(ok(tokens_per_second=480.0))

    pool = FakePool(faster_when_larger)
    _, ledger = run(tmp_path, pool)
    assert [micro_batch(launch) for launch in pool.launched] == [4, 6, 5, 4]
    adopted = ledger.read_trial(left.trial)
    assert [a.outcome.measurement.tokens_per_second for a in adopted.confirmations if isinstance(a.outcome, Ok)] == [
        480.0,
        500.0,
    ]


def test_an_extended_search_confirms_its_new_best_alone(tmp_path: Path) -> None:
    run(tmp_path, FakePool(faster_when_larger), BudgetSection(trials=5))
    pool = FakePool(faster_when_larger)
    _, ledger = run(tmp_path, pool, BudgetSection(trials=6))
    assert [micro_batch(launch) for launch in pool.launched] == [6, 6, 6]
    assert {mb: len(kinds) for mb, kinds in confirmations(ledger).items()} == {6: 2, 5: 2, 4: 2, 3: 2}


def test_shares_of_the_peak_are_those_of_each_run(tmp_path: Path) -> None:
    def efficiency(config: object, measured: object) -> Efficiency:
        return Efficiency(mfu=shares.pop(0), hfu=0.5)

    shares = [0.1] * 6 + [0.2] * 3 + [0.4] * 3
    _, ledger = run(tmp_path, FakePool(faster_when_larger), efficiency=efficiency)
    winner = ledger.read_trials()[-1]
    assert [attempt.mfu for attempt in winner.attempts] == [0.1, 0.2, 0.4]
    assert winner.mfu == 0.1


RACING = MeasureSection(racing=True, confirm=ConfirmSection(top=1, repeats=1))


def beats(ledger: Ledger) -> list[float | None]:
    """What each trial of the search had to beat, in order; also checks what its process was told."""
    for record in ledger.read_trials():
        for attempt in record.attempts:
            files: AttemptFiles = ledger.attempt(record.trial, attempt.attempt)
            assert files.read_config().beat_tokens_per_second == attempt.beat_tokens_per_second
    return [record.attempts[0].beat_tokens_per_second for record in ledger.read_trials()]


def test_each_trial_has_to_reach_the_interval_of_the_best_before_it_but_the_baseline_and_confirmations(
    tmp_path: Path,
) -> None:
    strategy = FakeStrategy(WITH_BASELINE)
    _, ledger = run(tmp_path, FakePool(faster_when_larger), of=spec(measure=RACING), strategy=strategy)
    assert beats(ledger) == [None, 99.0, 198.0, 297.0, 396.0, 495.0]
    confirmed = [attempt for record in ledger.read_trials() for attempt in record.confirmations]
    assert [attempt.beat_tokens_per_second for attempt in confirmed] == [None, None]


def test_who_does_not_fit_or_thrashes_is_nothing_to_beat(tmp_path: Path) -> None:
    ends = {1: oom(), 2: ok(500.0).model_copy(update={"health": Health.THRASHING}), 3: ok(100.0)}
    pool = FakePool(lambda launch: ends.get(micro_batch(launch), ok(50.0)))
    _, ledger = run(tmp_path, pool, of=spec(measure=RACING))
    assert beats(ledger) == [None, None, None, 99.0, 99.0, 99.0]


@pytest.mark.parametrize(
    "of",
    [
        spec(measure=CONFIRMED),
        spec(measure=RACING, objective=(Objective(), Objective(metric="peak_memory_bytes", goal="minimize"))),
        spec(measure=RACING.model_copy(update={"quality": QualitySettings(train_tokens=1)})),
        spec(
            measure=RACING.model_copy(update={"quality": QualitySettings(train_tokens=1)}),
            limits=LimitsSection(eval_loss_within=0.1),
        ),
    ],
    ids=["switched off", "several objectives", "a loss that bounds nobody", "no baseline to compare with"],
)
def test_where_nothing_is_raced(tmp_path: Path, of: SweepSpec) -> None:
    _, ledger = run(tmp_path, FakePool(faster_when_larger), of=of)
    assert beats(ledger) == [None] * 6


def test_a_trial_that_loses_too_much_is_nothing_to_beat(tmp_path: Path) -> None:
    def lossy_when_larger(launch: Launch) -> Ok:
        outcome = ok(tokens_per_second=100.0 * micro_batch(launch))
        loss = 4.0 if micro_batch(launch) < 3 else 5.0
        return Ok(measurement=outcome.measurement.model_copy(update={"eval_loss": loss}))

    of = spec(
        measure=RACING.model_copy(update={"quality": QualitySettings(train_tokens=1)}),
        limits=LimitsSection(eval_loss_within=0.1),
    )
    first = Candidate(CANDIDATES[0].id, "one", CANDIDATES[0].config, True)
    strategy = FakeStrategy([first, *CANDIDATES[1:]])
    _, ledger = run(tmp_path, FakePool(lossy_when_larger), of=of, strategy=strategy)
    assert beats(ledger) == [None, 99.0, 198.0, 198.0, 198.0, 198.0]


def test_the_loss_is_not_taken_again(tmp_path: Path) -> None:
    measure = MeasureSettings(quality=QualitySettings(train_tokens=1))
    config = CANDIDATES[0].config.model_copy(update={"measure": measure})
    strategy = FakeStrategy([Candidate(CANDIDATES[0].id, "one", config, False)])
    pool = FakePool(faster_when_larger)
    run(tmp_path, pool, strategy=strategy)
    assert [launch.config.measure.quality is None for launch in pool.launched] == [False, True, True]


def _records(script: Callable[[Launch], Outcome]) -> list[TrialRecord]:
    records = []
    for number, each in enumerate(CANDIDATES):
        outcome = script(Launch(str(number), Path(), each.config))
        attempt = AttemptRecord(attempt=1, token=str(number), dispatched_s=1.0, outcome=outcome)
        records.append(
            TrialRecord(trial=number, candidate=each.id, label=each.label, config=each.config, attempts=(attempt,))
        )
    return records


def test_a_search_that_ends_for_want_of_gain_is_confirmed_too(tmp_path: Path) -> None:
    strategy = FakeStrategy(CANDIDATES)
    strategy.gain = 0.0
    sweep, ledger = run(tmp_path, FakePool(faster_when_larger), strategy=strategy)
    searched = len(ledger.read_trials())
    assert searched < len(CANDIDATES), sweep.reason
    assert all(kinds == ["ok"] * 2 for kinds in confirmations(ledger).values())
    assert len(confirmations(ledger)) == min(3, searched) > 0


def test_the_search_leaves_the_confirmation_some_of_its_time(tmp_path: Path) -> None:
    """Trials of 100 s under a budget of 1000 s, a quarter of which is kept: room for two runs of the confirmation."""
    clock = Clock()
    setting = Setting(
        budget=BudgetSection(time=1000.0),
        efficiency=lambda config, measured: None,
        new_token=clock.token,
        started_s=0.0,
        confirm=lambda records: due.record if (due := next_confirmation(SPEED, ConfirmSection(), records)) else None,
        kept_s=lambda records: whole_confirmation_s(SPEED, ConfirmSection(), records),
    )
    machine = SweepMachine(setting)
    candidates = (candidate(micro_batch) for micro_batch in range(1, 100))
    launched: list[Purpose] = []
    while True:
        (action,) = machine.handle(Tick(clock.now_s, has_room=True))
        if isinstance(action, Finish):
            break
        if isinstance(action, Ask):
            (action,) = machine.handle(Proposed(next(candidates), clock.now_s))
        assert isinstance(action, messages.Launch)
        attempt = action.record.attempts[-1]
        launched.append(attempt.purpose)
        clock.now_s += 100.0
        machine.handle(AttemptEnded(Ended(attempt.token, ok(100.0 * action.record.trial + 1)), clock.now_s))
    assert launched == [Purpose.SEARCH] * 8 + [Purpose.CONFIRM] * 2
    assert action.reason == "budget used: 16m40s"


class Clock:
    """Time that is told, and tokens without end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._tokens = 0

    def token(self) -> str:
        self._tokens += 1
        return str(self._tokens)


def test_a_search_that_left_more_than_the_confirmation_took_says_why_it_ended(tmp_path: Path) -> None:
    """Runs of the confirmation may be quicker than those of the search were."""
    sweep, ledger = run(tmp_path, FakePool(faster_when_larger), of=_timed(4e5))
    assert sweep.reason.startswith("space exhausted")
    clock = Clock()
    setting = Setting(
        BudgetSection(time=1000.0), lambda config, measured: None, clock.token, 0.0, kept_s=lambda _: 200.0
    )
    machine = SweepMachine(setting, ledger.read_trials())
    assert machine.handle(Tick(799.0, has_room=True)) == [Ask()]
    (finish,) = machine.handle(Tick(801.0, has_room=True))
    assert isinstance(finish, Finish)
    assert finish.reason == "budget used: 16m40s, the last of it kept for the confirmation"


def _timed(time_s: float) -> SweepSpec:
    return spec(measure=CONFIRMED, budget=BudgetSection(time=time_s))
