"""What the report says about the loss on held-out rows, and about who cannot win for it."""

import pytest
from sweep_records import make_facts, make_sweep, measurement, trial

from orchestrator.contract.outcome import Ok, OomDevice, Outcome, OverLimit, Phase
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import MIB
from orchestrator.report.markdown import render_markdown
from orchestrator.report.summary import Summary, summarize

OOM = OomDevice(phase=Phase.FORWARD, rank=0, evidence="DefaultCPUAllocator: can't allocate memory")


def ran(speed: float, loss: float | None) -> Ok:
    return Ok(measurement=measurement(speed, 500 * MIB, eval_loss=loss, eval_tokens=640, trained_tokens=20_480))


def summary_of(records: list[TrialRecord], within: float | None = 0.02) -> Summary:
    sweep = make_sweep()
    facts = make_facts()
    data = facts.data.model_copy(update={"eval_rows": 32, "eval_tokens": 672})
    spec = {**sweep.spec, "limits": {"eval_loss_within": within}}
    return summarize(sweep.model_copy(update={"spec": spec}), records, facts.model_copy(update={"data": data}))


def records(baseline: Outcome, *others: Outcome) -> list[TrialRecord]:
    ranks = ((4, "lora r4"), (16, "lora r16"), (64, "lora r64"))
    chosen = zip(ranks, others, strict=False)
    trials = [
        trial(number, label, outcome, method="lora", lora_rank=rank)
        for number, ((rank, label), outcome) in enumerate(chosen, start=1)
    ]
    return [trial(0, "full z0", baseline, is_baseline=True), *trials]


def test_a_trial_that_loses_too_much_is_ranked_behind_with_its_reason() -> None:
    summary = summary_of(records(ran(1000.0, 5.0), ran(3000.0, 5.205), ran(2000.0, 5.05), ran(1500.0, 4.5)))
    assert [row.trial for row in summary.ranked] == [2, 3, 0, 1]
    assert summary.best is not None
    assert (summary.best.trial, summary.best.baseline_speedup) == (2, 2.0)
    assert summary.ranked[-1].cannot_win == "eval loss 4.1 % above the baseline's"
    assert summary.rows[3].eval_loss_excess == pytest.approx(-0.1)
    text = render_markdown(summary)
    assert "eval loss | cannot win |" in text
    assert "5.2050 (+4.1 %) | eval loss 4.1 % above the baseline's |" in text
    assert "| 5.0000 | - |" in text
    assert (
        "1 trial fits but cannot win: limits.eval_loss_within allows 2 % above the baseline's eval loss; the fastest of"
        " them is trial 1 (lora r4), 3,000 tokens/s: eval loss 4.1 % above the baseline's."
    ) in text
    assert (
        "eval loss: mean cross-entropy on 32 held-out rows (672 tokens), in nats a token, after training on 20,480 "
        "tokens from the first weights on"
    ) in text


def test_a_trial_that_cannot_win_is_no_tie_of_the_winner() -> None:
    summary = summary_of(records(ran(1000.0, 5.0), ran(1001.0, 9.0), ran(1002.0, 5.0)))
    assert summary.best is not None
    assert summary.best.trial == 2
    assert summary.best.not_distinguishable == (0,)


def test_a_trial_that_was_raced_out_is_not_told_of_as_lossy() -> None:
    summary = summary_of(records(ran(1000.0, 5.0), ran(500.0, None)))
    text = render_markdown(summary)
    assert summary.ranked[-1].cannot_win == "slower than the best, no eval loss taken"
    assert "cannot win: limits" not in text


def test_without_a_limit_the_loss_is_shown_and_bars_nobody() -> None:
    summary = summary_of(records(ran(1000.0, 5.0), ran(3000.0, 9.0)), within=None)
    assert summary.best is not None
    assert summary.best.trial == 1
    assert "9.0000 (+80.0 %) | - |" in render_markdown(summary)


@pytest.mark.parametrize(
    ("baseline", "why"), [(OOM, "out of device memory in forward"), (ran(1000.0, None), "ok")], ids=["oom", "no loss"]
)
def test_a_baseline_without_a_loss_compares_nothing_and_says_so(baseline: Outcome, why: str) -> None:
    summary = summary_of(records(baseline, ran(3000.0, 9.0)))
    assert summary.best is not None
    assert summary.best.trial == 1
    assert (
        f"limits.eval_loss_within compares nothing: the baseline (trial 0) has no eval loss ({why}), so every trial "
        "that fits may win; give a baseline that runs."
    ) in render_markdown(summary)


def test_a_baseline_that_still_runs_is_no_reason_to_warn() -> None:
    pending = records(ran(1.0, 5.0), ran(3000.0, 9.0))
    attempt = pending[0].attempts[0].model_copy(update={"outcome": None})
    pending[0] = pending[0].model_copy(update={"attempts": (attempt,)})
    assert summary_of(pending).loss_warning == ""


def test_a_sweep_without_losses_says_nothing_of_them() -> None:
    summary = summarize(make_sweep(), records(ran(1.0, None)), None)
    assert "eval loss" not in render_markdown(summary)


def test_where_none_may_win_the_headline_says_why() -> None:
    over = ran(1000.0, 5.0).measurement
    summary = summary_of(records(OverLimit(measurement=over), ran(3000.0, 9.0)))
    assert summary.best is None
    assert summary.winner_text == ("1 of 2 fit, but none of them may win: eval loss 80.0 % above the baseline's.")
