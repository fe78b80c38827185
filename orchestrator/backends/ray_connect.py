"""Starting a private Ray cluster or joining one, with an answer within seconds when it cannot be reached."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from filelock import FileLock, Timeout

from orchestrator.backends.ray_token import MODE_VARIABLE, find_token, read_mode_again, refused
from orchestrator.contract.errors import ClusterUnreachableError
from orchestrator.placement.local_devices import cpu_slots

CONNECT_DEADLINE_S = 3.0
PROBE_DEADLINE_S = 15.0
LOST_AFTER_S = 40.0
"""A cluster whose head refuses connections for this long is gone; one that is back sooner goes on, if it kept its state
(`RAY_gcs_storage`). Ray's own client gives up, and ends the whole process, after 60 s
(`RAY_gcs_rpc_server_reconnect_timeout_s`)."""
_PULSE_INTERVAL_S = 2.0
_OBJECT_STORE_BYTES = 100 * 2**20
"""Only small messages pass through it; Ray refuses less than 75 MiB."""
_NAMESPACE = "brimful"
_FOLDER_PREFIX = "brimful-"
_LOCK_FILE = "driver.lock"
_SETTLED_S = 60.0
"""A younger folder may belong to a driver that has yet to lock it."""
_MEND = "check the address and that the cluster runs (`ray status` on its head), or leave --address out to start one"


@dataclass(frozen=True)
class Connection:
    """The driver's connection. `private` holds the files of a cluster that was started here, else None."""

    address: str
    private: "PrivateFolder | None"

    def close(self) -> None:
        """Disconnect; ends a cluster that was started here."""
        with _kept_sigterm_handler():
            ray.shutdown()
        if self.private is not None:
            self.private.remove()


class PrivateFolder:
    """The files of a cluster that was started here, locked for as long as its driver lives."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        self._lock = FileLock(self.path / _LOCK_FILE)
        self._lock.acquire(timeout=0)

    def remove(self) -> None:
        """Remove it with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_left_behind() -> None:
    """Remove this user's private folders whose drivers were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_LOCK_FILE}"):
        try:
            status = lock.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _SETTLED_S:
                with FileLock(lock).acquire(timeout=0):
                    shutil.rmtree(lock.parent, ignore_errors=True)
        except (Timeout, FileNotFoundError):
            continue  # its driver lives, or another one is removing it


class Pulse:
    """Tells whether the head still accepts connections, without Ray's client, which blocks for a minute and more."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._alive_s = self._next_s = time.monotonic()
        self.is_away = False
        """Whether the last connection was refused."""

    def check(self) -> None:
        """Raise ClusterUnreachableError when the head has been away for `LOST_AFTER_S`. Costs a connection now and
        then."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self.is_away = _refusal(self._address) is not None
        if not self.is_away:
            self._alive_s = now_s
        elif now_s - self._alive_s > LOST_AFTER_S:
            raise ClusterUnreachableError(
                f"the Ray cluster at {self._address} has not answered for {LOST_AFTER_S:.0f} s; "
                "bring it back or start another one, then run the same command again to resume"
            )
        self._next_s = now_s + _PULSE_INTERVAL_S


def start_private(cpus: int | None) -> Connection:
    """Start a cluster on this machine that ends with this process. `cpus`: None for the physical cores.

    Raises ClusterUnreachableError when Ray does not start.
    """
    remove_left_behind()
    private = PrivateFolder()
    if "RAY_AUTH_MODE" not in os.environ:
        token = private.path / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    read_mode_again()
    try:
        with _kept_sigterm_handler():
            context = ray.init(
                address="local",
                num_cpus=cpus if cpus is not None else len(cpu_slots(1)),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                namespace=_NAMESPACE,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(private.path),
            )
    except (RuntimeError, OSError, ValueError, TimeoutError) as error:
        private.remove()
        raise ClusterUnreachableError(f"Ray did not start on this machine: {error}; try --pool local") from error
    return Connection(context.address_info["gcs_address"], private)


def join(address: str) -> Connection:
    """Join the cluster whose head listens at `address` (`host:port`).

    The token is found as Ray finds it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, `~/.ray/auth_token`. Raises
    ClusterUnreachableError with the mend.
    """
    _require_reachable(address)
    has_token = find_token() is not None
    is_token_mode = os.environ.get(MODE_VARIABLE) == "token"
    if is_token_mode and not has_token:
        raise refused(address, has_sent=False)
    _require_healthy(address, has_sent=is_token_mode)
    read_mode_again()
    try:
        with _kept_sigterm_handler():
            ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=_NAMESPACE)
    except (RuntimeError, OSError, ValueError, ray.exceptions.RayError) as error:
        raise ClusterUnreachableError(f"the Ray cluster at {address} cannot be joined: {error}; {_MEND}") from error
    return Connection(address, None)


def _require_reachable(address: str) -> None:
    host, separator, port = address.rpartition(":")
    if not separator or not host or "/" in host or not port.isdigit():
        raise ClusterUnreachableError(f"{address!r} is not a Ray address; write it as host:port, e.g. 10.0.0.1:6379")
    refusal = _refusal(address)
    if refusal is not None:
        raise ClusterUnreachableError(f"the Ray cluster at {address} cannot be reached ({refusal}); {_MEND}")


def _refusal(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_DEADLINE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _require_healthy(address: str, has_sent: bool) -> None:
    """Ask the head in a process of its own: Ray's client may block for minutes, or end the process that uses it."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        probe = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterUnreachableError(f"what listens at {address} does not answer as a Ray cluster; {_MEND}") from error
    if probe.returncode == 0:
        return
    if "AuthenticationError" in probe.stderr:
        raise refused(address, has_sent)
    last_line = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    raise ClusterUnreachableError(f"the Ray cluster at {address} is not usable ({last_line}); {_MEND}")


@contextmanager
def _kept_sigterm_handler() -> Iterator[None]:
    """ray.init replaces the handler of SIGTERM by one that ends the process; ours stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
