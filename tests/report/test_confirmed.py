"""What readers are told about confirmed winners, ties, failed confirmations, thrashing and races."""

import pytest
from sweep_records import make_trials, measurement, trial

from orchestrator.contract.outcome import Health, Ok, OomDevice, Outcome, Phase
from orchestrator.contract.record import AttemptRecord, Purpose, SweepRecord, SweepState, TrialRecord
from orchestrator.contract.units import MIB
from orchestrator.report.export.measured import measured_trial
from orchestrator.report.markdown import render_markdown
from orchestrator.report.summary import Summary, summarize

OOM = OomDevice(
    phase=Phase.BACKWARD, rank=0, requested_bytes=200 * MIB, allocated_bytes=900 * MIB, evidence="no memory"
)


def run_at(speed: float, peak_bytes: int = 700 * MIB, health: Health = Health.GOOD) -> Ok:
    return Ok(measurement=measurement(speed, peak_bytes), health=health)


def again(record: TrialRecord, *outcomes: Outcome | None) -> TrialRecord:
    """`record` after runs of its confirmation."""
    attempts = tuple(
        AttemptRecord(
            attempt=number + 2,
            token=f"{record.trial}-{number}",
            purpose=Purpose.CONFIRM,
            dispatched_s=150.0,
            outcome=outcome,
            mfu=0.2,
            hfu=0.3,
        )
        for number, outcome in enumerate(outcomes)
    )
    return record.model_copy(update={"attempts": (*record.attempts, *attempts)})


@pytest.fixture
def confirmed(sweep: SweepRecord) -> Summary:
    """Trial 2 won the search with luck; trial 1 holds what it promised."""
    trials = make_trials()
    trials[1] = again(trials[1], run_at(1490.0), run_at(1494.0))
    trials[2] = again(trials[2], run_at(1400.0), run_at(1404.0))
    return summarize(sweep, trials, None)


def test_the_winner_s_figures_are_those_of_its_confirmation(confirmed: Summary) -> None:
    best = confirmed.best
    assert best is not None
    assert (best.trial, best.tokens_per_second, best.search_tokens_per_second) == (1, 1492.0, 1500.0)
    assert (best.confirmation_runs, best.mfu, best.hfu) == (2, 0.2, 0.3)
    assert best.baseline_speedup == pytest.approx(1.492)
    assert best.peak_memory_bytes == 950 * MIB
    assert best.not_distinguishable == ()
    assert [row.trial for row in confirmed.ranked] == [1, 2, 0, 3]


def test_the_report_shows_both_figures_and_says_what_they_are(confirmed: Summary) -> None:
    text = render_markdown(confirmed)
    assert "trial 1 (full z0 mb4): 1,492 tokens/s, 1.49x the baseline." in text
    assert "Confirmed: measured 2 times again after the search, which had found 1,500 tokens/s." in text
    assert "| 1 | full z0 mb4 | 1,492 |" in text
    assert "| 2 | 1,500 |" in text
    assert "mean of the runs after the search alone" in text


def test_a_tie_says_how_it_is_broken(sweep: SweepRecord) -> None:
    trials = make_trials()
    trials[1] = again(trials[1], run_at(1500.0), run_at(1512.0))
    trials[2] = again(trials[2], run_at(1490.0), run_at(1502.0))
    summary = summarize(sweep, trials, None)
    assert summary.best is not None
    assert (summary.best.trial, summary.best.not_distinguishable) == (2, (1,)), "the slower one needs less memory"
    assert "overlap): trial 1; within 3 % the larger headroom wins." in render_markdown(summary)


def test_a_failed_confirmation_is_told_with_its_outcome(sweep: SweepRecord) -> None:
    trials = make_trials()
    trials[2] = again(trials[2], run_at(1500.0), OOM)
    summary = summarize(sweep, trials, None)
    failed = summary.rows[2]
    assert summary.best is not None
    assert (summary.best.trial, failed.failed_confirmation, failed.tokens_per_second) == (1, True, None)
    assert (failed.search_tokens_per_second, failed.shortfall_bytes) == (1510.0, 76 * MIB)
    assert (summary.fit, summary.out_of_memory) == (3, 3)
    line = "Trial 2 (lora8 z0 mb4) ran in the search but cannot win: out of device memory in backward, asked for"
    assert f"{line} 200.00 MiB, when measured again." in render_markdown(summary)


