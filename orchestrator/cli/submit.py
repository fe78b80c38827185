"""`submit`: a sweep that runs inside a cluster, whatever becomes of the machine that sent it."""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.cli.output import Output
from orchestrator.cli.package import SPEC_FILE, stage
from orchestrator.cli.remote import Remote, drive_request, next_steps, stream
from orchestrator.contract.errors import UsageError
from orchestrator.contract.units import format_bytes
from orchestrator.spec.load import load_spec

_SHOWN_LEFT_OUT = 5
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)
"""An address with a password in it."""
_USED_SECRETS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
)  # fmt: skip
"""Variables that Brimful's libraries read, here as well as in the cluster."""


@dataclass(frozen=True)
class Submission:
    """What the command line says beside the spec. `words` are those for `brimful run`; the others are those of
    `ray job submit`."""

    words: tuple[str, ...]
    environment: tuple[str, ...]
    wait: bool
    as_json: bool
    allow_remote_code: bool
    working_dir: Path | None = None
    submission_id: str | None = None
    cpus: float | None = None
    resources: str | None = None
    with_files: bool = True


def submit_spec(path: Path, overrides: Sequence[str], remote: Remote, submission: Submission) -> int:
    """Send the spec at `path` and its files to the cluster and follow its driver. Returns the driver's exit code, or 0
    once it is sent where nobody waits."""
    loaded = load_spec(path, overrides, submission.allow_remote_code, for_elsewhere=True)
    if any(_SECRET_VALUE.search(text) for text in (loaded.text, *overrides)):
        raise UsageError(
            f"{path}: an address holds a password, which everyone who may look at the cluster would see; write the "
            "address without it, and set what it stands for (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD) "
            "where the cluster's nodes are started"
        )
    name = loaded.spec.name
    environment = plain_environment(submission.environment)
    resources = _resources(submission.resources)
    output = Output(submission.as_json)
    jobs = remote.jobs()
    with tempfile.TemporaryDirectory(prefix="brimful-submit-") as folder:
        package = stage(loaded, submission.working_dir, Path(folder), submission.with_files)
        if package.left_out:
            shown = ", ".join(package.left_out[:_SHOWN_LEFT_OUT])
            more = f" and {len(package.left_out) - _SHOWN_LEFT_OUT} more" * (len(package.left_out) > _SHOWN_LEFT_OUT)
            output.say(f"Not sent, since it may hold secrets or is no plain file of the folder: {shown}{more}.")
        request = drive_request(remote, name, package.digest, ["run", SPEC_FILE, *package.overrides, *submission.words])
        job = jobs.submit(
            replace(
                request,
                working_dir=package.folder,
                environment={**request.environment, **environment},
                submission_id=submission.submission_id,
                cpus=submission.cpus,
                resources=resources,
            )
        )
    output.say(
        f"Sent {format_bytes(package.size_bytes)}: job {job} drives sweep {name} in the cluster at {remote.url}."
    )
    if secrets := [variable for variable in _USED_SECRETS if os.environ.get(variable)]:
        output.say(f"Not sent: {', '.join(secrets)}; if the sweep needs them, set them where the nodes are started.")
    output.say(f"It goes on when this command ends. {next_steps(remote, name)}")
    if not submission.wait or submission.as_json:
        output.document({"name": name, "job": job, "address": remote.url, "remote_home": remote.home})
        return 0
    return stream(jobs, job, remote, name)


def plain_environment(words: Sequence[str]) -> dict[str, str]:
    """Variables of `--env NAME=VALUE`. Raises UsageError for one that looks like a secret: a job's variables are
    shown to everyone who may look at the cluster."""
    variables = {}
    for word in words:
        name, has_value, value = word.partition("=")
        if not has_value or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env {name}: write it as NAME=VALUE")
        if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value):
            raise UsageError(
                f"--env {name}: this looks like a secret, and a job's variables are shown to everyone who may look at "
                "the cluster; set it where the cluster's nodes are started instead"
            )
        variables[name] = value
    return variables


def _resources(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        return {str(name): float(amount) for name, amount in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f'--entrypoint-resources {text}: write a JSON mapping of numbers, like {{"head": 0.1}}'
        ) from error
