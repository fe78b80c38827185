"""Whether a tracking server lets us in, and the command that serves the MLflow pages on loopback."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.backends.mlflow_log import store_uri
from orchestrator.backends.mlflow_store import QUIET, open_client
from orchestrator.backends.mlflow_view import TAG, view_address
from orchestrator.contract.errors import TrackingRefusedError, UsageError
from orchestrator.spec.sweep import TrackingSection

SCHEMES = frozenset({"http", "https", "sqlite", "postgresql", "mysql", "mssql"})
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class UiCommand:
    """How to serve the pages: `arguments` run with `environment` laid over the user's own, pages at `url`.

    `views` holds the address of each experiment's sweeps, by the experiment's name.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str]
    url: str
    views: dict[str, str]


def preflight(tracking: TrackingSection, warn: Callable[[str], None]) -> None:
    """Look at the tracking URI, and ask a server whether it lets us in; a store of files or a database is not touched.

    Raises UsageError for a kind of store that cannot be used, TrackingRefusedError when the server refuses the
    credentials. A server that does not answer is worth one warning: the sweep runs, and its runs are sent later.
    """
    if tracking.uri is None:
        return
    scheme = urlsplit(tracking.uri).scheme.partition("+")[0]
    if scheme not in SCHEMES:
        raise UsageError(
            f"tracking.uri {tracking.uri} is no store that can be used; give a server (http://host:5000) or a "
            "database (sqlite:///absolute/path/mlflow.db)"
        )
    if scheme not in ("http", "https"):
        return
    client = open_client(tracking.uri)
    from mlflow.exceptions import MlflowException

    host = urlsplit(tracking.uri).hostname
    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        if error.error_code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"):
            raise TrackingRefusedError(
                f"the tracking server at {host} refuses the credentials; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN), or run with tracking.enabled=false"
            ) from error
        warn(f"the tracking server at {host} does not answer; the sweep runs, and its results are sent later")


def ui_command(tracking: TrackingSection, home: Path, port: int) -> UiCommand:
    """The command that serves the sweep's store on loopback at `port`, behind MLflow's host and origin checks."""
    origin = f"{LOOPBACK}:{port}"
    hosts = f"{origin},localhost:{port}"
    arguments = (
        *(sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", store_uri(tracking, home)),
        *("--default-artifact-root", (home.resolve() / "mlartifacts").as_uri()),
        *("--allowed-hosts", hosts),
        *("--cors-allowed-origins", f"http://{origin},http://localhost:{port}"),
        *("--x-frame-options", "SAMEORIGIN"),
    )
    environment = {**QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    url = f"http://{origin}"
    return UiCommand(arguments, environment, url, _views(tracking, home, url))


def _views(tracking: TrackingSection, home: Path, url: str) -> dict[str, str]:
    experiments = open_client(store_uri(tracking, home)).search_experiments()
    return {each.name: view_address(url, each.experiment_id) for each in experiments if TAG in each.tags}
