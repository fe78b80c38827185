"""One attempt's ranks, from dispatch to the verified end of every process: watched, ended together, settled once."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import (
    Cancelled,
    Crashed,
    Hang,
    Infra,
    LostNode,
    OomHost,
    Outcome,
    Preempted,
    Timeout,
)
from orchestrator.contract.rank import RankRequest
from orchestrator.contract.settle import RankEnd, settle
from orchestrator.placement.environment import rank_environment
from orchestrator.placement.hosts import HostReply, RankBegan, RankEnded, RankFailed, RankHost
from orchestrator.placement.progress import Progress
from orchestrator.placement.stacks import LogMark, blame

PEER_GRACE_S = 0.5
"""How long the other ranks may still end by themselves after the first failure with a cause of its own."""
CONSEQUENCE_GRACE_S = 5.0
"""The same after a failure that only tells of a peer's end: the peer's own report is about to come."""
BEGIN_DEADLINE_S = 180.0
"""A template that has not started its rank after this time (imports take 7 to 11 s) is given up."""
STACK_WAIT_S = 1.0
KILL_AGAIN_S = 5.0
_LOG_TAIL_BYTES = 6000


@dataclass(frozen=True)
class Attempt:
    """What is run: `directory` holds `config.json`; the rank group meets at `master_addr:master_port`."""

    token: str
    directory: Path
    config: TrialConfig
    master_addr: str
    master_port: int


class Group:
    """Supervises one attempt. Call `start` once, then `poll` until it returns the outcome; never blocks.

    `hosts` holds one host for each rank, in rank order; they are free again when `poll` has returned the outcome.
    """

    def __init__(
        self, attempt: Attempt, hosts: Sequence[RankHost], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.attempt = attempt
        self.hosts = tuple(hosts)
        self._files = AttemptFiles(attempt.directory)
        self._clock = clock
        self._progress = Progress(self._files.events)
        self._ends: dict[int, RankEnd] = {}
        self._failed: dict[int, RankFailed] = {}
        self._verdict: Outcome | None = None
        self._kill_at_s: float | None = None
        self._was_killed = False
        self._started_s = 0.0
        self._complete_s: float | None = None
        self._silent_s: float | None = None
        self._logs: dict[int, LogMark] = {}

    def start(self) -> None:
        """Ask every host for its rank."""
        self._started_s = self._clock()
        config = self.attempt.config
        ranks_on = Counter(host.node for host in self.hosts)
        for rank, host in enumerate(self.hosts):
            host.submit(
                RankRequest(
                    token=self.attempt.token,
                    directory=str(self.attempt.directory),
                    rank=rank,
                    world_size=config.world_size,
                    # each template sees its own device alone, as device 0
                    local_rank=0,
                    master_addr=self.attempt.master_addr,
                    master_port=self.attempt.master_port,
                    environment=rank_environment(config.threads_per_rank, ranks_on[host.node], len(ranks_on) == 1),
                )
            )

    def end(self, outcome: Cancelled | Preempted) -> None:
        """End it, with this outcome."""
        self._end_now(outcome)

    def poll(self) -> Outcome | None:
        """Take in what happened; the outcome, stored in `outcome.json`, once no process is left."""
        now_s = self._clock()
        for rank, host in enumerate(self.hosts):
            for reply in host.replies():
                self._take(rank, reply, now_s)
        if len(self._ends) + len(self._failed) == len(self.hosts):
            return self._over()
        if self._kill_at_s is None:
            self._progress.read(now_s)
            self._watch(now_s)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill(now_s)
        return None

    @property
    def _running(self) -> list[int]:
        return [rank for rank in range(len(self.hosts)) if rank not in self._ends and rank not in self._failed]

    def _take(self, rank: int, reply: HostReply, now_s: float) -> None:
        if reply.token != self.attempt.token:
            return
        match reply:
            case RankBegan():
                self._progress.begin(rank, now_s)
            case RankFailed():
                self._failed[rank] = reply
                self._kill_within(PEER_GRACE_S, now_s)
            case RankEnded():
                self._rank_ended(rank, reply, now_s)

    def _rank_ended(self, rank: int, reply: RankEnded, now_s: float) -> None:
        self._progress.read(now_s)
        report = self._files.read_report(rank)
        end = RankEnd(
            rank=rank,
            status=reply.status,
            order=len(self._ends),
            report=report,
            is_report_torn=report is None and self._files.rank_report(rank).exists(),
            phase=self._progress.phase(rank),
            log_tail=self._log_tail(rank),
            was_ended_by_group=self._was_killed,
            oom_evidence=reply.oom_evidence,
        )
        self._ends[rank] = end
        if not end.has_succeeded:
            self._kill_within(CONSEQUENCE_GRACE_S if end.is_secondary else PEER_GRACE_S, now_s)

    def _watch(self, now_s: float) -> None:
        measure = self.attempt.config.measure
        late = [rank for rank in self._running if rank not in self._progress.ranks]
        if late:
            if now_s - self._started_s > BEGIN_DEADLINE_S:
                where = self.hosts[late[0]].node
                cause = f"rank {late[0]} did not start on node {where} within {BEGIN_DEADLINE_S:.0f} s"
                self._end_now(Infra(cause=cause, node=where, blames="node"))
            return
        if self._complete_s is None:
            # until then the first ranks had nobody to talk to: a cold template elsewhere may have taken a minute
            self._complete_s = now_s
        quietest = min(self._running, key=lambda rank: self._progress.ranks[rank].last_s)
        silent_s = now_s - max(self._progress.ranks[quietest].last_s, self._complete_s)
        if silent_s > measure.step_timeout_s:
            self._hang(silent_s, now_s)
        elif now_s - self._complete_s > measure.trial_timeout_s:
            self._end_now(Timeout(phase=self._progress.phase(quietest), elapsed_s=now_s - self._complete_s))

    def _hang(self, silent_s: float, now_s: float) -> None:
        """All ranks write their stacks before they are ended."""
        self._silent_s = silent_s
        for rank in self._running:
            self._logs[rank] = LogMark(self._files.rank_log(rank))
            self.hosts[rank].dump_stacks(self.attempt.token)
        self._kill_within(STACK_WAIT_S, now_s)

    def _kill_within(self, grace_s: float, now_s: float) -> None:
        kill_at_s = now_s + grace_s
        if self._kill_at_s is None or (kill_at_s < self._kill_at_s and not self._was_killed):
            self._kill_at_s = kill_at_s

    def _end_now(self, verdict: Outcome) -> None:
        if self._verdict is None:
            self._verdict = verdict
        self._kill_within(0.0, self._clock())

    def _kill(self, now_s: float) -> None:
        """Said again while ranks are left: on a bad network a call can be lost."""
        self._was_killed = True
        self._kill_at_s = now_s + KILL_AGAIN_S
        for rank in self._running:
            self.hosts[rank].kill(self.attempt.token)

    def _over(self) -> Outcome:
        outcome = self._verdict or self._hung() or self._surroundings() or self._settled()
        self._files.write_outcome(outcome)
        return outcome

    def _settled(self) -> Outcome:
        """What the ranks say, with the node of the one that decided by a cause of its own."""
        outcome = settle(list(self._ends.values()))
        match outcome:
            case Crashed(rank=int(rank)) if not self._ends[rank].is_secondary:
                return outcome.model_copy(update={"node": self.hosts[rank].node})
            case Infra():
                deciding = (end.rank for end in self._ends.values() if end.report and end.report.outcome == outcome)
                return outcome.model_copy(update={"node": self.hosts[next(deciding)].node})
            case _:
                return outcome

    def _hung(self) -> Outcome | None:
        if self._silent_s is None:
            return None
        stacks = {rank: log.read_on() for rank, log in self._logs.items()}
        rank = blame(sorted(self._logs, key=lambda rank: self._progress.ranks[rank].last_s), stacks)
        evidence = stacks[rank] or self._log_tail(rank)
        return Hang(phase=self._progress.phase(rank), rank=rank, silent_s=self._silent_s, evidence=evidence)

    def _surroundings(self) -> Outcome | None:
        """The outcome when a host broke: a lost node explains all else, the other causes only what has no report."""
        for rank, failed in self._failed.items():
            if failed.cause in ("node", "preempted"):
                return host_failure(failed, self.hosts[rank].node)
        own_cause = [end for end in self._ends.values() if end.report is not None and not end.has_succeeded]
        if any(not end.is_secondary for end in own_cause):
            return None
        for rank, failed in self._failed.items():
            if failed.cause == "host_memory":
                return OomHost(phase=self._progress.phase(rank), rank=rank, evidence=failed.evidence)
            return host_failure(failed, self.hosts[rank].node)
        return None

    def _log_tail(self, rank: int) -> str:
        try:
            with self._files.rank_log(rank).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _LOG_TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""


def host_failure(failed: RankFailed, node: str) -> LostNode | Preempted | Infra:
    """The outcome where the surroundings of a rank on `node` broke, host memory left aside."""
    if failed.cause == "node":
        return LostNode(node=node, evidence=failed.evidence)
    if failed.cause == "preempted":
        return Preempted(node=node, evidence=failed.evidence)
    blames: Literal["device", "node"] = "device" if failed.cause == "device" else "node"
    return Infra(cause=failed.evidence.splitlines()[0], evidence=failed.evidence, node=node, blames=blames)
