import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import (
    FakePool,
    FakeRunLog,
    FakeStrategy,
    candidate,
    new_ledger,
    ok,
    oom,
    over_limit,
    spec,
    write_first_step,
)

from orchestrator.contract.errors import ClusterUnreachableError
from orchestrator.contract.outcome import Crashed, Infra, Invalid, LostNode, Outcome, Phase, Preempted, Rejected
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import BudgetSection, Objective, ResourcesSection
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Interrupt, Services, run_sweep
from orchestrator.sweep.messages import StopCause
from orchestrator.sweep.ports import Ended, Launch
from orchestrator.sweep.state import Efficiency

Script = Callable[[Launch], Outcome | None]
CANDIDATES = [candidate(micro_batch) for micro_batch in range(1, 7)]


def always_ok(launch: Launch) -> Outcome:
    return ok(tokens_per_second=100.0 * launch.config.knobs.micro_batch)


def crash(launch: Launch) -> Outcome:
    return Crashed(phase=Phase.INIT, rank=0, error="ValueError: bad bucket\nmore")


def run(
    home: Path, pool: FakePool, budget: BudgetSection | None = None, **services: object
) -> tuple[SweepRecord, Ledger]:
    of = spec(budget=budget)
    ledger = new_ledger(home, of)
    strategy = services.pop("strategy", None) or FakeStrategy(CANDIDATES, ledger.read_trials())
    with ledger.lock():
        return run_sweep(of, ledger, Services(pool=pool, strategy=strategy, **services)), ledger  # type: ignore[arg-type]


def test_every_candidate_runs_once_and_the_sweep_ends_when_the_space_is_exhausted(tmp_path: Path) -> None:
    log, strategy = FakeRunLog(), FakeStrategy(CANDIDATES)
    sweep, ledger = run(tmp_path, FakePool(always_ok), strategy=strategy, logs=(log,))

    assert (sweep.state, sweep.exit_code) == (SweepState.FINISHED, 0)
    assert "exhausted" in sweep.reason
    trials = ledger.read_trials()
    assert [trial.trial for trial in trials] == list(range(6))
    assert [trial.candidate for trial in trials] == [each.id for each in CANDIDATES]
    assert [told[2] for told in strategy.told] == [(100.0 * mb,) for mb in range(1, 7)]
    assert [s.state for s in log.sweeps] == [SweepState.RUNNING, SweepState.FINISHED]
    assert len(log.trials) == 12
    assert log.trials[-1] == trials[-1]


def test_room_is_filled_but_not_beyond_the_spec(tmp_path: Path) -> None:
    wide = FakePool(always_ok, slots=4)
    run(tmp_path / "wide", wide)
    assert wide.most_running == 4

    of = spec(resources=ResourcesSection(max_concurrent_trials=2))
    narrow = FakePool(always_ok, slots=4)
    ledger = new_ledger(tmp_path / "narrow", of)
    with ledger.lock():
        run_sweep(of, ledger, Services(pool=narrow, strategy=FakeStrategy(CANDIDATES)))
    assert narrow.most_running == 2


def test_budget_of_trials_is_exact_with_parallel_trials(tmp_path: Path) -> None:
    sweep, ledger = run(tmp_path, FakePool(always_ok, slots=4), BudgetSection(trials=5))
    assert len(ledger.read_trials()) == 5
    assert sweep.reason == "budget used: 5 trials"


def test_time_and_device_hours_end_the_sweep(tmp_path: Path) -> None:
    sweep, ledger = run(tmp_path / "time", FakePool(always_ok, trial_s=0.02), BudgetSection(time=1e-3))
    assert len(ledger.read_trials()) <= 1
    assert sweep.reason.startswith("budget used")

    tiny = BudgetSection(device_hours=1e-6)
    sweep, ledger = run(tmp_path / "hours", FakePool(always_ok, trial_s=0.02), tiny)
    assert len(ledger.read_trials()) == 1
    assert sweep.reason == "budget used: 1e-06 device-hours"


def test_nothing_fits_is_exit_3(tmp_path: Path) -> None:
    sweep, _ = run(tmp_path, FakePool(lambda launch: oom()))
    assert (sweep.state, sweep.exit_code) == (SweepState.FINISHED, 3)


