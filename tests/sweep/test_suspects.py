"""A sweep over nodes some of which are bad: who is tried where, and how often."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakePool, FakeStrategy, candidate, new_ledger, ok, spec

from orchestrator.contract.outcome import Crashed, Infra, LostNode, Ok, Outcome, Phase, Preempted
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord
from orchestrator.placement.quarantine import excluded_nodes
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Ended, Launch
from orchestrator.sweep.suspects import Suspects

Story = Callable[[Launch, str], Outcome]
NODES = ("x", "y", "z")


class ThreeNodes(FakePool):
    """A pool of one trial at a time, on the first of three nodes that the launch does not avoid, else on the first."""

    def __init__(self, story: Story) -> None:
        super().__init__(self._ends)
        self._story = story
        self.placed: list[tuple[int, str]] = []

    def _node(self, launch: Launch) -> str:
        return next((node for node in NODES if node not in launch.avoid), NODES[0])

    def _ends(self, launch: Launch) -> Outcome:
        node = self._node(launch)
        self.placed.append((launch.config.knobs.micro_batch, node))
        return self._story(launch, node)

    def wait(self, timeout_s: float) -> list[Ended]:
        nodes = {token: self._node(launch) for token, (launch, _) in self.running.items()}
        return [Ended(ended.token, ended.outcome, nodes[ended.token]) for ended in super().wait(timeout_s)]


def sweep(home: Path, story: Story, trials: int = 4) -> tuple[SweepRecord, list[TrialRecord], ThreeNodes]:
    of, pool = spec(), ThreeNodes(story)
    ledger = new_ledger(home, of)
    strategy = FakeStrategy([candidate(micro_batch) for micro_batch in range(1, trials + 1)], ledger.read_trials())
    with ledger.lock():
        record = run_sweep(of, ledger, Services(pool=pool, strategy=strategy))
    told = [each.id for each, *_ in strategy.told]
    assert len(told) == len(set(told)), "a trial was told twice"
    return record, ledger.read_trials(), pool


def test_a_bad_node_is_left_after_two_failures_and_the_trials_run_elsewhere(tmp_path: Path) -> None:
    def story(launch: Launch, node: str) -> Outcome:
        bad = Infra(cause="the device reports a hardware error: ECC", node="x", blames="device")
        return bad if node == "x" else ok()

    record, trials, pool = sweep(tmp_path, story)
    assert record.state is SweepState.FINISHED
    assert [type(trial.outcome) for trial in trials] == [Ok] * 4
    assert pool.placed == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "y"), (4, "y")]
    assert [each.node for each in excluded_nodes(trials)] == ["x"]
    assert Suspects(trials).avoid() == {"x"}, "a resumed sweep knows it from the records"


def test_a_trial_that_takes_down_nodes_is_quarantined_after_the_second(tmp_path: Path) -> None:
    def story(launch: Launch, node: str) -> Outcome:
        return LostNode(node=node) if launch.config.knobs.micro_batch == 2 else ok()

    record, trials, pool = sweep(tmp_path, story)
    assert record.state is SweepState.FINISHED
    lethal = trials[1].outcome
    assert isinstance(lethal, Crashed)
    assert lethal.error == "quarantined: it took down 2 nodes (x, y) and is not run again"
    assert [node for micro_batch, node in pool.placed if micro_batch == 2] == ["x", "y"]
    assert [type(trial.outcome) for trial in trials if trial is not trials[1]] == [Ok] * 3
    assert excluded_nodes(trials) == (), "the trial is to blame, not the nodes"


def test_preemptions_do_not_send_a_trial_elsewhere(tmp_path: Path) -> None:
    left = [Preempted(node="x"), Preempted(node="x"), LostNode(node="x")]

    def story(launch: Launch, node: str) -> Outcome:
        return left.pop(0) if left else ok()

    _, trials, pool = sweep(tmp_path, story, trials=1)
    assert isinstance(trials[0].outcome, Ok)
    assert [node for _, node in pool.placed] == ["x", "x", "x", "y"]


@pytest.mark.parametrize(("is_own", "ends"), [(True, [Crashed]), (False, [Ok])])
def test_a_killed_rank_is_tried_once_on_another_node(tmp_path: Path, is_own: bool, ends: list[type]) -> None:
    """After trials have passed elsewhere: the first trial is made to run on y."""

    def story(launch: Launch, node: str) -> Outcome:
        if launch.config.knobs.micro_batch == 1:
            return ok() if node == "y" else Infra(cause="the template ended", node=node, blames="node")
        killed = Crashed(phase=Phase.INIT, rank=0, error="rank 0 was ended by SIGBUS", signal="SIGBUS", node=node)
        return killed if is_own or node == "x" else ok()

    _, trials, pool = sweep(tmp_path, story, trials=2)
    assert [type(trials[1].outcome)] == ends
    assert [node for micro_batch, node in pool.placed if micro_batch == 2] == ["x", "y"]
