"""What the sweep's folder stores about the sweep and each trial: the ledger's records, and what reports are made of.

HOME/sweeps/NAME/sweep.json                       SweepRecord
HOME/sweeps/NAME/spec.yaml                        the spec as the user wrote it, with overrides in sweep.json
HOME/sweeps/NAME/facts.json                       orchestrator.contract.facts.Facts
HOME/sweeps/NAME/trials/0007/trial.json           TrialRecord, rewritten whole at every transition
HOME/sweeps/NAME/trials/0007/attempt-1/...        orchestrator.contract.handoff.AttemptFiles
"""

from enum import StrEnum

from pydantic import Field, JsonValue

from orchestrator.contract.config import Frozen, TrialConfig
from orchestrator.contract.outcome import INTERRUPTED_KINDS, RETRIED_KINDS, Measurement, Ok, Outcome, OverLimit


class SweepState(StrEnum):
    """Where a sweep stands. STOPPED: by the user, resumable; INTERRUPTED: its driver is gone without a word."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Purpose(StrEnum):
    """Why an attempt was launched: to find out about its candidate, or to measure one of the best again."""

    SEARCH = "search"
    CONFIRM = "confirm"


class AttemptRecord(Frozen):
    """One launch of a trial. Times are time.time() of the driver, in seconds."""

    attempt: int = Field(ge=1)
    token: str
    purpose: Purpose = Purpose.SEARCH
    beat_tokens_per_second: float | None = None
    """See `TrialConfig.beat_tokens_per_second`."""
    dispatched_s: float
    node: str | None = None
    nodes: tuple[str, ...] = ()
    """The node of each rank, in rank order; empty before the end, and in records from before they were kept."""
    ended_s: float | None = None
    launch_overhead_s: float | None = None
    """From dispatch to the start of the first training step."""
    outcome: Outcome | None = None
    is_tried_elsewhere: bool = False
    """A crash that may be the node's fault: it decides nothing, the next attempt goes to another node."""
    mfu: float | None = None
    hfu: float | None = None


class TrialRecord(Frozen):
    """One candidate and what became of it. Attempts of the search come first, and the last of them decides; `mfu` and
    `hfu` are its."""

    trial: int = Field(ge=0)
    candidate: str
    label: str
    is_baseline: bool = False
    config: TrialConfig
    expected_gain: float | None = None
    """What the strategy expected of it before the first launch, as a share of the best so far; None when unknown."""
    attempts: tuple[AttemptRecord, ...] = ()
    mfu: float | None = None
    hfu: float | None = None

    @property
    def searches(self) -> tuple[AttemptRecord, ...]:
        """Attempts of the search, in order."""
        return tuple(attempt for attempt in self.attempts if attempt.purpose is Purpose.SEARCH)

    @property
    def confirmations(self) -> tuple[AttemptRecord, ...]:
        """Attempts that measure the trial again before a winner is declared, in order."""
        return tuple(attempt for attempt in self.attempts if attempt.purpose is Purpose.CONFIRM)

    @property
    def running(self) -> AttemptRecord | None:
        """The attempt that has no outcome yet."""
        return self.attempts[-1] if self.attempts and self.attempts[-1].outcome is None else None

    @property
    def launch_config(self) -> TrialConfig:
        """What the last attempt is launched with: a confirmation measures speed and memory alone."""
        last, measure = self.attempts[-1], self.config.measure
        if last.purpose is Purpose.CONFIRM:
            measure = measure.model_copy(update={"quality": None})
        changes = {"beat_tokens_per_second": last.beat_tokens_per_second, "measure": measure}
        return self.config.model_copy(update=changes)

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the last attempt of the search; None while it runs or before the first."""
        searches = self.searches
        return searches[-1].outcome if searches else None

    @property
    def standing(self) -> Outcome | None:
        """What the trial counts as: the search's outcome, unless a confirmation failed for a reason of its own."""
        lost = (*RETRIED_KINDS, *INTERRUPTED_KINDS, "ok")
        ends = [attempt.outcome for attempt in self.confirmations if attempt.outcome is not None]
        failed = [outcome for outcome in ends if outcome.kind not in lost]
        return failed[0] if failed else self.outcome

    @property
    def measurement(self) -> Measurement | None:
        """The raw numbers of the search, when the trial ran to its end."""
        match self.outcome:
            case Ok(measurement=measurement) | OverLimit(measurement=measurement):
                return measurement
            case _:
                return None


class SweepRecord(Frozen):
    """The sweep itself. `spec` is the resolved spec; `spec_digest` its hash without name and description."""

    name: str
    sweep_id: str
    state: SweepState
    spec: dict[str, JsonValue]
    spec_digest: str
    spec_path: str
    overrides: tuple[str, ...] = ()
    created_s: float
    updated_s: float
    elapsed_s: float = 0.0
    """Driver time over all sessions, for the time budget."""
    pool: str = "ray"
    candidates: int = 0
    """Of the space, those in `left_out` too."""
    left_out: dict[str, int] = {}
    """How many are so sure not to fit that none is proposed, by what they would need most of. They have no record."""
    planned_tokens: int | None = None
    """Tokens without padding of the whole training that the spec plans."""
    reason: str = ""
    """Why it ended: budget used, space exhausted, no gain left, stopped, or the error that every trial met."""
    exit_code: int | None = None
    """Exit code of the command whose session ended last; None while one runs or when its driver vanished."""
    mlflow_run_id: str | None = None
    device_kind: str | None = None
    """The cluster's word for the devices that its trials run on; None where there was but one kind."""
    waits_for: str = ""
    """Which nodes the next trial waits for, in words; empty while there are enough."""
    driver_host: str | None = None
    driver_pid: int | None = None