def test_over_limit_is_no_winner(tmp_path: Path) -> None:
    sweep, _ = run(tmp_path, FakePool(lambda launch: over_limit()))
    assert sweep.exit_code == 3


def test_three_trials_that_fail_alike_end_the_sweep(tmp_path: Path) -> None:
    sweep, ledger = run(tmp_path, FakePool(crash))
    assert (sweep.state, sweep.exit_code) == (SweepState.FAILED, 1)
    assert sweep.reason == "every trial failed alike: ValueError: bad bucket"
    assert len(ledger.read_trials()) == 3


@pytest.mark.parametrize("other", [ok(), oom(), Invalid(phase=Phase.INIT, reason="no gradients")])
def test_failures_that_are_not_alike_do_not_end_the_sweep(tmp_path: Path, other: Outcome) -> None:
    sweep, ledger = run(
        tmp_path, FakePool(lambda launch: other if launch.config.knobs.micro_batch == 2 else crash(launch))
    )
    assert len(ledger.read_trials()) == 6
    assert sweep.state is SweepState.FINISHED


@pytest.mark.parametrize(
    "cause", [LostNode(node="n1"), Preempted(), Infra(cause="bind race")], ids=lambda outcome: outcome.kind
)
def test_causes_outside_the_candidate_are_retried_three_times(tmp_path: Path, cause: Outcome) -> None:
    pool = FakePool(lambda launch: cause if launch.config.knobs.micro_batch == 1 else ok())
    _, ledger = run(tmp_path, pool)
    first, *others = ledger.read_trials()
    assert [attempt.outcome for attempt in first.attempts] == [cause] * 4
    assert [attempt.attempt for attempt in first.attempts] == [1, 2, 3, 4]
    assert all(len(trial.attempts) == 1 for trial in others)
    assert len({launch.token for launch in pool.launched}) == len(pool.launched) == 9


def test_each_cause_has_its_own_retries(tmp_path: Path) -> None:
    ends: list[Outcome] = [LostNode(node="n1"), Infra(cause="bind race")] * 3 + [ok()]
    pool = FakePool(lambda launch: ends.pop(0) if launch.config.knobs.micro_batch == 1 else ok())
    _, ledger = run(tmp_path, pool)
    assert len(ledger.read_trials()[0].attempts) == 7
    assert ledger.read_trials()[0].measurement is not None


def test_a_late_result_of_an_unknown_attempt_is_dropped(tmp_path: Path) -> None:
    def inject(pool: FakePool) -> None:
        pool.injected.append(Ended("an old token", oom()))

    _, ledger = run(tmp_path, FakePool(always_ok, on_wait=inject))
    assert {trial.outcome.kind for trial in ledger.read_trials() if trial.outcome} == {"ok"}


@pytest.mark.parametrize(("cause", "exit_code"), [(StopCause.INTERRUPT, 130), (StopCause.TERMINATE, 143)])
def test_a_signal_cancels_what_runs_and_resume_repeats_it(tmp_path: Path, cause: StopCause, exit_code: int) -> None:
    interrupt = Interrupt()

    def hang_third(launch: Launch) -> Outcome | None:
        return None if launch.config.knobs.micro_batch == 3 else always_ok(launch)

    def press(pool: FakePool) -> None:
        if len(pool.launched) == 3:
            interrupt.cause = cause

    sweep, ledger = run(tmp_path, FakePool(hang_third, on_wait=press), interrupt=interrupt)
    assert (sweep.state, sweep.exit_code) == (SweepState.STOPPED, exit_code)
    before = {trial.trial: trial for trial in ledger.read_trials()}
    assert len(before) == 3
    assert before[2].outcome is not None
    assert before[2].outcome.kind == "cancelled"

    pool = FakePool(always_ok)
    sweep, ledger = run(tmp_path, pool)
    after = {trial.trial: trial for trial in ledger.read_trials()}
    assert sweep.exit_code == 0
    assert len(after) == 6
    assert (after[0], after[1]) == (before[0], before[1])
    assert [attempt.attempt for attempt in after[2].attempts] == [1, 2]
    assert pool.launched[0].config == after[2].config, "the interrupted trial comes first"


