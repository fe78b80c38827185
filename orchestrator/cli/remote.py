"""Verbs that are asked of a cluster from outside, through the HTTP address of its Ray dashboard."""

import base64
import getpass
import io
import json
import re
import shlex
import shutil
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import wiring
from orchestrator.cli.options import DEFAULT_REMOTE_HOME, PYTHON
from orchestrator.cli.relay import ANSWER_MARK, NOTHING_UPLOADED
from orchestrator.contract.errors import EXIT_INTERRUPTED, BrimfulError, ClusterUnreachableError, UsageError
from orchestrator.placement.jobs import ClusterJobs, JobRequest
from orchestrator.sweep.audit import SUBMITTER_VARIABLE

SWEEP_KEY = "brimful.sweep"
"""Metadata of the jobs that drive a sweep: its name."""
DRIVER_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": "30"}
"""Lines of a driver reach its log as they are said; and `ray job stop`, which sends SIGTERM, leaves it the time to end
its trials (ray/dashboard/modules/job/job_supervisor.py: 3 s without it)."""
_OUTPUT_OPTIONS = ("-o", "--output")


@dataclass(frozen=True)
class Remote:
    """A cluster as seen from outside. `home` is a folder that all of its nodes see; `python` runs Brimful there."""

    url: str
    home: str = DEFAULT_REMOTE_HOME
    python: str = PYTHON
    insecure: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    verify: str | bool = True

    def jobs(self, patience_s: float | None = None) -> ClusterJobs:
        """The cluster's jobs; warns when a token would travel in clear text."""
        if "://" not in self.url:
            raise UsageError(
                f"--address {self.url}: from outside a cluster is reached by its dashboard; write it like "
                "http://127.0.0.1:8265 (in the cluster itself the verb needs no --address)"
            )
        jobs = wiring.build_jobs(self.url, self.headers, self.verify, patience_s)
        if jobs.sends_token_in_clear and not self.insecure:
            print(
                f"Warning: the cluster's token travels to {self.url} in clear text; use https or a tunnel "
                "(ssh -L 8265:127.0.0.1:8265 HEAD), or say --insecure to be told no more.",
                file=sys.stderr,
            )
        return jobs

    def relay(self, mode: str, *words: str) -> list[str]:
        """The command that runs `words` in the cluster."""
        return [self.python, "-m", "orchestrator.cli.relay", mode, self.home, *words]


@dataclass(frozen=True)
class Answer:
    """What a verb in the cluster printed, and the files that it wrote."""

    exit_code: int
    stdout: str
    stderr: str
    files: bytes


def ask(jobs: ClusterJobs, remote: Remote, words: Sequence[str]) -> Answer:
    """Run a verb that answers, in the cluster, and wait for it."""
    job = jobs.submit(JobRequest(remote.relay("ask", *words), environment=_submitter()))
    end = jobs.wait(job)
    log = jobs.log(job)
    line = next((text for text in log.splitlines() if text.startswith(ANSWER_MARK)), None)
    if line is None:
        tail = "; ".join(log.strip().splitlines()[-3:]) or end.message
        raise BrimfulError(
            f"the cluster at {remote.url} gave no answer ({tail}); is Brimful installed there for {remote.python}?"
        )
    jobs.forget(job)
    answer = json.loads(line.removeprefix(ANSWER_MARK))
    return Answer(answer["exit_code"], answer["stdout"], answer["stderr"], base64.b64decode(answer["files"]))


def relayed(remote: Remote, arguments: Sequence[str]) -> int:
    """Run the command line `arguments` in the cluster; what it prints and writes comes back. Returns its exit code."""
    words, output = _without_output(arguments)
    if output is not None and output.is_dir() and any(output.iterdir()) and "--force" not in words:
        raise UsageError(f"{output} exists already; choose another with --output, or replace its files with --force")
    answer = ask(remote.jobs(), remote, words)
    sys.stderr.write(answer.stderr)
    sys.stdout.write(answer.stdout)
    for file in _unpacked(answer.files, output):
        print(f"Brought here: {file}", file=sys.stderr)
    return answer.exit_code


def driver_log(remote: Remote, name: str, follow: bool) -> int:
    """Print what the sweep's newest driver has said, from its first line on; with `follow` until it ends."""
    jobs = remote.jobs()
    job = jobs.newest(SWEEP_KEY, name)
    if job is None:
        raise UsageError(f"no job of the cluster at {remote.url} drives or drove a sweep named {name}")
    if not follow:
        sys.stdout.write(jobs.log(job))
        return 0
    return stream(jobs, job, remote, name)