def test_an_unconfirmed_winner_is_said_to_be_one(sweep: SweepRecord) -> None:
    trials = make_trials()
    assert "Not confirmed: its tokens/s are the search's" in render_markdown(summarize(sweep, trials, None))
    running = sweep.model_copy(update={"state": SweepState.RUNNING})
    assert "Not confirmed" not in render_markdown(summarize(running, trials, None))


@pytest.mark.parametrize("state", [SweepState.STOPPED, SweepState.INTERRUPTED])
def test_a_sweep_that_was_stopped_says_what_is_not_confirmed(sweep: SweepRecord, state: SweepState) -> None:
    stopped, trials = sweep.model_copy(update={"state": state}), make_trials()
    assert "Not confirmed: its tokens/s are the search's" in render_markdown(summarize(stopped, trials, None))
    trials[2] = again(trials[2], run_at(1500.0))
    assert "The confirmation has not come to its end" in render_markdown(summarize(stopped, trials, None))
    assert "has not come to its end" not in render_markdown(summarize(sweep, trials, None))


def test_a_gain_over_a_baseline_that_was_not_measured_again_is_told_as_such(confirmed: Summary) -> None:
    assert "The baseline was not measured again: the gain is against its" in render_markdown(confirmed)
    trials = make_trials()
    trials[0] = again(trials[0], run_at(1000.0), run_at(1004.0))
    trials[2] = again(trials[2], run_at(1500.0), run_at(1504.0))
    assert "baseline was not measured again" not in render_markdown(summarize(confirmed.sweep, trials, None))


def test_a_baseline_that_wins_is_the_best_whatever_counts(sweep: SweepRecord) -> None:
    spec = {**sweep.spec, "objective": [{"metric": "peak_memory_bytes", "goal": "minimize"}]}
    baseline = trial(0, "full z0 mb1", run_at(12_345.6, 300 * MIB), is_baseline=True)
    faster = trial(1, "full z0 mb4", run_at(20_000.0))
    summary = summarize(sweep.model_copy(update={"spec": spec}), [baseline, faster], None)
    assert summary.winner_text == "trial 0 (full z0 mb1): 12,346 tokens/s; the baseline itself is the best."


def test_a_running_confirmation_leaves_the_trial_ended(sweep: SweepRecord) -> None:
    trials = make_trials()
    trials[2] = again(trials[2], run_at(1500.0), None)
    running = sweep.model_copy(update={"state": SweepState.RUNNING})
    row = summarize(running, trials, None).rows[2]
    assert (row.state, row.is_confirming, row.attempt, row.confirmation_runs) == ("done", True, 3, 1)
    assert not summarize(sweep, trials, None).rows[2].is_confirming


def test_thrashing_trials_are_marked_and_behind_the_others(sweep: SweepRecord) -> None:
    thrashing = trial(8, "full z2 mb4", run_at(2000.0, 1000 * MIB, Health.THRASHING), zero_stage=2)
    summary = summarize(sweep, [*make_trials(), thrashing], None)
    assert [row.trial for row in summary.ranked] == [2, 1, 0, 3, 8]
    text = render_markdown(summary)
    assert "Thrashing, so ranked behind the others: trial 8." in text
    assert "| 8 ! | full z2 mb4 |" in text


def test_trials_that_were_raced_out_are_told(sweep: SweepRecord) -> None:
    raced = trial(8, "full z2 mb2", Ok(measurement=measurement(300.0, 500 * MIB, raced_out=True)), zero_stage=2)
    summary = summarize(sweep, [*make_trials(), raced], None)
    assert (summary.rows[8].raced_out, summary.rows[8].summary) == (True, "ok, ended early: slower than the best")
    assert "1 trial ended early" in render_markdown(summary)


def test_an_export_states_the_confirmed_speed(sweep: SweepRecord) -> None:
    resolved = {"deepspeed": {}, "optimizer": {}}
    first = trial(0, "full", Ok(measurement=measurement(1500.0, 700 * MIB, resolved=resolved)))
    record = again(first, run_at(1400.0), run_at(1404.0, 710 * MIB))
    header = measured_trial(sweep, record, [record], None, "0.1.0").header()[1]
    assert header.startswith("Measured 1,402 tokens/s without padding (95 % interval ")
    assert "in 2 runs after the search) and a peak of 710.00 MiB of 1.00 GiB allowed" in header
