"""Commands that run inside a Ray cluster as its jobs, over the dashboard's HTTP address."""

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from orchestrator.backends.ray_token import find_token, refused
from orchestrator.contract.errors import BrimfulError, ClusterUnreachableError, UsageError
from orchestrator.placement.jobs import JobEnd, JobRequest

Answer = TypeVar("Answer")

CONNECT_DEADLINE_S = 5.0
AWAY_DEADLINE_S = 120.0
_RETRY_FIRST_S, _RETRY_MOST_S = 0.5, 5.0
_POLL_S = 0.2
_SILENT_S = 20.0
"""A stream of a log that says nothing for this long is opened anew: its connection may be dead."""


@dataclass(frozen=True)
class JobOptions:
    """What `ray job submit` takes too. `headers` go with every request; `verify` is a CA file, or whether the
    certificate of an https address is checked. A dashboard that answered before is waited for `patience_s`."""

    headers: Mapping[str, str] = field(default_factory=dict)
    verify: str | bool = True
    patience_s: float = AWAY_DEADLINE_S


class RayJobs:
    """See `orchestrator.placement.jobs.ClusterJobs`: those of the cluster whose dashboard serves `url`.

    Raises ClusterUnreachableError, within seconds and with the mend, when it cannot be reached or refuses the token.
    """

    def __init__(self, url: str, options: JobOptions) -> None:
        logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)  # else it tells of each connection
        self.url = url.rstrip("/")
        token = find_token()
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        self._headers = {**bearer, **options.headers}
        self._verify = options.verify
        self._patience_s = options.patience_s
        self.sends_token_in_clear = bool(token) and _is_clear_to_others(url)
        self._require_reachable(has_sent="Authorization" in self._headers)
        self._client = self._connect()

    def submit(self, request: JobRequest) -> str:
        """Start the command; returns the job's id. Raises UsageError when the cluster refuses the request, and
        ClusterUnreachableError when the connection is lost meanwhile: then it may have started, or not."""
        runtime_env: dict[str, Any] = {}
        if request.working_dir is not None:
            runtime_env["working_dir"] = str(request.working_dir)
        if request.environment:
            runtime_env["env_vars"] = dict(request.environment)
        try:
            job: str = self._client.submit_job(
                entrypoint=shlex.join(request.command),
                submission_id=request.submission_id,
                runtime_env=runtime_env,
                metadata=dict(request.metadata),
                entrypoint_num_cpus=request.cpus,
                entrypoint_resources=dict(request.resources) or None,
            )
        except OSError as error:
            raise ClusterUnreachableError(
                f"the connection to the Ray dashboard at {self.url} was lost while the job was sent ({_cause(error)}); "
                "`ray job list` shows whether it started"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the cluster at {self.url} does not take the job: {_last_line(error)}") from error
        return job

    def newest(self, key: str, value: str) -> str | None:
        """Id of the newest job whose metadata hold `key: value`; None when there is none."""
        jobs: list[JobDetails] = self._asked(self._client.list_jobs)
        found = [job for job in jobs if (job.metadata or {}).get(key) == value and job.submission_id]
        newest = max(found, key=lambda job: job.start_time or 0, default=None)
        return newest.submission_id if newest else None

    def end(self, job: str) -> JobEnd | None:
        """How the job ended; None while it runs."""
        details: JobDetails = self._asked(lambda: self._client.get_job_info(job))
        if not JobStatus(details.status).is_terminal():
            return None
        return JobEnd(details.driver_exit_code, details.message or "")

    def log(self, job: str) -> str:
        """All that the job has printed, both streams as they came."""
        text: str = self._asked(lambda: self._client.get_job_logs(job))
        return text

    def lines(self, job: str) -> Iterator[str]:
        """What the job prints from its first line on, as it comes, until it ends. No line is lost or told twice, also
        when the connection is lost meanwhile: it begins anew and what was told is skipped."""
        told, rest, retry_s = 0, "", _RETRY_FIRST_S
        while True:
            try:
                position = 0
                for text in self._tail(job):
                    new = text[max(0, told - position) :]
                    position += len(text)
                    told = max(told, position)
                    *whole, rest = (rest + new).split("\n")
                    yield from whole
                    retry_s = _RETRY_FIRST_S
            except (RuntimeError, OSError, TimeoutError, aiohttp.ClientError):
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MOST_S)
            if self.end(job) is not None:
                yield from (rest + self.log(job)[told:]).splitlines()
                return

    def wait(self, job: str) -> JobEnd:
        """How the job ended, once it has."""
        while True:
            end = self.end(job)
            if end is not None:
                return end
            time.sleep(_POLL_S)

    def forget(self, job: str) -> None:
        """Remove a job that has ended from the cluster's list."""
        self._asked(lambda: self._client.delete_job(job))

    def _tail(self, job: str) -> Iterator[str]:
        """The job's log from its start on, in pieces, until the connection ends."""
        loop = asyncio.new_event_loop()
        pieces = self._client.tail_job_logs(job)
        try:
            while True:
                try:
                    yield loop.run_until_complete(asyncio.wait_for(anext(pieces), _SILENT_S))
                except StopAsyncIteration:
                    return
        finally:
            pending = asyncio.all_tasks(loop)  # after Ctrl-C: closing what still runs would raise in its place
            for task in pending:
                task.cancel()
            if pending:
                loop.run_until_complete(asyncio.wait(pending))
            loop.run_until_complete(pieces.aclose())
            loop.close()

    def _asked(self, question: Callable[[], Answer]) -> Answer:
        """The answer of a dashboard that may be away for a while."""
        since_s, retry_s = time.monotonic(), _RETRY_FIRST_S
        while True:
            try:
                return question()
            except OSError as error:
                if time.monotonic() - since_s > self._patience_s:
                    raise ClusterUnreachableError(
                        f"the Ray dashboard at {self.url} has not answered for {self._patience_s:.0f} s; "
                        "what runs in the cluster goes on"
                    ) from error
            except RuntimeError as error:
                raise BrimfulError(f"the Ray dashboard at {self.url} says: {_last_line(error)}") from error
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)

    def _require_reachable(self, has_sent: bool) -> None:
        scheme = urlsplit(self.url).scheme
        if scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ClusterUnreachableError(
                f"{self.url!r} is not the address of a Ray dashboard; write it like http://127.0.0.1:8265"
            )
        try:
            answer = requests.get(
                f"{self.url}/api/version", headers=self._headers, timeout=CONNECT_DEADLINE_S, verify=self._verify
            )
        except requests.RequestException as error:
            raise ClusterUnreachableError(
                f"the Ray dashboard at {self.url} cannot be reached ({_cause(error)}); check the address, and that the "
                "cluster runs with its dashboard (`ray start --head --dashboard-host=127.0.0.1`)"
            ) from error
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise refused(self.url, has_sent)
        if not answer.ok or "ray_version" not in answer.text:
            raise ClusterUnreachableError(f"what answers at {self.url} is not a Ray dashboard")

    def _connect(self) -> JobSubmissionClient:
        try:
            return JobSubmissionClient(self.url, headers=dict(self._headers), verify=self._verify)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterUnreachableError(
                f"the Ray dashboard at {self.url} cannot be used: {_last_line(error)}"
            ) from error


def _is_clear_to_others(url: str) -> bool:
    """Whether what is sent there crosses a network unencrypted."""
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname is None:
        return False
    try:
        return not ip_address(parts.hostname).is_loopback
    except ValueError:
        return parts.hostname != "localhost"


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _cause(error: Exception) -> str:
    """The innermost reason in words."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return getattr(cause, "strerror", None) or _last_line(error)[:200]
