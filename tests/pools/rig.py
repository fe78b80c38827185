"""Real Ray nodes on this machine, each with its own raylet, ended by their own marker."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from orchestrator.placement.ports import free_port
from orchestrator.placement.processes import end_marked, find_marked

RIG_VARIABLE = "BRIMFUL_TEST_RIG"
NODE_VARIABLE = "BRIMFUL_TEST_NODE"
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")

_PORT_OPTIONS = (
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "node-manager-port",
    "object-manager-port",
)
FAST_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def token_environment(folder: Path) -> dict[str, str]:
    """Ray's variables for a token that lies in `folder`."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


class RayRig:
    """A head and more nodes. `environment` is added to that of every Ray process.

    A lost node is noticed within seconds; `health_checks={}` leaves Ray its own patience, which suits nodes whose CPUs
    are at work. `ip` is the head's address.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        health_checks: Mapping[str, str] = FAST_HEALTH_CHECKS,
        ip: str = "127.0.0.1",
    ) -> None:
        # unix socket names are limited to 107 bytes: a short path outside pytest's folders
        self.folder = Path(tempfile.mkdtemp(prefix="bf", dir="/tmp"))
        self.marker = uuid.uuid4().hex
        self._children: set[psutil.Process] = set()
        self._ip = ip
        self.address = f"{ip}:{free_port()}"
        self.dashboard = f"http://127.0.0.1:{free_port()}"
        self._environment = {**os.environ, **health_checks, **(environment or {}), RIG_VARIABLE: self.marker}

    def head(self, cpus: int, dashboard: bool = False) -> str:
        """Start the head; returns the node's marker. With `dashboard` its jobs are reached at `self.dashboard`."""
        options = [
            "--head",
            f"--port={self.address.partition(':')[2]}",
            f"--include-dashboard={str(dashboard).lower()}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard.rpartition(':')[2]}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--temp-dir={self.folder / 'ray'}",
        ]
        return self._start(options, cpus)

    def node(
        self,
        cpus: int,
        environment: Mapping[str, str] | None = None,
        gpus: int = 0,
        ip: str | None = None,
        prefix: Sequence[str] = (),
    ) -> str:
        """Start one more node, with variables of its own; returns its marker. GPUs are a number that Ray is told.

        `prefix` is a command that runs the node's, as `ip netns exec` does, at the address `ip`.
        """
        options = [f"--address={self.address}", "--min-worker-port=0", "--max-worker-port=0"]
        return self._start(options, cpus, environment, gpus, ip, prefix)

    def raylet(self, node: str) -> psutil.Process:
        """The node's raylet."""
        marked = find_marked(NODE_VARIABLE, node)
        self._remember_children(marked)
        return next(process for process in marked if process.name() == "raylet")

    def kill_node(self, node: str) -> None:
        """`kill -9` the node's raylet."""
        marked = find_marked(NODE_VARIABLE, node)
        self._remember_children(marked)
        for process in marked:
            if process.name() == "raylet":
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Every process of the rig."""
        return find_marked(RIG_VARIABLE, self.marker)

    def close(self) -> None:
        """End every process of the rig."""
        self._remember_children(self.processes())
        end_marked(RIG_VARIABLE, self.marker)
        for child in self._children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(list(self._children), timeout=5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remember_children(self, processes: list[psutil.Process]) -> None:
        """Ray's agents write their titles over their environment: they are known as children of their raylets alone."""
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                self._children.update(process.children(recursive=True))

    def _start(
        self,
        options: list[str],
        cpus: int,
        environment: Mapping[str, str] | None = None,
        gpus: int = 0,
        ip: str | None = None,
        prefix: Sequence[str] = (),
    ) -> str:
        node = uuid.uuid4().hex
        ports: list[int] = []  # each another one: the system may give the same free port twice
        for _ in _PORT_OPTIONS:
            ports.append(free_port(taken=frozenset(ports)))
        command = [
            *prefix,
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *options),
            *(f"--{option}={port}" for option, port in zip(_PORT_OPTIONS, ports, strict=True)),
            *(f"--node-ip-address={ip or self._ip}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
            *("--object-store-memory=100000000", "--disable-usage-stats"),
        ]
        subprocess.run(
            command,
            env={**self._environment, **(environment or {}), NODE_VARIABLE: node},
            stdin=subprocess.DEVNULL,
            check=True,
            capture_output=True,
            timeout=60,
        )
        return node
