"""The driver: brings events to the state machine and carries its actions out."""

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from orchestrator.contract.config import Layout, TrialConfig
from orchestrator.contract.errors import BrimfulError, StateError, StoppedAtOnceError, StorageError
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Cancelled, Measurement, Outcome
from orchestrator.contract.record import SweepRecord, SweepState, TrialRecord
from orchestrator.placement.layouts import refused_layouts
from orchestrator.search.cost import price_of
from orchestrator.search.ranking import objective_values
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import STOP_BELOW_GAIN, SweepSpec
from orchestrator.sweep import messages, ports, state
from orchestrator.sweep.confirmation import next_confirmation, whole_confirmation_s
from orchestrator.sweep.disk import require_reserve
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.messages import StopCause
from orchestrator.sweep.racing import tokens_per_second_to_beat
from orchestrator.sweep.state import Efficiency, SweepMachine
from orchestrator.sweep.stopping import Worth

WAIT_S = 0.5
"""The longest that a stop request or a signal goes unseen."""
HEARTBEAT_S = 5.0
"""How often the sweep's record tells that its driver lives, and for how long it has."""


def _no_efficiency(config: TrialConfig, measurement: Measurement) -> Efficiency | None:
    return None


@dataclass
class Interrupt:
    """Set by signal handlers, read by the loop: assigning one attribute is all that a handler does."""

    cause: StopCause | None = None


@dataclass(frozen=True)
class Services:
    """What a sweep is run with. Whoever made them closes them after `run_sweep`, also after an error."""

    pool: ports.TrialPool
    strategy: ports.Strategy
    logs: Sequence[ports.RunLog] = ()
    gate: ports.Gate | None = None
    efficiency: Callable[[TrialConfig, Measurement], Efficiency | None] = _no_efficiency
    interrupt: Interrupt = field(default_factory=Interrupt)


def run_sweep(spec: SweepSpec, ledger: Ledger, services: Services) -> SweepRecord:
    """Run or resume the sweep to its end and return its record, `exit_code` included.

    The caller holds `ledger.lock()`, has written the sweep's record, and has given the strategy the ledger's trials.
    Raises UnplaceableError before the first trial when no trial could ever be placed, and ClusterUnreachableError
    when the cluster is lost; running trials are repeated on resume.
    """
    refused_layouts(spec.resources.layouts, services.pool.check)
    return _Driver(spec, ledger, services).run()


def launch_overhead_s(files: AttemptFiles, dispatched_s: float) -> float | None:
    """Seconds from dispatch until the last rank began its first training step; None when one never did.

    Also None when a node's clock stands before the driver's by more than that time.
    """
    first = {event.rank: event.time_s for event in reversed(files.read_events()) if event.event == "first_step"}
    overhead_s = max(first.values(), default=0.0) - dispatched_s
    return overhead_s if first and overhead_s >= 0 else None


def _candidate_of(record: TrialRecord) -> Candidate:
    return Candidate(record.candidate, record.label, record.config, record.is_baseline)


def _whole_outcome(files: AttemptFiles) -> Outcome | None:
    try:
        return files.read_outcome()
    except StateError:
        return None  # torn by the crash that ended the attempt: the attempt is run again


