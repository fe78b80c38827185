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
from orchestrator.contract.outcome import Measurement, Ok, Outcome, OverLimit


class SweepState(StrEnum):
    """Where a sweep stands. STOPPED: by the user, resumable; INTERRUPTED: its driver is gone without a word."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class AttemptRecord(Frozen):
    """One launch of a trial. Times are time.time() of the driver, in seconds."""

    attempt: int = Field(ge=1)
    token: str
    dispatched_s: float
    node: str | None = None
    ended_s: float | None = None
    launch_overhead_s: float | None = None
    """From dispatch to the start of the first training step."""
    outcome: Outcome | None = None


class TrialRecord(Frozen):
    """One candidate and what became of it. The last attempt decides."""

    trial: int = Field(ge=0)
    candidate: str
    label: str
    is_baseline: bool = False
    config: TrialConfig
    attempts: tuple[AttemptRecord, ...] = ()
    mfu: float | None = None
    hfu: float | None = None

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the last attempt; None while it runs or before the first."""
        return self.attempts[-1].outcome if self.attempts else None

    @property
    def measurement(self) -> Measurement | None:
        """The raw numbers, when the trial ran to its end."""
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
    reason: str = ""
    """Why it ended: budget used, space exhausted, stopped, or the error that every trial met."""
    exit_code: int | None = None
    """Exit code of the command whose session ended last; None while one runs or when its driver vanished."""
    mlflow_run_id: str | None = None
    driver_host: str | None = None
    driver_pid: int | None = None
