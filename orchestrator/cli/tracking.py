"""`sync` and `ui`: MLflow beside a sweep."""

import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from types import FrameType

from orchestrator import wiring
from orchestrator.cli.output import Output
from orchestrator.contract.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, BrimfulError, UsageError
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger

HOST = "127.0.0.1"
READY_DEADLINE_S = 120.0
END_PATIENCE_S = 5.0
LOG_FILE = "ui.log"
_POLL_S = 0.2


def sync_sweep(name: str, home: Path, as_json: bool) -> None:
    """Write all records of `name` to MLflow. Raises UsageError while a driver does so by itself."""
    output = Output(as_json)
    ledger = Ledger(home, name)
    spec = SweepSpec.model_validate(ledger.read_sweep().spec)
    if ledger.is_driven():
        raise UsageError(f"sweep {name} is running and brings MLflow up to date itself")
    uri = wiring.sync_tracking(spec, ledger)
    trials = len(ledger.read_trials())
    output.document({"name": name, "tracking_uri": uri, "trials": trials})
    output.show(f"MLflow at {uri} holds all {trials} trials of {name}.")


def serve_ui(home: Path, port: int, browser: bool, as_json: bool) -> int:
    """Serve the home's MLflow store on loopback until Ctrl-C or SIGTERM, then end the server and its workers.

    Raises UsageError when there is no store or the port is taken.
    """
    output = Output(as_json)
    signal.signal(signal.SIGTERM, _terminated)
    command = wiring.tracking_server(home, port)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"port {port} of {HOST} is taken; choose another with --port") from error
    log = home / LOG_FILE
    with log.open("wb") as stream:
        environment = {**os.environ, **command.environment}
        process = subprocess.Popen(
            command.arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        _await_port(process, port, log)
        pages = command.views or {"MLflow": command.url}
        output.document({"url": command.url, "pages": dict(pages)})
        for experiment, address in pages.items():
            output.show(f"Sweeps of {experiment}: {address}")
        output.show(f"MLflow serves {home} to this machine only. Ctrl-C ends it.")
        sys.stdout.flush()
        if browser:
            webbrowser.open(next(iter(pages.values())))
        return process.wait()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        _end(process)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the server with its workers, which share its session."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=END_PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_port(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise BrimfulError(f"mlflow server ended at once with code {process.returncode}; {log} says why")
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(_POLL_S)
    raise BrimfulError(
        f"mlflow server did not listen on port {port} within {READY_DEADLINE_S:.0f} s; {log} may say why"
    )