class _Driver:
    def __init__(self, spec: SweepSpec, ledger: Ledger, services: Services) -> None:
        self._spec = spec
        self._ledger = ledger
        self._services = services
        self._started_s = time.time()
        self._sweep = ledger.read_sweep()
        self._previous_updated_s = self._sweep.updated_s
        self._elapsed_before_s = self._sweep.elapsed_s
        setting = state.Setting(
            budget=spec.budget,
            efficiency=services.efficiency,
            new_token=lambda: uuid.uuid4().hex,
            started_s=self._started_s,
            elapsed_before_s=self._elapsed_before_s,
            max_concurrent_trials=spec.resources.max_concurrent_trials,
            left_out=sum(self._sweep.left_out.values()),
            worth=Worth(
                price=price_of(spec.resources),
                stop_below_gain=spec.search.stop_below_gain if spec.search is not None else STOP_BELOW_GAIN,
                planned_tokens=self._sweep.planned_tokens,
                eval_loss_within=spec.limits.eval_loss_within,
            ),
            to_beat=partial(tokens_per_second_to_beat, spec),
            confirm=self._confirmation_due,
            confirm_top=spec.measure.confirm.top,
            kept_s=self._confirmation_s,
        )
        self._machine = SweepMachine(setting, ledger.read_trials())
        self._finish: messages.Finish | None = None

    def run(self) -> SweepRecord:
        holder = self._ledger.holder()
        self._write_sweep(
            state=SweepState.RUNNING,
            reason="",
            exit_code=None,
            driver_host=holder.host if holder else None,
            driver_pid=holder.pid if holder else None,
        )
        self._announce_sweep()
        try:
            self._end_attempts_of_dead_drivers()
            while self._finish is None:
                self._round()
        except BrimfulError as error:
            self._break_off(SweepState.INTERRUPTED, str(error), error.exit_code)
            raise
        except KeyboardInterrupt:
            cause = self._services.interrupt.cause or StopCause.INTERRUPT
            text = f"{messages.STOPPED_BY[cause]}, at once"
            self._break_off(SweepState.STOPPED, text, messages.EXIT_CODES[cause])
            raise StoppedAtOnceError(f"Sweep {self._ledger.name}: {text}.", messages.EXIT_CODES[cause]) from None
        self._write_sweep(state=self._finish.state, reason=self._finish.reason, exit_code=self._finish.exit_code)
        self._announce_sweep()
        return self._sweep

    def _break_off(self, state: SweepState, reason: str, exit_code: int) -> None:
        """Leave records that say what is so, as far as the disk takes them: nothing runs once the pool is closed.

        The machine may be in the midst of something: only the records are relied upon.
        """
        with suppress(StorageError):
            for record in self._ledger.read_trials():
                last = record.running
                if last is None or _whole_outcome(self._ledger.attempt(record.trial, last.attempt)) is not None:
                    continue
                ended = last.model_copy(update={"ended_s": time.time(), "outcome": Cancelled()})
                self._store(record.model_copy(update={"attempts": (*record.attempts[:-1], ended)}))
            self._write_sweep(state=state, reason=reason, exit_code=exit_code)
        self._announce_sweep()

    def _round(self) -> None:
        """Hear of stops, start what there is room for, then wait for ends."""
        if self._services.interrupt.cause is not None:
            self._handle(messages.StopAsked(self._services.interrupt.cause))
        elif self._ledger.stop_requested():
            self._handle(messages.StopAsked(StopCause.STOP))
        require_reserve(self._ledger.folder)
        hear_again_s = time.monotonic() + WAIT_S
        while is_busy := self._tick():
            if self._finish is not None:
                return
            if time.monotonic() >= hear_again_s:
                break  # candidates may be rejected for long
        for ended in self._services.pool.wait(0.0 if is_busy else WAIT_S):
            self._handle_end(ended)
        self._tell_waiting()
        if time.time() - self._sweep.updated_s >= HEARTBEAT_S:
            self._write_sweep()

    def _tick(self) -> bool:
        """Let the machine look at the time and the room; True when it did something and may do more."""
        has_room = any(self._has_room(layout, self._machine.avoid) for layout in self._spec.resources.layouts)
        return self._handle(messages.Tick(time.time(), has_room, self._room_for))

    def _room_for(self, record: TrialRecord) -> bool:
        return self._has_room(record.config.layout, self._machine.avoid_for(record))

    def _has_room(self, layout: Layout, avoid: frozenset[str]) -> bool:
        return self._services.pool.has_room(layout.world_size, avoid, layout.nodes)

    def _tell_waiting(self) -> None:
        """Let everyone see what the sweep waits for, once whenever it changes."""
        waits_for = self._services.pool.waits_for()
        if waits_for != self._sweep.waits_for:
            self._write_sweep(waits_for=waits_for)
            self._announce_sweep()

    def _handle_end(self, ended: ports.Ended, ended_s: float | None = None) -> None:
        record = self._machine.attempted(ended.token)
        if record is None:
            return
        last = record.attempts[-1]
        files = self._ledger.attempt(record.trial, last.attempt)
        overhead_s = launch_overhead_s(files, last.dispatched_s)
        self._handle(messages.AttemptEnded(ended, ended_s or time.time(), overhead_s))

    def _end_attempts_of_dead_drivers(self) -> None:
        """An attempt that left its whole outcome counts; any other is cancelled, to be run again.

        Its end is the time of the outcome file, or the last sign of life of its driver.
        """
        for record in self._machine.records:
            last = record.running
            if last is None:
                continue
            files = self._ledger.attempt(record.trial, last.attempt)
            outcome = _whole_outcome(files)
            ended_s = files.outcome.stat().st_mtime if outcome else max(last.dispatched_s, self._previous_updated_s)
            self._handle_end(ports.Ended(last.token, outcome or Cancelled()), ended_s)

    def _handle(self, event: messages.Event) -> bool:
        actions = self._machine.handle(event)
        for action in actions:
            self._carry_out(action)
        return bool(actions)

    def _carry_out(self, action: messages.Action) -> None:
        match action:
            case messages.Ask():
                self._handle(self._proposed())
            case messages.Launch(record=record):
                self._launch(record)
            case messages.Cancel(token=token):
                self._services.pool.cancel(token)
            case messages.Store(record=record):
                self._store(record)
            case messages.Tell(record=record):
                self._tell(record)
            case messages.Finish():
                self._finish = action

    def _proposed(self) -> messages.Proposed:
        strategy, gate = self._services.strategy, self._services.gate
        candidate = strategy.ask()
        gain = strategy.expected_gain()
        rejected = gate.judge(candidate) if gate is not None and candidate is not None else None
        has_room = candidate is not None and self._has_room(candidate.config.layout, self._machine.avoid)
        return messages.Proposed(candidate, time.time(), rejected, gain, has_room)

    def _confirmation_s(self, records: Sequence[TrialRecord]) -> float:
        spec = self._spec
        return whole_confirmation_s(spec.objective, spec.measure.confirm, records, spec.limits.eval_loss_within)

    def _confirmation_due(self, records: Sequence[TrialRecord]) -> TrialRecord | None:
        spec = self._spec
        due = next_confirmation(spec.objective, spec.measure.confirm, records, spec.limits.eval_loss_within)
        return due.record if due is not None else None

    def _launch(self, record: TrialRecord) -> None:
        self._store(record)
        files = self._ledger.prepare_attempt(record)
        avoid = self._machine.avoid_for(record)
        token, config = record.attempts[-1].token, record.launch_config
        self._services.pool.launch(ports.Launch(token, files.directory, config, avoid))

    def _store(self, record: TrialRecord) -> None:
        self._ledger.write_trial(record)
        for log in self._services.logs:
            log.trial_changed(record)

    def _tell(self, record: TrialRecord) -> None:
        outcome = record.outcome
        assert outcome is not None, "only final trials are told"
        self._services.strategy.tell(_candidate_of(record), outcome, objective_values(self._spec.objective, record))
        if self._services.gate is not None:
            self._services.gate.learn(record)

    def _write_sweep(self, **changes: object) -> None:
        now_s = time.time()
        elapsed_s = self._elapsed_before_s + now_s - self._started_s
        self._sweep = self._sweep.model_copy(update={**changes, "updated_s": now_s, "elapsed_s": elapsed_s})
        self._ledger.write_sweep(self._sweep)

    def _announce_sweep(self) -> None:
        for log in self._services.logs:
            log.sweep_changed(self._sweep)
