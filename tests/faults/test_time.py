"""Equal seeds give equal sweeps, whether or not they are interrupted, and noise is not mistaken for a difference."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from faults.crash_session import Sessions, Strike
from faults.sweeps import assert_whole, records, session_at
from orchestrator.report.summary import summarize
from orchestrator.sweep.ledger import Ledger


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    with closing(Sessions()) as sessions:
        yield sessions


def table(home: Path) -> list[tuple[object, ...]]:
    """What became of each trial, in order, without times and tokens."""
    return [
        (each.trial, each.candidate, each.label, each.outcome.model_dump_json() if each.outcome else None)
        for each in records(home)
    ]


@pytest.mark.fault("J4", "J5")
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_equal_seeds_choose_alike_also_when_interrupted(sessions: Sessions, tmp_path: Path, sampler: str) -> None:
    """One trial at a time: a sweep, the same again, and one that is killed while its seventh trial runs."""
    options = {"sampler": sampler, "slots": 1, "seed": 5}
    first, again, broken, other = (tmp_path / name for name in ("first", "again", "broken", "other"))
    for home in (first, again):
        assert sessions.run(session_at(home, **options)) == [0]
    assert sessions.run(session_at(broken, **options, strike=Strike("after_launch", 7))) == [-signal.SIGKILL]
    assert len([each for each in records(broken) if each.outcome is not None]) == 6
    assert sessions.run(session_at(broken, **options)) == [0]
    assert_whole(broken, 12)
    assert table(first) == table(again) == table(broken)
    assert sessions.run(session_at(other, **(options | {"seed": 6}))) == [0]
    assert [row[1] for row in table(other)] != [row[1] for row in table(first)]


@pytest.mark.fault("J6")
def test_noise_is_no_difference(sessions: Sessions, tmp_path: Path) -> None:
    """Five percent of noise each way over neighbours 10 % apart: the best run again, and ties are told as ties."""
    assert sessions.run(session_at(tmp_path, top=3, noise=0.05)) == [0]
    ledger = Ledger(tmp_path, "sweep")
    summary = summarize(ledger.read_sweep(), ledger.read_trials(), None)
    assert summary.best is not None
    confirmed = [each for each in ledger.read_trials() if each.confirmations]
    assert len(confirmed) >= 3
    assert summary.best.trial in {each.trial for each in confirmed}
    assert all(len(each.confirmations) == 3 for each in confirmed)
