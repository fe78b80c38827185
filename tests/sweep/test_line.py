"""Trials of several sizes: one without room waits, later ones may pass it, and it is never starved."""

from pathlib import Path

import pytest
from fakes import FakePool, FakeStrategy, config, new_ledger, ok, spec

from orchestrator.contract.record import SweepState, TrialRecord
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import BudgetSection, ResourcesSection
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.line import LONGEST, Line
from orchestrator.sweep.loop import Services, run_sweep

DEVICES = 4


def trial(number: int, devices: int) -> TrialRecord:
    return TrialRecord(trial=number, candidate=f"c{number}", label="l", config=config(world_size=devices))


def line_of(*devices: int) -> Line:
    line = Line()
    for number, count in enumerate(devices):
        line.join(trial(number, count))
    return line


def leaves(line: Line, free_devices: int) -> int | None:
    record = line.leave(lambda waiting: waiting.config.world_size <= free_devices)
    return None if record is None else record.trial


def test_first_come_first_served_where_there_is_room() -> None:
    line = line_of(2, 1)
    assert [leaves(line, DEVICES) for _ in range(3)] == [0, 1, None]


def test_a_trial_without_room_is_overtaken_on_as_many_devices_as_it_needs_and_no_more() -> None:
    line = line_of(3, 1, 2, 1)
    assert [leaves(line, 2) for _ in range(3)] == [1, 2, None]
    assert leaves(line, 3) == 0
    assert leaves(line, 1) == 3


def test_a_new_trial_passes_under_the_same_rule() -> None:
    line = line_of(2)
    assert line.is_open
    assert line.passes(trial(5, 1))
    assert line.passes(trial(6, 1))
    assert not line.is_open
    assert not line.passes(trial(7, 1))


def test_nothing_is_asked_for_while_many_wait() -> None:
    assert line_of(*[4] * (LONGEST - 1)).is_open
    assert not line_of(*[4] * LONGEST).is_open


def sized(number: int, devices: int) -> Candidate:
    built = config(micro_batch=number + 1, world_size=devices)
    return Candidate(built.candidate, f"{devices} devices", built)


class CountingPool(FakePool):
    """Trials end as soon as they are waited for, one at a time, the one that began first."""

    def __init__(self) -> None:
        super().__init__(lambda launch: ok(), slots=DEVICES)
        self.most_devices = 0

    def wait(self, timeout_s: float) -> list:  # type: ignore[type-arg]
        self.most_devices = max(self.most_devices, DEVICES - self.free_slots)
        later = dict(list(self.running.items())[1:])
        self.running = dict(list(self.running.items())[:1])
        ended = super().wait(timeout_s)
        self.running |= later
        return ended


def run(home: Path, sizes: list[int]) -> tuple[CountingPool, Ledger]:
    of = spec("sizes", BudgetSection(trials=len(sizes)), resources=ResourcesSection(devices_per_trial=(1, 2, 4)))
    ledger, pool = new_ledger(home, of), CountingPool()
    strategy = FakeStrategy([sized(number, devices) for number, devices in enumerate(sizes)])
    with ledger.lock():
        assert run_sweep(of, ledger, Services(pool, strategy)).state is SweepState.FINISHED
    return pool, ledger


@pytest.mark.parametrize("sizes", [[1] * 3 + [4] + [1] * 20, [4, 1, 4, 1, 2, 4, 1, 1, 2, 4], [2, 1, 4, 4, 4, 4, 1, 1]])
def test_every_trial_runs_and_none_waits_for_more_than_its_own_devices(tmp_path: Path, sizes: list[int]) -> None:
    pool, ledger = run(tmp_path, sizes)
    launched = [launch.config for launch in pool.launched]
    order = [each.knobs.micro_batch - 1 for each in launched]
    assert sorted(order) == list(range(len(sizes)))
    for number, devices in enumerate(sizes):
        passed = [later for later in order[: order.index(number)] if later > number]
        assert sum(sizes[later] for later in passed) <= devices
    assert pool.most_devices == DEVICES
    records = ledger.read_trials()
    assert [record.trial for record in records] == list(range(len(sizes)))
    assert [record.config.knobs.micro_batch - 1 for record in records] == order
