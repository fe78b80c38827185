"""The treaty about commands that run inside a cluster and outlive whoever asked for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class JobRequest:
    """A command to run. `working_dir` is uploaded and is its folder; `environment` must hold no secret: whoever may
    look at the cluster's jobs sees it. `cpus` and `resources` are held while it runs."""

    command: Sequence[str]
    working_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    submission_id: str | None = None
    cpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. `exit_code` None: it ended without one, `message` says why."""

    exit_code: int | None
    message: str


class ClusterJobs(Protocol):
    """The jobs of one cluster. Methods raise ClusterUnreachableError when it stays away."""

    sends_token_in_clear: bool
    """Whether the cluster's token crosses a network unencrypted."""

    def submit(self, request: JobRequest) -> str:
        """Start the command; returns the job's id. Raises UsageError when the cluster refuses the request."""

    def newest(self, key: str, value: str) -> str | None:
        """Id of the newest job whose metadata hold `key: value`; None when there is none."""

    def end(self, job: str) -> JobEnd | None:
        """How the job ended; None while it runs."""

    def log(self, job: str) -> str:
        """All that the job has printed, both streams as they came."""

    def lines(self, job: str) -> Iterator[str]:
        """What the job prints from its first line on, as it comes, until it ends; no line lost or told twice."""

    def wait(self, job: str) -> JobEnd:
        """How the job ended, once it has."""

    def forget(self, job: str) -> None:
        """Remove a job that has ended from the cluster's list."""
