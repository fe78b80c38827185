"""What the report says about the sweep's price and its return, with and without a price and a planned length."""

import json

import pytest
from sweep_records import measurement, trial

from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Ok, Rejected
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord
from orchestrator.contract.units import MIB
from orchestrator.report.cost import cost_headline, cost_notes
from orchestrator.report.html import render_html
from orchestrator.report.markdown import render_markdown
from orchestrator.report.summary import summarize

PRICED = {"name": "quickstart", "resources": {"price_per_device_hour": 2.5, "currency": "EUR"}}


def planned(sweep: SweepRecord, tokens: int | None, spec: object = None) -> SweepRecord:
    return sweep.model_copy(update={"planned_tokens": tokens, "spec": spec or sweep.spec})


def test_without_a_plan_the_break_even_is_told(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    # 70 device-seconds; a token costs 1/1000 s with the baseline and 1/1510 s with the winner
    assert list(cost_headline(summarize(sweep, trials, None))) == [
        "The sweep took 0.0194 device-hours; what trial 2 saves against the baseline pays for that after 207,255 tokens"
        " of training."
    ]


def test_the_whole_training_is_priced_with_both(sweep: SweepRecord, trials: list[TrialRecord], facts: Facts) -> None:
    summary = summarize(planned(sweep, 3_600_000_000, PRICED), trials, facts)
    lines = [
        "Whole training of 3.6 billion tokens: 662h15m (662 device-hours, 1,655.63 EUR) with trial 2, 1000h00m"
        " (1,000 device-hours, 2,500.00 EUR) with the baseline.",
        "The sweep took 0.0194 device-hours / 0.049 EUR and saves 338 device-hours / 844.37 EUR in that training.",
    ]
    assert list(cost_headline(summary)) == lines
    markdown, page = render_markdown(summary), render_html(summary)
    assert all(line in markdown and line in page for line in lines)
    assert "It is predicted; nobody has run it." in markdown


def test_a_training_too_short_to_pay_is_told(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    lines = list(cost_headline(summarize(planned(sweep, 100_000), trials, None)))
    assert lines[0] == (
        "Whole training of 100,000 tokens: 1m06s (0.0184 device-hours) with trial 2, 1m40s (0.0278 device-hours) with"
        " the baseline."
    )
    assert lines[1] == (
        "The sweep took 0.0194 device-hours and saves 0.00938 device-hours in that training, less than it took: it pays"
        " from 207,255 tokens on."
    )


def test_a_baseline_that_wins_saves_nothing_against_itself(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    lines = list(cost_headline(summarize(planned(sweep, 100_000), trials[:1], None)))
    assert lines == [
        "Whole training of 100,000 tokens: 1m40s (0.0278 device-hours) with trial 0.",
        "The sweep took 0.00278 device-hours.",
    ]


def test_a_winner_that_is_slower_saves_nothing(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    """As when memory is the objective."""
    small = {"name": "quickstart", "objective": [{"metric": "peak_memory_bytes", "goal": "minimize"}]}
    slow = trial(1, "full z3 mb2", Ok(measurement=measurement(400.0, 500 * MIB)), zero_stage=3)
    lines = list(cost_headline(summarize(planned(sweep, None, small), [trials[0], slow], None)))
    assert lines == ["The sweep took 0.00556 device-hours and saves nothing."]


def test_a_sweep_that_runs_tells_so_far(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    running = sweep.model_copy(update={"state": SweepState.RUNNING})
    assert "The sweep took 0.0194 device-hours so far; what" in next(
        iter(cost_headline(summarize(running, trials, None)))
    )
    assert list(cost_headline(summarize(running, trials[7:], None))) == []


def test_what_was_not_launched_is_called_predicted(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    rejected = [trial(8 + n, "full z0 mb32", Rejected(probability_fits=0.01, bill={})) for n in range(2)]
    notes = list(cost_notes(summarize(sweep, [*trials, *rejected], None)))
    assert notes == [
        "Not launching 2 of the candidates saved about 0.00556 device-hours: predicted, each as long as a trial took in"
        " median."
    ]


def test_programs_read_the_same_account(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    summary = summarize(planned(sweep, 3_600_000, PRICED), trials, None)
    assert summary.best is not None
    cost = json.loads(summary.best.model_dump_json())["cost"]
    assert cost == json.loads(summary.cost.model_dump_json())
    assert cost["device_hours"] == pytest.approx(70 / 3600)
    assert cost["money"] == pytest.approx(2.5 * 70 / 3600)
    assert (cost["currency"], cost["planned_tokens"]) == ("EUR", 3_600_000)
    assert cost["baseline"] == {"training_s": 3600.0, "device_hours": 1.0, "money": 2.5}
    assert cost["saved_device_hours"] == pytest.approx(1 - 1 / 1.51)
    assert cost["break_even_tokens"] == pytest.approx(207_255, rel=1e-5)