def test_stop_request_ends_the_sweep_with_exit_4(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "sweep")

    def ask_to_stop(pool: FakePool) -> None:
        if len(pool.launched) == 2:
            ledger.request_stop()

    sweep, _ = run(
        tmp_path, FakePool(lambda launch: None if launch.config.knobs.micro_batch == 2 else ok(), on_wait=ask_to_stop)
    )
    assert (sweep.state, sweep.exit_code) == (SweepState.STOPPED, 4)

    sweep, _ = run(tmp_path, FakePool(always_ok))
    assert sweep.state is SweepState.FINISHED, "a stop request holds for one session"


def test_a_stop_that_is_asked_while_the_driver_prepares_is_heard(tmp_path: Path) -> None:
    of = spec()
    ledger = new_ledger(tmp_path, of)
    ledger.request_stop()  # to a driver that was gone already
    with ledger.lock():
        assert not ledger.stop_requested()
        ledger.request_stop()
        sweep = run_sweep(
            of, ledger, Services(pool=FakePool(lambda launch: ok()), strategy=FakeStrategy([candidate(1)]))
        )
    assert (sweep.state, sweep.exit_code) == (SweepState.STOPPED, 4)
    assert ledger.read_trials() == []


def test_budget_is_counted_once_over_sessions(tmp_path: Path) -> None:
    for session in range(3):
        interrupt = Interrupt()

        def press(pool: FakePool, interrupt: Interrupt = interrupt, session: int = session) -> None:
            if session < 2 and len(pool.launched) == 3:
                interrupt.cause = StopCause.INTERRUPT

        of = spec(budget=BudgetSection(trials=10))
        ledger = new_ledger(tmp_path, of)
        strategy = FakeStrategy([candidate(mb) for mb in range(1, 30)], ledger.read_trials())
        with ledger.lock():
            services = Services(
                pool=FakePool(always_ok, slots=4, on_wait=press), strategy=strategy, interrupt=interrupt
            )
            sweep = run_sweep(of, ledger, services)
    trials = ledger.read_trials()
    assert sweep.exit_code == 0
    assert len(trials) == 10
    assert all(trial.measurement for trial in trials)


def test_elapsed_time_adds_up_over_sessions(tmp_path: Path) -> None:
    first, ledger = run(tmp_path, FakePool(always_ok, trial_s=0.01), BudgetSection(trials=2))
    ledger.write_sweep(first.model_copy(update={"elapsed_s": 100.0}))
    second, _ = run(tmp_path, FakePool(always_ok), BudgetSection(trials=3))
    assert second.elapsed_s > 100.0
    third, _ = run(tmp_path, FakePool(always_ok), BudgetSection(trials=6, time=50.0))
    assert third.reason == "budget used: 50.0s"
    assert len(ledger.read_trials()) == 3


def test_a_dead_drivers_attempt_is_repeated_unless_its_outcome_is_whole(tmp_path: Path) -> None:
    def stay(launch: Launch) -> None:
        return None

    class DriverDies(Exception):
        pass

    def die(pool: FakePool) -> None:
        raise DriverDies

    with pytest.raises(DriverDies):
        run(tmp_path, FakePool(stay, slots=2, on_wait=die))
    ledger = Ledger(tmp_path, "sweep")
    ledger.attempt(0, 1).write_outcome(ok(tokens_per_second=77.0))
    ledger.attempt(1, 1).outcome.write_text('{"kind": "ok", "measu')

    run(tmp_path, FakePool(always_ok))
    adopted, repeated = ledger.read_trials()[:2]
    assert adopted.measurement is not None
    assert adopted.measurement.tokens_per_second == 77.0
    assert len(adopted.attempts) == 1
    kinds = [attempt.outcome.kind for attempt in repeated.attempts if attempt.outcome]
    assert kinds == ["cancelled", "ok"]


def test_a_lost_cluster_leaves_a_sweep_that_can_be_resumed(tmp_path: Path) -> None:
    def lose(pool: FakePool) -> None:
        if len(pool.launched) == 2:
            raise ClusterUnreachableError("the head node does not answer")

    with pytest.raises(ClusterUnreachableError):
        run(tmp_path, FakePool(always_ok, on_wait=lose))
    sweep = Ledger(tmp_path, "sweep").read_sweep()
    assert (sweep.state, sweep.exit_code) == (SweepState.INTERRUPTED, 5)
    assert sweep.reason == "the head node does not answer"
    sweep, ledger = run(tmp_path, FakePool(always_ok))
    assert (sweep.exit_code, len(ledger.read_trials())) == (0, 6)


