"""The supervision of a group over hosts that do what the test says, under a clock that the test moves."""

from pathlib import Path

import pytest
from pools.conformance import config
from pools.stub_template import ok

from orchestrator.contract.handoff import CONFIG_FILE, AttemptFiles, write_atomic
from orchestrator.contract.outcome import Cancelled, Crashed, Hang, Infra, LostNode, OomHost, Outcome, Phase, Timeout
from orchestrator.contract.rank import Event, RankReport, RankRequest
from orchestrator.placement.group import (
    BEGIN_DEADLINE_S,
    CONSEQUENCE_GRACE_S,
    KILL_AGAIN_S,
    PEER_GRACE_S,
    STACK_WAIT_S,
    Attempt,
    Group,
)
from orchestrator.placement.hosts import HostReply, RankBegan, RankEnded, RankFailed

PEER_LOST = Crashed(phase=Phase.BACKWARD, rank=0, error="connection closed by peer")
TOKEN = "token"


class Host:
    """A `RankHost` that remembers what it was asked."""

    address = "10.0.0.1"

    def __init__(self, node: str) -> None:
        self.node = node
        self.request: RankRequest | None = None
        self.kills = 0
        self.dumps = 0
        self.next: list[HostReply] = []

    def submit(self, request: RankRequest) -> None:
        self.request = request

    def kill(self, token: str) -> None:
        self.kills += 1

    def dump_stacks(self, token: str) -> None:
        self.dumps += 1

    def replies(self) -> list[HostReply]:
        ready, self.next = self.next, []
        return ready


class Stage:
    """A group of two ranks on two nodes."""

    def __init__(self, directory: Path, **measure: float) -> None:
        self.files = AttemptFiles(directory)
        settings = config(2, **measure)
        (directory / CONFIG_FILE).write_text(settings.model_dump_json())
        self.now_s = 100.0
        self.hosts = [Host("a"), Host("b")]
        attempt = Attempt(TOKEN, directory, settings, "10.0.0.1", 29500)
        self.group = Group(attempt, self.hosts, clock=lambda: self.now_s)
        self.group.start()

    def begin(self) -> None:
        for host in self.hosts:
            host.next.append(RankBegan(TOKEN, 1))
        assert self.group.poll() is None

    def event(self, rank: int, phase: Phase) -> None:
        event = Event(event="phase", time_s=0.0, rank=rank, phase=phase)
        with self.files.events.open("a") as file:
            file.write(event.model_dump_json() + "\n")

    def end(self, rank: int, status: int, outcome: Outcome | None = None, is_consequence: bool = False) -> None:
        if outcome is not None:
            report = RankReport(rank=rank, time_s=self.now_s, outcome=outcome, is_consequence=is_consequence)
            write_atomic(self.files.rank_report(rank), report.model_dump_json())
        self.hosts[rank].next.append(RankEnded(TOKEN, status))

    def after(self, seconds: float) -> Outcome | None:
        self.now_s += seconds
        return self.group.poll()

    @property
    def kills(self) -> list[int]:
        return [host.kills for host in self.hosts]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, step_timeout_s=10.0, trial_timeout_s=100.0)


def test_every_rank_is_told_where_the_group_meets(stage: Stage) -> None:
    requests = [host.request for host in stage.hosts]
    assert [(r.rank, r.world_size, r.master_addr, r.master_port) for r in requests if r is not None] == [
        (0, 2, "10.0.0.1", 29500),
        (1, 2, "10.0.0.1", 29500),
    ]


def test_an_outcome_is_stored_when_it_is_told(stage: Stage) -> None:
    stage.begin()
    stage.end(0, 0, ok())
    assert stage.after(0.1) is None
    stage.end(1, 0, ok())
    assert stage.after(0.1) == ok() == stage.files.read_outcome()


def test_a_failure_ends_the_others_within_a_second(stage: Stage) -> None:
    stage.begin()
    stage.end(1, -9)
    assert stage.after(0.0) is None
    assert stage.kills == [0, 0]
    stage.after(PEER_GRACE_S)
    assert stage.kills == [1, 0]
    stage.end(0, -9)
    outcome = stage.after(0.1)
    assert isinstance(outcome, Crashed)
    assert (outcome.rank, outcome.signal) == (1, "SIGKILL")


def test_a_consequence_gives_the_cause_time_to_be_told(stage: Stage) -> None:
    stage.begin()
    stage.end(0, 1, PEER_LOST, is_consequence=True)
    stage.after(PEER_GRACE_S)
    assert stage.kills == [0, 0]
    stage.end(1, -11)
    outcome = stage.after(0.1)
    assert isinstance(outcome, Crashed)
    assert outcome.signal == "SIGSEGV"


def test_a_consequence_whose_cause_stays_silent_is_not_waited_for(stage: Stage) -> None:
    stage.begin()
    stage.end(0, 1, PEER_LOST, is_consequence=True)
    stage.after(0.0)
    stage.after(CONSEQUENCE_GRACE_S)
    assert stage.kills == [0, 1]
    stage.end(1, -9)
    assert stage.after(0.1) == PEER_LOST


