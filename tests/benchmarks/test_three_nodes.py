"""The account of which node did what, and the real sweep over three nodes."""

from pathlib import Path

import pytest
from fakes import config, ok

from benchmarks import three_nodes
from benchmarks.three_nodes import NodeUse, misplaced, uses
from orchestrator.contract.record import AttemptRecord, SweepState, TrialRecord
from orchestrator.sweep.ledger import Ledger


def trial(number: int, nodes: tuple[str, ...], dispatched_s: float, ended_s: float) -> TrialRecord:
    attempt = AttemptRecord(
        attempt=1, token=f"t{number}", dispatched_s=dispatched_s, ended_s=ended_s, nodes=nodes, outcome=ok()
    )
    return TrialRecord(
        trial=number, candidate=f"c{number}", label="l", config=config(world_size=2), attempts=(attempt,)
    )


RECORDS = [
    trial(0, ("h#aaaaaa", "h#bbbbbb"), 0.0, 10.0),
    trial(1, ("h#aaaaaa", "h#bbbbbb"), 0.0, 20.0),
    trial(2, ("h#aaaaaa", "h#cccccc"), 10.0, 30.0),
]


def test_busy_time_is_counted_by_rank_and_shared_until_the_last_start() -> None:
    assert uses(RECORDS, slots=2) == [
        NodeUse("h#aaaaaa", 3, 50.0, 1.0),
        NodeUse("h#bbbbbb", 2, 30.0, 1.0),
        NodeUse("h#cccccc", 1, 20.0, 0.0),
    ]


def test_a_rank_that_was_seen_elsewhere_is_named() -> None:
    seen = {(0, 1, 0): "aaaaaa", (0, 1, 1): "cccccc"}
    assert misplaced(RECORDS, seen) == ["trial 0, rank 1: recorded on h#bbbbbb, seen on cccccc"]
    assert misplaced(RECORDS, {(0, 1, 0): "aaaaaa"}) == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.trains
def test_trials_over_two_of_three_nodes_keep_all_of_them_busy(ray_token: None, tmp_path: Path) -> None:
    witness, _ = three_nodes.sweep(tmp_path / "home", trials=4)
    ledger = Ledger(tmp_path / "home", three_nodes.NAME)
    records = ledger.read_trials()
    assert ledger.read_sweep().state is SweepState.FINISHED
    assert len(records) == 4
    assert misplaced(records, witness.seen) == []
    assert len(witness.seen) == 8
    used = uses(records, three_nodes.SLOTS)
    assert len(used) == three_nodes.NODES
    # three trials start at once and hold every device until the fourth starts
    assert min(each.share for each in used) > 0.9
    assert all(len(set(attempt.nodes)) == 2 for record in records for attempt in record.attempts)
