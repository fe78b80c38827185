"""The sweep as a pure state machine: events in, actions out, no clock, no disk, no threads.

The loop carries every action out before it brings the next event, and in the order given.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, assert_never

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.errors import EXIT_FAILED, EXIT_NOTHING_FITS, EXIT_OK
from orchestrator.contract.outcome import (
    INTERRUPTED_KINDS,
    Measurement,
    Ok,
    OverLimit,
    Rejected,
    retries_of,
)
from orchestrator.contract.record import AttemptRecord, Purpose, SweepState, TrialRecord
from orchestrator.spec.sweep import BudgetSection
from orchestrator.sweep.failure import FailureTally
from orchestrator.sweep.history import History
from orchestrator.sweep.line import Line
from orchestrator.sweep.messages import (
    EXIT_CODES,
    STOPPED_BY,
    Action,
    Ask,
    AttemptEnded,
    Cancel,
    Event,
    Finish,
    Launch,
    Proposed,
    StopAsked,
    StopCause,
    Store,
    Tell,
    Tick,
)
from orchestrator.sweep.stopping import Worth, budget_used_up, fastest_tokens_per_second, no_gain_left
from orchestrator.sweep.suspects import Suspects

FAILURES_IN_A_ROW = 3
"""A sweep whose first trials all fail with one and the same error ends after this many."""


class Efficiency(NamedTuple):
    """Model FLOPs utilisation, and hardware FLOPs utilisation (recomputation counted), as fractions."""

    mfu: float
    hfu: float


@dataclass(frozen=True)
class Setting:
    """What a session of the sweep is given. `efficiency`, `to_beat` and `confirm` are pure; `new_token` yields a unique
    word at each call."""

    budget: BudgetSection
    efficiency: Callable[[TrialConfig, Measurement], Efficiency | None]
    new_token: Callable[[], str]
    started_s: float
    elapsed_before_s: float = 0.0
    """Driver time of earlier sessions."""
    max_concurrent_trials: int | None = None
    left_out: int = 0
    """Candidates that are never proposed, because they surely do not fit."""
    worth: Worth = field(default_factory=Worth)
    to_beat: Callable[[TrialRecord, Iterable[TrialRecord]], float | None] = lambda record, records: None
    """Tokens/s below which a trial is not worth measuring any longer."""
    confirm: Callable[[Sequence[TrialRecord]], TrialRecord | None] = lambda records: None
    """The trial that is to be measured again next; asked when the search is over. This, `to_beat` and `kept_s` are
    given what `History.in_view` says is enough of the trials."""
    confirm_top: int = 0
    """How many of the best are measured again."""
    kept_s: Callable[[Sequence[TrialRecord]], float] = lambda records: 0.0
    """How long that takes in all; the search leaves it so much of its budgets."""


def is_final(record: TrialRecord) -> bool:
    """Whether the trial is over for good: it ended, and neither a retry nor a repeat on resume is due."""
    outcome = record.outcome
    if outcome is None or outcome.kind in INTERRUPTED_KINDS:
        return False
    retries = retries_of(outcome)
    ends = [each.outcome for each in record.searches if each.outcome is not None]
    alike = sum(end.kind == outcome.kind and retries_of(end) == retries for end in ends)
    return alike > retries and not record.searches[-1].is_tried_elsewhere


@dataclass(frozen=True)
class _Held:
    """A trial that was not worth its launch, and why, while the fastest was at `than_tokens_per_second`."""

    record: TrialRecord
    reason: str
    than_tokens_per_second: float | None


class SweepMachine:
    """Where the sweep stands. `handle` takes one event and returns what has to be done.

    `records` are those of earlier sessions. An attempt among them without an outcome counts as running until its
    `AttemptEnded` comes; a trial that is not final is run again before anything new is asked for.
    """

    def __init__(self, setting: Setting, records: Iterable[TrialRecord] = ()) -> None:
        self._setting = setting
        self._history = History(records, setting.worth.eval_loss_within, setting.confirm_top)
        self._running: dict[str, int] = {}
        self._line = Line()
        self._exhausted = False
        self._held: _Held | None = None
        self._stop: StopCause | None = None
        self._failure: str | None = None
        self._tally = FailureTally()
        self._suspects = Suspects(self._history)
        for record in self._history:
            if record.running is not None:
                self._running[record.running.token] = record.trial
            if is_final(record):
                self._count(record)
            elif record.running is None:
                self._line.join(record)
        self._kept_s = setting.kept_s(self._history.in_view())

    @property
    def records(self) -> list[TrialRecord]:
        """All trials in the order of their numbers."""
        return list(self._history)

    def attempted(self, token: str) -> TrialRecord | None:
        """The trial whose attempt `token` runs; None when none does."""
        trial = self._running.get(token)
        return self._history[trial] if trial is not None else None

    @property
    def avoid(self) -> frozenset[str]:
        """Nodes on which the next trial is not run."""
        return self._suspects.avoid(self._line.first)

    def avoid_for(self, record: TrialRecord) -> frozenset[str]:
        """Nodes on which this trial is not run."""
        return self._suspects.avoid(record)

    @property
    def running(self) -> frozenset[str]:
        """Tokens of the attempts that run."""
        return frozenset(self._running)

    @property
    def is_ending(self) -> bool:
        """Whether the sweep was stopped or failed and only waits for what runs."""
        return self._stop is not None or self._failure is not None

    def handle(self, event: Event) -> list[Action]:
        """What has to be done on `event`, in order."""
        match event:
            case Tick():
                return self._tick(event)
            case Proposed():
                return self._proposed(event)
            case AttemptEnded():
                return self._ended(event)
            case StopAsked(cause=cause):
                return self._stop_asked(cause)
            case _:
                assert_never(event)

    def _tick(self, tick: Tick) -> list[Action]:
        wants_more = self._wants_more(tick.now_s)

        def room_for(record: TrialRecord) -> bool:
            return tick.room_for(record) if tick.room_for is not None else tick.has_room

        if wants_more and self._below_concurrency():
            record = self._line.leave(room_for)
            if record is not None:
                return [self._launch(record, tick.now_s)]
            if tick.has_room and self._may_ask and self._line.is_open:
                return [Ask()]
        if wants_more or self._running:
            return []
        is_over = self.is_ending or bool(self._time_used_up(tick.now_s))
        due = None if is_over else self._setting.confirm(self._history.in_view())
        if due is not None:
            return [self._launch(due, tick.now_s, Purpose.CONFIRM)] if room_for(due) else []
        return [self._finish(tick.now_s)]

    def _wants_more(self, now_s: float) -> bool:
        if self.is_ending or self._time_used_up(now_s, self._kept_s):
            return False
        return bool(self._line) or self._may_ask

    @property
    def _may_ask(self) -> bool:
        return not (self._exhausted or self._held or self._trials_used_up())

    def _proposed(self, proposed: Proposed) -> list[Action]:
        candidate = proposed.candidate
        if candidate is None:
            self._exhausted = True
            return []
        record = TrialRecord(
            trial=self._history.next_number,
            candidate=candidate.id,
            label=candidate.label,
            is_baseline=candidate.is_baseline,
            config=candidate.config,
            expected_gain=proposed.expected_gain,
        )
        if proposed.rejected is not None:
            return self._reject(record, proposed.rejected, proposed.now_s)
        reason = "" if candidate.is_baseline else self._no_gain_left(record.expected_gain)
        if reason:
            self._held = _Held(record, reason, self._fastest())
            return []
        if not (proposed.has_room and self._line.passes(record)):
            self._line.join(record)
            return []
        return [self._launch(record, proposed.now_s)]

    def _no_gain_left(self, gain: float | None) -> str:
        return no_gain_left(self._setting.worth, self._history.in_view(), gain, self._history.median_trial_s)

    def _reconsider(self) -> None:
        """Where what still ran was faster than all before, the held trial is launched and the search goes on."""
        if self._held is None or self._fastest() == self._held.than_tokens_per_second:
            return
        record, self._held = self._held.record, None
        self._line.join(record)

    def _reject(self, record: TrialRecord, rejected: Rejected, now_s: float) -> list[Action]:
        """The record holds one attempt, which carries the outcome and took no time."""
        attempt = AttemptRecord(
            attempt=1, token=self._setting.new_token(), dispatched_s=now_s, ended_s=now_s, outcome=rejected
        )
        record = record.model_copy(update={"attempts": (attempt,)})
        self._history.put(record)
        return [Store(record), Tell(record)]

    def _launch(self, record: TrialRecord, now_s: float, purpose: Purpose = Purpose.SEARCH) -> Launch:
        is_search = purpose is Purpose.SEARCH
        if not record.attempts:
            # others may have started while it waited
            record = record.model_copy(update={"trial": self._history.next_number})
        attempt = AttemptRecord(
            attempt=len(record.attempts) + 1,
            token=self._setting.new_token(),
            purpose=purpose,
            beat_tokens_per_second=self._setting.to_beat(record, self._history.in_view()) if is_search else None,
            dispatched_s=now_s,
        )
        record = record.model_copy(update={"attempts": (*record.attempts, attempt)})
        self._history.put(record)
        self._running[attempt.token] = record.trial
        return Launch(record)

    def _ended(self, event: AttemptEnded) -> list[Action]:
        trial = self._running.pop(event.ended.token, None)
        if trial is None:
            return []
        record = self._suspects.judged(self._with_end(self._history[trial], event), self._history)
        self._history.put(record)
        if record.attempts[-1].purpose is Purpose.CONFIRM:
            return [Store(record)]
        if not is_final(record):
            self._line.join(record)
            return [Store(record)]
        self._count(record)
        self._kept_s = self._setting.kept_s(self._history.in_view())
        self._reconsider()
        return [Store(record), Tell(record), *self._stop_when_all_fail_alike()]

    def _with_end(self, record: TrialRecord, event: AttemptEnded) -> TrialRecord:
        outcome = event.ended.outcome
        measurement = outcome.measurement if isinstance(outcome, Ok | OverLimit) else None
        efficiency = self._setting.efficiency(record.config, measurement) if measurement else None
        shares = efficiency._asdict() if efficiency else {}
        attempt = record.attempts[-1].model_copy(
            update={
                "ended_s": event.now_s,
                "node": event.ended.node,
                "nodes": event.ended.nodes,
                "launch_overhead_s": event.launch_overhead_s,
                "outcome": outcome,
                **shares,
            }
        )
        is_search = attempt.purpose is Purpose.SEARCH
        attempts = (*record.attempts[:-1], attempt)
        return record.model_copy(update={"attempts": attempts, **(shares if is_search else {})})

    def _count(self, record: TrialRecord) -> None:
        """What was never launched says nothing about whether all trials fail alike."""
        if not isinstance(record.outcome, Rejected):
            self._tally.add(record)

    def _stop_when_all_fail_alike(self) -> list[Action]:
        if self.is_ending:
            return []
        self._failure = self._tally.common_failure(at_least=FAILURES_IN_A_ROW)
        return [Cancel(token) for token in self._running] if self._failure else []

    def _stop_asked(self, cause: StopCause) -> list[Action]:
        if self.is_ending:
            return []
        self._stop = cause
        return [Cancel(token) for token in self._running]

    def _finish(self, now_s: float) -> Finish:
        if self._stop is not None:
            return Finish(SweepState.STOPPED, STOPPED_BY[self._stop], EXIT_CODES[self._stop])
        failure = self._failure or self._tally.common_failure(at_least=1)
        if failure:
            return Finish(SweepState.FAILED, f"every trial failed alike: {failure}", EXIT_FAILED)
        is_feasible = any(isinstance(record.standing, Ok) for record in self._history)
        ended = self._trials_used_up() or self._time_used_up(now_s) or (self._held.reason if self._held else "")
        if not ended and not self._exhausted:
            ended = f"{self._time_used_up(now_s, kept_s=inf)}, the last of it kept for the confirmation"
        reason = ended or f"space exhausted: {self._all_tried}"
        return Finish(SweepState.FINISHED, reason, EXIT_OK if is_feasible else EXIT_NOTHING_FITS)

    def _fastest(self) -> float | None:
        return fastest_tokens_per_second(self._history.in_view(), self._setting.worth.eval_loss_within)

    def _below_concurrency(self) -> bool:
        most = self._setting.max_concurrent_trials
        return most is None or len(self._running) < most

    @property
    def _all_tried(self) -> str:
        rejected = self._history.rejected + self._setting.left_out
        but = f" but {rejected} that are predicted not to fit" if rejected else ""
        return f"all {self._history.launched + rejected} candidates were tried{but}"

    def _trials_used_up(self) -> str:
        """Says so when the budget forbids a trial that is not among the records; else empty."""
        trials = self._setting.budget.trials
        known = self._history.launched + self._line.new
        return f"budget used: {trials} trials" if trials is not None and known >= trials else ""

    def _time_used_up(self, now_s: float, kept_s: float = 0.0) -> str:
        """Says which part of the budget, less `kept_s`, forbids any more attempts; else empty."""
        setting = self._setting
        elapsed_s = setting.elapsed_before_s + now_s - setting.started_s
        used_s, widest = self._history.used_device_s(now_s), self._history.widest
        return budget_used_up(setting.budget, setting.worth.price, elapsed_s, used_s, kept_s, widest)