def resume(remote: Remote, name: str, words: Sequence[str]) -> int:
    """Go on with a sweep of the cluster, and follow it. Returns its exit code."""
    jobs = remote.jobs()
    job = jobs.submit(drive_request(remote, name, NOTHING_UPLOADED, ["resume", *words]))
    return stream(jobs, job, remote, name)


def drive_request(remote: Remote, name: str, digest: str, words: Sequence[str]) -> JobRequest:
    """The job that drives the sweep `name` by `words`."""
    return JobRequest(
        remote.relay("drive", digest, *words),
        metadata={SWEEP_KEY: name},
        environment={**DRIVER_ENVIRONMENT, **_submitter()},
    )


def stream(jobs: ClusterJobs, job: str, remote: Remote, name: str) -> int:
    """Print what the job says until it ends; Ctrl-C leaves it running. Returns the exit code of its command."""
    try:
        for line in jobs.lines(job):
            print(line, flush=True)
    except KeyboardInterrupt:
        print(f"\nThe sweep goes on in the cluster. {next_steps(remote, name)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    end = jobs.wait(job)
    if end.exit_code is None:
        raise BrimfulError(f"the driver of {name} ended without an exit code: {end.message}")
    where = _where(remote, name)
    print(f"From here: brimful report {where} -o report.html; brimful export {where} -o FOLDER", file=sys.stderr)
    return end.exit_code


def next_steps(remote: Remote, name: str) -> str:
    """How to look at it again, and how to stop it."""
    where = _where(remote, name)
    return (
        f"Its output: brimful logs {where} --follow. Its state: brimful status {where}. To end it: brimful stop {where}"
    )


def watched(remote: Remote, name: str, arguments: Sequence[str], every_s: float) -> int:
    """Print the state of a sweep again and again until it has ended, through whatever happens to the connection."""
    stale: str | None = None
    seen = ""
    while True:
        try:
            answer = ask(remote.jobs(patience_s=every_s), remote, arguments)
            stale = None
            if answer.stdout != seen or answer.exit_code:
                sys.stdout.write(answer.stdout)
                sys.stdout.flush()
                sys.stderr.write(answer.stderr)
            seen = answer.stdout
            if answer.exit_code or not is_running(remote, name, every_s):
                return answer.exit_code
        except ClusterUnreachableError as error:
            if not seen:
                raise
            if stale is None:
                stale = time.strftime("%H:%M:%S")
                print(f"Stale since {stale}: {error}; still trying, Ctrl-C ends this.", file=sys.stderr)
        time.sleep(every_s)


def is_running(remote: Remote, name: str, patience_s: float) -> bool:
    """Whether a job of the cluster drives the sweep."""
    jobs = remote.jobs(patience_s)
    job = jobs.newest(SWEEP_KEY, name)
    return job is not None and jobs.end(job) is None


def _where(remote: Remote, name: str) -> str:
    home = "" if remote.home == DEFAULT_REMOTE_HOME else f" --remote-home {shlex.quote(remote.home)}"
    python = "" if remote.python == PYTHON else f" --remote-python {shlex.quote(remote.python)}"
    return f"{name} --address {remote.url}{home}{python}"


def parse_headers(text: str | None) -> dict[str, str]:
    """The headers of a JSON mapping. Raises UsageError."""
    if text is None:
        return {}
    try:
        return {str(name): str(value) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise UsageError('--headers: write a JSON mapping, like {"Cookie": "..."}') from error


def parse_verify(text: str) -> str | bool:
    """Whether certificates are checked, or the CA file that they are checked with."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _submitter() -> dict[str, str]:
    return {SUBMITTER_VARIABLE: f"{getpass.getuser()}@{socket.gethostname()}"}


def _without_output(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The words for the cluster, where a file or folder to write is its bare name, and where it goes here."""
    words, output = [], None
    rest = iter(arguments)
    for word in rest:
        option, has_value, value = word.partition("=")
        if re.fullmatch(r"-o[^=].*", word):
            option, has_value, value = "-o", "=", word[2:]
        if option not in _OUTPUT_OPTIONS:
            words.append(word)
            continue
        output = Path(value if has_value else next(rest, "")).absolute()
        words += [option, output.name]
    return words, output


def _unpacked(archive: bytes, output: Path | None) -> Iterator[Path]:
    """Bring the files here: what was to be called `output` goes there, anything else to the working directory."""
    if not archive:
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        try:
            tar.extractall(folder, filter="data")
        except tarfile.FilterError as error:
            raise BrimfulError(
                f"the cluster sent files that lead out of their folder; none is kept ({error})"
            ) from error
        for entry in sorted(Path(folder).iterdir()):
            target = output if output is not None and entry.name == output.name else Path(entry.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.is_dir():
                shutil.copytree(entry, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(entry, target)
            yield target
