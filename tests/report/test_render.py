"""The report says the right things in every rendering."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from sweep_records import measurement, trial

from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Cancelled, Ok, OverLimit
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.contract.units import MIB
from orchestrator.report.html import render_html
from orchestrator.report.markdown import render_markdown
from orchestrator.report.summary import summarize
from orchestrator.report.terminal import render_terminal

GOLDEN = Path(__file__).parent / "golden"


def test_markdown_is_the_agreed_document(sweep: SweepRecord, trials: list[TrialRecord], facts: Facts) -> None:
    assert render_markdown(summarize(sweep, trials, facts)) == (GOLDEN / "report.md").read_text()


def test_winner_baseline_gain_and_tie(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    summary = summarize(sweep, trials, None)
    assert summary.best is not None
    assert (summary.best.trial, summary.best.baseline_speedup) == (2, pytest.approx(1.51))
    assert summary.best.not_distinguishable == (1,)
    assert (summary.fit, summary.out_of_memory, len(summary.ended)) == (4, 2, 7)


def test_nothing_fits_names_the_closest_and_what_they_lack(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    over = OverLimit(measurement=measurement(900.0, 1020 * MIB))
    limits = trials[0].config.limits.model_copy(update={"headroom_bytes": 20 * MIB})
    near = trial(8, "full z2 mb8", over)
    near = near.model_copy(update={"config": near.config.model_copy(update={"limits": limits})})
    summary = summarize(sweep, [*trials[4:6], near], None)
    assert summary.winner_text == "0 of 3 fit."
    assert [(row.trial, row.shortfall_bytes) for row in summary.closest] == [(8, 16 * MIB), (4, 76 * MIB)]


def test_before_the_first_end_nothing_is_counted(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    summary = summarize(sweep, trials[7:], None)
    assert summary.winner_text == "No trial has ended yet."
    assert "0 of 0" not in render_markdown(summary)


def test_a_cancelled_trial_is_still_to_come(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    summary = summarize(sweep, [*trials, trial(8, "full z2 mb8", Cancelled())], None)
    assert (len(summary.rows), len(summary.ended)) == (len(trials) + 1, 7)
    assert "cancelled" not in summary.counts


def test_a_pass_on_short_rows_is_labelled(sweep: SweepRecord) -> None:
    short = trial(0, "full", Ok(measurement=measurement(10.0, MIB, reaches_sequence_length=False)))
    assert "rows of that length were not tried" in render_markdown(summarize(sweep, [short], None))


def test_short_terminal_report_fits_eighty_columns(sweep: SweepRecord, trials: list[TrialRecord], facts: Facts) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_terminal(summarize(sweep, trials, facts), full=False))
    text = console.export_text()
    assert "700.00 MiB" in text
    assert "vs baseline" in text
    assert "\u2026" not in text


@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_narrow_terminal_shows_whole_cells(
    sweep: SweepRecord, trials: list[TrialRecord], facts: Facts, width: int
) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_terminal(summarize(sweep, trials, facts)))
    text = console.export_text()
    assert "configuration" in text
    assert "tokens/s" in text
    assert not re.search(r"MiB?\b(?<!MiB)", text)


def test_html_is_one_page_and_escapes_what_users_write(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    hostile = trials[0].model_copy(update={"label": "<script>alert(1)</script>"})
    page = render_html(summarize(sweep, [hostile, *trials[1:]], None))
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert 'src="http' not in page
    assert page.count('class="plotly-graph-div"') == 3


def test_row_is_plain_json_with_a_phase_for_every_outcome(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    rows = [json.loads(row.model_dump_json()) for row in summarize(sweep, trials, None).rows]
    oom, running = rows[4], rows[7]
    assert (oom["outcome"]["kind"], oom["outcome"]["phase"], oom["needed_bytes"]) == (
        "oom_device",
        "backward",
        1100 * MIB,
    )
    assert (oom["tokens_per_second"], oom["peak_memory_bytes"], oom["limit_bytes"]) == (None, None, 1024 * MIB)
    assert rows[0]["outcome"]["phase"] is None
    assert (running["state"], running["outcome"]) == ("interrupted", None)
    assert rows[2]["config"]["lora_rank"] == 8
