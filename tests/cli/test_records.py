"""What the verbs say about records that fakes wrote, without a process or a trial."""

import json
from pathlib import Path

import pytest
from fakes import config, new_ledger, ok, oom, spec

from orchestrator.cli.live import LineView
from orchestrator.cli.output import Output
from orchestrator.cli.reading import show_best, show_status
from orchestrator.cli.reporting import show_report
from orchestrator.cli.results import ResultFiles, conclude
from orchestrator.contract.errors import UsageError
from orchestrator.contract.outcome import Cancelled, Diverged, Outcome, Phase
from orchestrator.contract.record import AttemptRecord, Purpose, SweepRecord, SweepState, TrialRecord
from orchestrator.spec.sweep import LimitsSection, SearchSection, TrackingSection
from orchestrator.sweep.ledger import Ledger


def record(trial: int, outcome: Outcome | None) -> TrialRecord:
    attempt = AttemptRecord(attempt=1, token=f"t{trial}", dispatched_s=1.0, outcome=outcome)
    built = config(micro_batch=trial + 1)
    return TrialRecord(
        trial=trial, candidate=built.candidate, label=f"mb{trial + 1}", config=built, attempts=(attempt,)
    )


def finished(home: Path, **sections: object) -> Ledger:
    """A sweep of one trial that fits."""
    ledger = new_ledger(home, spec(**sections))
    ledger.write_trial(record(0, ok()))
    ended = {"state": SweepState.FINISHED, "reason": "space exhausted", "exit_code": 0}
    ledger.write_sweep(SweepRecord.model_validate({**dict(ledger.read_sweep()), **ended}))
    return ledger


@pytest.mark.parametrize("damage", ["", "{", '{"name": 1}'])
def test_a_damaged_sweep_is_listed_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    finished(tmp_path)
    broken = new_ledger(tmp_path, spec(name="broken"))
    broken.sweep_file.write_text(damage)
    show_status(None, tmp_path, as_json=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("sweep: finished, 1/1 trials, 1 fit")
    assert second.startswith(f"broken: damaged, {broken.sweep_file} is damaged: ")
    show_status(None, tmp_path, as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["sweep"]["state"], rows["broken"]["state"]) == ("finished", "damaged")
    assert str(broken.sweep_file) in rows["broken"]["reason"]


def test_a_spec_that_no_longer_holds_is_damage_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = finished(tmp_path)
    ledger.write_sweep(ledger.read_sweep().model_copy(update={"spec": {"name": "sweep"}}))
    show_status(None, tmp_path, as_json=False)
    assert capsys.readouterr().out.startswith(f"sweep: damaged, {ledger.sweep_file} is damaged: spec: ")


def test_a_resumed_sweep_counts_on_and_tells_no_end_of_what_was_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = finished(tmp_path)
    ledger.write_trial(record(1, None))
    view = LineView(ledger, Output())
    view.sweep_changed(ledger.read_sweep().model_copy(update={"candidates": 4, "state": SweepState.RUNNING}))
    view.trial_changed(record(1, Cancelled()))
    assert capsys.readouterr().err == ""
    view.trial_changed(record(1, ok()))
    assert capsys.readouterr().err.startswith("[2/4] trial 1 mb2: ok, ")


def test_the_end_of_the_search_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = finished(tmp_path)
    ledger.write_trial(record(1, ok()))
    view = LineView(ledger, Output())
    view.sweep_changed(ledger.read_sweep().model_copy(update={"candidates": 2, "state": SweepState.RUNNING}))
    for trial in (0, 1):
        before = record(trial, ok())
        again = AttemptRecord(attempt=2, token=f"a{trial}", purpose=Purpose.CONFIRM, dispatched_s=2.0)
        view.trial_changed(before.model_copy(update={"attempts": (*before.attempts, again)}))
    assert capsys.readouterr().err.splitlines() == [
        "The search is over. The best run again, one at a time, before a winner is declared.",
        "Confirming the best: run 1 of 2 of trial 0 (mb1).",
        "Confirming the best: run 1 of 2 of trial 1 (mb2).",
    ]


def test_a_baseline_without_a_loss_is_warned_of_as_soon_as_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = spec(
        limits=LimitsSection(eval_loss_within=0.02),
        search=SearchSection(baseline={"micro_batch": 1}),
        measure={"quality": {"train_tokens": 1}},
    )
    ledger = new_ledger(tmp_path, of)
    view = LineView(ledger, Output())
    view.sweep_changed(ledger.read_sweep())
    view.trial_changed(record(0, oom()).model_copy(update={"is_baseline": True}))
    view.trial_changed(record(1, ok()))
    said = capsys.readouterr().err
    assert said.count("Warning: limits.eval_loss_within compares nothing: the baseline (trial 0) has no eval loss") == 1


def test_the_best_of_a_sweep_before_its_first_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = new_ledger(tmp_path, spec())
    ledger.write_trial(record(0, None))
    assert show_best("sweep", tmp_path, as_json=False) == 3
    assert capsys.readouterr().err == "No trial has ended yet.\n"


@pytest.mark.parametrize(
    ("tracking", "command"),
    [
        (TrackingSection(), "brimful ui"),
        (TrackingSection(enabled=False), "brimful report sweep"),
        (TrackingSection(uri="http://mlflow:5000"), "brimful report sweep"),
    ],
)
def test_what_comes_next_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tracking: TrackingSection, command: str
) -> None:
    ledger = finished(tmp_path, tracking=tracking)
    assert conclude(ledger, ResultFiles(tmp_path / "report.html", None), Output()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Next: {command} --home {tmp_path}"


@pytest.mark.parametrize(
    ("outcome", "advice"),
    [
        (Diverged(phase=Phase.FORWARD, step=1, evidence="loss is nan"), "brimful trials sweep"),
        (oom(), "raise limits.device_memory or widen search"),
    ],
)
def test_more_memory_is_advised_only_where_it_was_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: Outcome, advice: str
) -> None:
    ledger = new_ledger(tmp_path, spec())
    ledger.write_trial(record(0, outcome))
    ended = {"state": SweepState.FINISHED, "reason": "space exhausted", "exit_code": 3}
    ledger.write_sweep(SweepRecord.model_validate({**dict(ledger.read_sweep()), **ended}))
    assert conclude(ledger, ResultFiles(tmp_path / "report.html", None), Output()) == 3
    following = capsys.readouterr().out.splitlines()[-1]
    assert following.startswith("Next: brimful ")
    assert advice in following


@pytest.mark.parametrize("name", ["report.pdf", "report"])
def test_a_report_is_not_written_under_an_unknown_ending(tmp_path: Path, name: str) -> None:
    finished(tmp_path)
    with pytest.raises(UsageError, match=r"use \.md, \.html, \.json, \.txt, or say --format"):
        show_report("sweep", tmp_path, tmp_path / name, None, as_json=False)
    assert not (tmp_path / name).exists()
    show_report("sweep", tmp_path, tmp_path / name, "markdown", as_json=False)
    assert (tmp_path / name).read_text().startswith("# Sweep sweep")