def test_a_lost_kill_is_said_again(stage: Stage) -> None:
    stage.begin()
    stage.group.end(Cancelled())
    stage.after(0.0)
    stage.after(KILL_AGAIN_S)
    assert stage.kills == [2, 2]


def test_the_quietest_rank_hangs_and_is_asked_for_its_stack(stage: Stage) -> None:
    stage.begin()
    stage.event(1, Phase.FORWARD)
    assert stage.after(1.0) is None
    stage.event(0, Phase.BACKWARD)
    assert stage.after(5.0) is None
    stage.files.rank_log(1).write_text("an earlier line\n")
    assert stage.after(5.5) is None
    with stage.files.rank_log(1).open("a") as log:
        log.write("File train.py, line 3 in forward")
    assert [host.dumps for host in stage.hosts] == [1, 1]
    assert stage.kills == [0, 0]
    stage.after(STACK_WAIT_S)
    assert stage.kills == [1, 1]
    for rank in (0, 1):
        stage.end(rank, -9)
    expected = Hang(phase=Phase.FORWARD, rank=1, silent_s=10.5, evidence="File train.py, line 3 in forward")
    assert stage.after(0.1) == expected


def test_a_rank_that_waits_in_a_collective_is_not_to_blame(stage: Stage) -> None:
    stage.begin()
    stage.event(1, Phase.FORWARD)
    assert stage.after(1.0) is None
    stage.event(0, Phase.BACKWARD)
    assert stage.after(0.0) is None
    assert stage.after(10.5) is None
    stage.files.rank_log(1).write_text("File site-packages/torch/distributed/distributed_c10d.py, line 9 in all_reduce")
    stage.after(STACK_WAIT_S)
    for rank in (0, 1):
        stage.end(rank, -9)
    outcome = stage.after(0.1)
    assert isinstance(outcome, Hang)
    assert (outcome.rank, outcome.phase) == (0, Phase.BACKWARD)


def test_the_wait_for_a_cold_peer_is_no_hang(stage: Stage) -> None:
    stage.hosts[0].next.append(RankBegan(TOKEN, 1))
    stage.after(0.0)
    stage.hosts[1].next.append(RankBegan(TOKEN, 2))
    assert stage.after(60.0) is None
    assert stage.after(9.0) is None
    assert [host.dumps for host in stage.hosts] == [0, 0]
    stage.after(2.0)
    assert [host.dumps for host in stage.hosts] == [1, 1]


def test_progress_is_no_hang_but_may_be_too_slow(stage: Stage) -> None:
    stage.begin()
    for _ in range(20):
        for rank in (0, 1):
            stage.event(rank, Phase.FORWARD)
        assert stage.after(5.0) is None
        assert stage.kills == [0, 0]
    stage.event(0, Phase.FORWARD)
    stage.event(1, Phase.FORWARD)
    stage.after(1.0)
    assert stage.kills == [1, 1]
    for rank in (0, 1):
        stage.end(rank, -9)
    assert stage.after(0.1) == Timeout(phase=Phase.FORWARD, elapsed_s=101.0)


def test_a_rank_that_never_begins_is_infra(stage: Stage) -> None:
    stage.hosts[0].next.append(RankBegan(TOKEN, 1))
    assert stage.after(BEGIN_DEADLINE_S + 1) is None
    for rank in (0, 1):
        stage.end(rank, -9)
    outcome = stage.after(0.1)
    assert isinstance(outcome, Infra)
    assert "rank 1 did not start on node b" in outcome.cause


@pytest.mark.parametrize(("cause", "kind"), [("node", LostNode), ("host_memory", OomHost), ("infra", Infra)])
def test_a_broken_host_explains_the_failure_of_its_peers(stage: Stage, cause: str, kind: type[Outcome]) -> None:
    stage.begin()
    stage.end(0, 1, PEER_LOST, is_consequence=True)
    stage.hosts[1].next.append(RankFailed(TOKEN, cause, "it broke"))  # type: ignore[arg-type]
    outcome = stage.after(0.1)
    assert isinstance(outcome, kind)
    assert outcome.evidence == "it broke"  # type: ignore[attr-defined]


def test_a_cause_of_the_candidate_wins_over_a_broken_host(stage: Stage) -> None:
    stage.begin()
    error = Crashed(phase=Phase.INIT, rank=0, error="ValueError: no")
    stage.end(0, 1, error)
    stage.hosts[1].next.append(RankFailed(TOKEN, "infra", "the template ended"))
    assert stage.after(0.1) == error.model_copy(update={"node": "a"})


def test_replies_about_another_attempt_are_dropped(stage: Stage) -> None:
    stage.begin()
    stage.hosts[0].next.append(RankEnded("an earlier token", 0))
    assert stage.after(PEER_GRACE_S) is None
    assert stage.after(PEER_GRACE_S) is None
    assert stage.kills == [0, 0]