def test_launch_overhead_is_the_last_ranks_first_step(tmp_path: Path) -> None:
    steps_s: list[float] = []

    def stepping(launch: Launch) -> Outcome:
        now_s = time.time()
        steps_s.append(now_s + 2.0)
        write_first_step(launch.directory, rank=0, time_s=now_s + 1.0)
        write_first_step(launch.directory, rank=1, time_s=now_s + 2.0)
        write_first_step(launch.directory, rank=1, time_s=now_s + 50.0)
        return ok()

    _, ledger = run(tmp_path, FakePool(stepping), BudgetSection(trials=1))
    (attempt,) = ledger.read_trials()[0].attempts
    assert attempt.launch_overhead_s == steps_s[0] - attempt.dispatched_s


def test_efficiency_is_stored_and_is_an_objective(tmp_path: Path) -> None:
    of = spec(objective=(Objective(metric="mfu"), Objective(metric="step_s", goal="minimize")))
    ledger, strategy = new_ledger(tmp_path, of), FakeStrategy(CANDIDATES[:1])
    with ledger.lock():
        run_sweep(
            of,
            ledger,
            Services(pool=FakePool(always_ok), strategy=strategy, efficiency=lambda c, m: Efficiency(0.4, 0.5)),
        )
    (trial,) = ledger.read_trials()
    assert (trial.mfu, trial.hfu) == (0.4, 0.5)
    assert strategy.told[0][2] == (0.4, 0.3)


def test_records_are_durable_before_the_launch(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []

    def look(launch: Launch) -> Outcome:
        record = json.loads((launch.directory.parent / "trial.json").read_text())
        seen.append(record["attempts"][-1])
        return ok()

    run(tmp_path, FakePool(look), BudgetSection(trials=1))
    assert seen[0]["outcome"] is None
    assert seen[0]["attempt"] == 1


class RejectsAbove:
    """A gate that lets micro-batches up to `most` pass."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.learned: list[str] = []

    def judge(self, candidate: Candidate) -> Rejected | None:
        is_small = candidate.config.knobs.micro_batch <= self.most
        return None if is_small else Rejected(probability_fits=0.01, bill={"activations": 5000})

    def learn(self, record: TrialRecord) -> None:
        assert record.outcome is not None
        self.learned.append(record.outcome.kind)


def test_what_the_gate_rejects_is_recorded_and_told_but_neither_launched_nor_paid_for(tmp_path: Path) -> None:
    gate, strategy, log = RejectsAbove(2), FakeStrategy(CANDIDATES[::-1]), FakeRunLog()
    launched: list[int] = []

    def note(launch: Launch) -> Outcome | None:
        launched.append(launch.config.knobs.micro_batch)
        return always_ok(launch)

    sweep, ledger = run(
        tmp_path, FakePool(note), budget=BudgetSection(trials=1), strategy=strategy, gate=gate, logs=(log,)
    )

    assert launched == [2]
    kinds = [record.outcome.kind for record in ledger.read_trials() if record.outcome]
    assert kinds == [told[1].kind for told in strategy.told] == gate.learned == ["rejected"] * 4 + ["ok"]
    assert sweep.reason == "budget used: 1 trials"
    assert {trial.outcome.kind for trial in log.trials if trial.outcome} == {"rejected", "ok"}

    again, _ = run(tmp_path, FakePool(note), budget=BudgetSection(trials=3), gate=RejectsAbove(2))
    assert launched == [2, 1]
    assert again.reason == "space exhausted: all 6 candidates were tried but 4 that are predicted not to fit"


def test_a_sweep_that_rejects_everything_finds_nothing_that_fits(tmp_path: Path) -> None:
    sweep, ledger = run(tmp_path, FakePool(always_ok), gate=RejectsAbove(0))
    assert (sweep.state, sweep.exit_code) == (SweepState.FINISHED, 3)
    assert len(ledger.read_trials()) == len(CANDIDATES)
