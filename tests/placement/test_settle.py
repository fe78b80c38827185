"""Which failure of a group decides, and what evidence it takes."""

import pytest
from pools.stub_template import ok

from orchestrator.contract.outcome import Crashed, Infra, OomDevice, OomHost, Outcome, Phase
from orchestrator.contract.rank import RankReport
from orchestrator.contract.settle import RankEnd, settle

OOM = OomDevice(phase=Phase.FORWARD, rank=1, evidence="Resource temporarily unavailable")
PEER_LOST = Crashed(phase=Phase.BACKWARD, rank=0, error="DistNetworkError: connection closed by peer")


def reported(rank: int, outcome: Outcome, time_s: float = 1.0, is_consequence: bool = False) -> RankEnd:
    report = RankReport(rank=rank, time_s=time_s, outcome=outcome, is_consequence=is_consequence)
    return RankEnd(rank=rank, status=1, order=rank, report=report)


def silent(rank: int, status: int, order: int = 0, **more: object) -> RankEnd:
    return RankEnd(rank=rank, status=status, order=order, phase=Phase.INIT, **more)  # type: ignore[arg-type]


def test_rank_0_speaks_for_a_group_that_ran() -> None:
    first, second = ok(), ok().model_copy(update={"health": "thrashing"})
    assert settle([reported(1, second), reported(0, first)]) == first


def test_the_first_cause_wins_over_an_earlier_consequence() -> None:
    ends = [reported(0, PEER_LOST, time_s=1.0, is_consequence=True), reported(1, OOM, time_s=2.0)]
    assert settle(ends) == OOM


def test_the_earlier_of_two_causes_wins() -> None:
    other = Infra(cause="the disk is full")
    assert settle([reported(0, other, time_s=2.0), reported(1, OOM, time_s=1.0)]) == OOM


def test_a_consequence_without_a_cause_is_told_as_it_is() -> None:
    ends = [reported(0, PEER_LOST, is_consequence=True), silent(1, -9, order=1, was_ended_by_group=True)]
    assert settle(ends) == PEER_LOST


def test_a_killed_peer_is_the_cause_and_never_out_of_memory_by_itself() -> None:
    outcome = settle([reported(0, PEER_LOST, is_consequence=True), silent(1, -9)])
    assert isinstance(outcome, Crashed)
    assert (outcome.rank, outcome.signal, outcome.phase) == (1, "SIGKILL", Phase.INIT)


def test_a_kill_with_a_cgroup_counter_is_out_of_host_memory() -> None:
    outcome = settle([silent(0, -9, oom_evidence="memory.events: oom_kill rose by 1")])
    assert outcome == OomHost(phase=Phase.INIT, rank=0, evidence="memory.events: oom_kill rose by 1")


def test_a_segfault_is_a_segfault_whatever_the_counter_says() -> None:
    outcome = settle([silent(0, -11, oom_evidence="oom_kill rose by 1")])
    assert isinstance(outcome, Crashed)
    assert outcome.signal == "SIGSEGV"


@pytest.mark.parametrize(("is_torn", "words"), [(False, "ended without a result"), (True, "a damaged result")])
def test_exit_0_without_a_whole_result_is_a_crash(is_torn: bool, words: str) -> None:
    outcome = settle([silent(0, 0, is_report_torn=is_torn, log_tail="the end")])
    assert isinstance(outcome, Crashed)
    assert words in outcome.error
    assert (outcome.exit_code, outcome.evidence) == (0, "the end")


def test_a_rank_that_failed_spoils_another_ones_success() -> None:
    outcome = settle([reported(0, ok()), silent(1, -9, order=1)])
    assert isinstance(outcome, Crashed)
    assert outcome.rank == 1
