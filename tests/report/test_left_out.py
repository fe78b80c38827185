"""Candidates that surely do not fit have no record, and are counted all the same."""

from orchestrator.contract.outcome import Phase, Rejected
from orchestrator.contract.record import AttemptRecord, SweepRecord, TrialRecord
from orchestrator.report.summary import summarize
from orchestrator.report.tables import headline, rejected_table


def test_they_count_beside_those_that_were_judged_one_by_one(sweep: SweepRecord, trials: list[TrialRecord]) -> None:
    stored = SweepRecord.model_validate_json(
        sweep.model_copy(
            update={"candidates": 5000, "left_out": {"logits in backward": 3980, "activations in forward": 20}}
        ).model_dump_json()
    )
    assert stored.left_out == {"logits in backward": 3980, "activations in forward": 20}
    outcome = Rejected(
        probability_fits=0.01, bill={"logits": 900}, phase=Phase.BACKWARD, needed_bytes=900, capacity_bytes=800
    )
    attempt = AttemptRecord(attempt=1, token="t", dispatched_s=1.0, ended_s=1.0, outcome=outcome)
    judged = trials[0].model_copy(update={"trial": 99, "attempts": (attempt,), "is_baseline": False})
    without = summarize(sweep, [*trials, judged], None)
    summary = summarize(stored, [*trials, judged], None)
    assert summary.not_launched == without.not_launched + 4000 == len(summary.rejected) + 4000
    told = "\n".join(headline(summary))
    assert f"{summary.not_launched} candidates are predicted not to fit and not launched" in told
    table = rejected_table(summary)
    assert table.title.startswith(f"{summary.not_launched} candidates")
    assert table.title.endswith(f"; the nearest {len(table.rows)}")
    assert not rejected_table(without).title.endswith(f"the nearest {len(table.rows)}")
