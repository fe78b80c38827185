"""Brings run contents into an MLflow store, so that doing it again changes nothing.

Every run is found by its id in the sweep's journal, or else by its tag; metrics carry times from the records, so a
repeated row is the same row to MLflow.
"""

import json
import os
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from orchestrator.backends.mlflow_runs import ROLE_TAG, SWEEP_TAG, TOKEN_TAG, RunContent
from orchestrator.backends.mlflow_view import TAG, view_tag_value

if TYPE_CHECKING:
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

Item = TypeVar("Item")

JOURNAL_FILE = "mlflow.jsonl"
SWEEP_KEY = "sweep"
"""Stands for the parent run where an attempt has its token."""
METRICS_PER_BATCH, PARAMS_PER_BATCH, TAGS_PER_BATCH = 500, 100, 100
"""Within MLflow's limits of 1000 entities and 1 MB a request (mlflow/utils/validation.py)."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""Environment of every MLflow call: nothing on the user's terminal, nothing sent home, and a call that ends within
seconds, because the projector itself tries again. What the user has set stays."""


def be_quiet() -> None:
    """Set `QUIET` where the user has not, and keep mlflow's warnings off the terminal. Before mlflow is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"(mlflow|alembic|sqlalchemy|pydantic)\b")


def open_client(uri: str) -> "MlflowClient":
    """A client of the store at `uri`. Imports mlflow (seconds) and, for a database, brings its schema up to date."""
    be_quiet()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


class RunStore:
    """The runs of one sweep in one store. One thread, the projector's, uses it.

    Methods raise MlflowException, OSError or SQLAlchemyError while the store cannot be reached; all may be repeated.
    """

    def __init__(self, uri: str, experiment: str, artifacts: Path | None, folder: Path) -> None:
        self._client = open_client(uri)
        self._experiment = self._experiment_id(experiment, artifacts)
        self._journal = folder / JOURNAL_FILE
        self._store_key = f"{_without_password(uri)}#{experiment}"
        self._runs: dict[str, str] = {}
        self._done: set[str] = set()
        self._read_journal()

    def is_done(self, key: str) -> bool:
        """Whether the attempt of token `key` was brought in whole, its end included."""
        return key in self._done

    def mark_done(self, key: str) -> None:
        """Remember that nothing of `key` is left to bring in."""
        self._done.add(key)
        self._append({"done": key})

    def parent(self, content: RunContent) -> str:
        """The sweep's run, made when there is none; its id."""
        sweep_id = content.tags[SWEEP_TAG]
        return self._find_or_create(SWEEP_KEY, content, {SWEEP_TAG: sweep_id, ROLE_TAG: "sweep"}, {})

    def child(self, content: RunContent, parent: str) -> str:
        """The attempt's run under `parent`, made when there is none; its id."""
        token = content.tags[TOKEN_TAG]
        return self._find_or_create(token, content, {TOKEN_TAG: token}, {"mlflow.parentRunId": parent})

    def log(self, run_id: str, content: RunContent) -> None:
        """Bring in everything that `content` says, its status last."""
        from mlflow.entities import Metric, Param, RunTag

        points = [Metric(point.key, point.value, point.time_ms, point.step) for point in content.points]
        for batch in _batches(points, METRICS_PER_BATCH):
            self._client.log_batch(run_id, metrics=batch)
        params = [Param(key, value) for key, value in content.params.items()]
        for batch_of_params in _batches(params, PARAMS_PER_BATCH):
            self._log_params(run_id, batch_of_params)
        for tags in _batches([RunTag(key, value) for key, value in content.tags.items()], TAGS_PER_BATCH):
            self._client.log_batch(run_id, tags=tags)
        if content.status == "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        else:
            self._client.set_terminated(run_id, status=content.status, end_time=content.end_ms)

    def _log_params(self, run_id: str, params: "list[Param]") -> None:
        """MLflow keeps a param's first value for ever; an extended sweep's other value is told as a tag."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(run_id, params=params)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            for param in params:
                self._client.set_tag(run_id, f"now.{param.key}", param.value)

    def log_file(self, run_id: str, file: Path, folder: str | None) -> bool:
        """Copy a file to the run's artifacts; False, with a tag on the run, when the artifact store refuses it."""
        from mlflow.exceptions import MlflowException

        if not file.exists():
            return False
        try:
            self._client.log_artifact(run_id, str(file), folder)
        except (OSError, MlflowException):
            self._client.set_tag(run_id, "artifacts", "missing")
            return False
        return True

    def log_text(self, run_id: str, text: str, file: str) -> None:
        """Store `text` among the run's artifacts as `file`; a refusal becomes a tag."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_text(run_id, text, file)
        except (OSError, MlflowException):
            self._client.set_tag(run_id, "artifacts", "missing")

    def log_dataset(self, run_id: str, name: str, digest: str) -> None:
        """Name the training data as the run's input. `digest` has at most 36 characters."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data = Dataset(name=name[:500], digest=digest[:36], source_type="local", source=json.dumps({"uri": name}))
        self._client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])

    def _experiment_id(self, name: str, artifacts: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment_id = self._found_or_made(name, artifacts)
        try:
            self._client.set_experiment_tag(experiment_id, TAG, view_tag_value())
        except MlflowException:
            # a driver that starts at the same moment may set it first
            if self._client.get_experiment(experiment_id).tags.get(TAG) != view_tag_value():
                raise
        return experiment_id

    def _found_or_made(self, name: str, artifacts: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = None if artifacts is None else (artifacts / _file_name(name)).as_uri()
        try:
            return str(self._client.create_experiment(name, artifact_location=location))
        except MlflowException:
            # another sweep's driver was faster
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _find_or_create(
        self, key: str, content: RunContent, identity: dict[str, str], more_tags: dict[str, str]
    ) -> str:
        if key not in self._runs:
            run_id = self._search(identity)
            if run_id is None:
                tags = {**content.tags, **more_tags}
                run = self._client.create_run(self._experiment, content.start_ms, tags, content.name)
                run_id = str(run.info.run_id)
            self._runs[key] = run_id
            self._append({"key": key, "run_id": run_id})
        return self._runs[key]

    def _search(self, identity: dict[str, str]) -> str | None:
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        runs = self._client.search_runs([self._experiment], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _append(self, entry: dict[str, str]) -> None:
        with self._journal.open("a") as journal:
            journal.write(json.dumps({"store": self._store_key, **entry}) + "\n")

    def _read_journal(self) -> None:
        """Take the ids of this store over; a store that has lost the sweep's run is filled anew."""
        for entry in _entries(self._journal):
            if entry.get("store") != self._store_key:
                continue
            if "done" in entry:
                self._done.add(entry["done"])
            else:
                self._runs[entry["key"]] = entry["run_id"]
        if SWEEP_KEY in self._runs and not self._exists(self._runs[SWEEP_KEY]):
            self._runs, self._done = {}, set()
            self._journal.unlink()

    def _exists(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return str(self._client.get_run(run_id).info.lifecycle_stage) == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise


def _entries(journal: Path) -> Iterator[dict[str, str]]:
    """All whole lines; a torn last one is left out, and its run is found by its tag."""
    if not journal.exists():
        return
    for line in journal.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _batches(items: list[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _without_password(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _file_name(text: str) -> str:
    return (
        "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text).lstrip(".") or "experiment"
    )
