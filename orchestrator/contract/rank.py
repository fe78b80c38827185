"""The words between whoever starts ranks and the rank processes: requests, reports and the template's line protocol.

A template (`python -m orchestrator.trial.template`) is a warm process that has imported the training libraries. It
reads one JSON request a line on standard input and writes one JSON reply a line on standard output:

    RankRequest  ->  RankStarted, and later RankExited for the same `token`
    KillRequest  ->  ends the rank and every process that came from it, then RankExited

It ends, with all that it started, when its standard input closes.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from orchestrator.contract.config import Frozen
from orchestrator.contract.outcome import Outcome


class RankRequest(Frozen):
    """Start one rank in a fresh fork. `directory` is the attempt's folder, holding `config.json`."""

    type: Literal["run"] = "run"
    token: str
    directory: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    environment: dict[str, str] = {}
    """Variables that are set in the rank beside the torchrun ones."""


class KillRequest(Frozen):
    """End the rank of `token` and everything it started, also what left its session."""

    type: Literal["kill"] = "kill"
    token: str


class RankReady(Frozen):
    """The template has finished its imports."""

    type: Literal["ready"] = "ready"
    pid: int
    imported_s: float


class RankStarted(Frozen):
    """The fork of `token` exists."""

    type: Literal["started"] = "started"
    token: str
    pid: int


class RankExited(Frozen):
    """The rank of `token` and everything it started are gone. `status` is the exit code, or minus the signal."""

    type: Literal["exited"] = "exited"
    token: str
    status: int
    leftovers: int = 0
    """Processes that the rank left behind and that had to be ended."""


TemplateRequest = Annotated[RankRequest | KillRequest, Field(discriminator="type")]
TEMPLATE_REQUEST: TypeAdapter[TemplateRequest] = TypeAdapter(TemplateRequest)
TemplateReply = Annotated[RankReady | RankStarted | RankExited, Field(discriminator="type")]
TEMPLATE_REPLY: TypeAdapter[TemplateReply] = TypeAdapter(TemplateReply)


class RankReport(Frozen):
    """What one rank has to say at its end, written to its report file by `orchestrator.trial.guard`."""

    rank: int
    time_s: float
    """Wall clock (time.time()) of the end."""
    outcome: Outcome
    is_consequence: bool = False
    """True: the error tells of a peer's end (a closed connection), not of a cause of its own."""


class Event(Frozen):
    """One line of `events.jsonl`, flushed at once, so that a killed trial still tells where it was."""

    event: Literal["phase", "step", "first_step", "probe", "eval"]
    time_s: float
    rank: int
    phase: str
    step: int | None = None
    """Optimizer steps since the start, the probe included."""
    tokens: int | None = None
    step_s: float | None = None
