"""Sweeps in a cluster of another process tree: nobody here has to stay, and nobody without the token gets in."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from cli.brimful_command import COMMAND, Workplace
from pools.conformance import until
from pools.rig import RayRig

from faults import leaks
from orchestrator.backends.ray_jobs import JobOptions, RayJobs
from orchestrator.cli.remote import SWEEP_KEY
from orchestrator.placement.jobs import JobRequest
from orchestrator.sweep.ledger import Ledger

pytestmark = [pytest.mark.trains, pytest.mark.ray]

TOKENLESS = {"RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": None}


class Cluster:
    """A Ray head with a dashboard, and a place outside of it."""

    def __init__(self, folder: Path) -> None:
        self.rig = RayRig({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}, health_checks={})
        self.rig.head(cpus=2, dashboard=True)
        self.place = Workplace(folder)
        self.home = folder / "cluster-home"
        self.url = self.rig.dashboard

    @property
    def reached(self) -> tuple[str, ...]:
        """The options that name the cluster."""
        return ("--address", self.url, "--remote-home", str(self.home))

    def await_training(self, name: str) -> None:
        """Wait until a trial of the sweep has begun to train."""
        trials = self.home / "sweeps" / name / "trials"
        until(lambda: any('"first_step"' in file.read_text() for file in trials.glob("*/attempt-1/events.jsonl")))

    def jobs(self) -> RayJobs:
        return RayJobs(self.url, JobOptions())


@pytest.fixture(scope="module")
def cluster(ray_token: None, session_folder: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("submitted")
    (folder / "rows.txt").write_text("".join(f"line {number} of a text\n" for number in range(60)))
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.rig.close()


def command(place: Workplace, *words: str | Path, **changes: str | None) -> "subprocess.CompletedProcess[str]":
    """The finished command; `changes` to the environment, None removes a variable."""
    environment = {**place.environment, **changes}
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=place.folder,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=place.deadline_s,
    )


def token() -> str:
    return Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()


@pytest.mark.fault("A6", "I23")
def test_a_killed_client_changes_nothing_and_no_line_is_lost(
    cluster: Cluster, figure: Callable[[str, str], None]
) -> None:
    place = cluster.place
    spec = place.spec("left")
    client = place.start("submit", spec, *cluster.reached, "budget.trials=3", "tracking.enabled=false")
    assert client.stdout is not None
    seen = []
    for line in client.stdout:
        seen.append(line)
        if line.startswith("[1/3]"):
            client.send_signal(signal.SIGKILL)
            break
    client.wait()

    again = command(place, "logs", "left", "--follow", *cluster.reached)
    assert again.returncode == 0, again.stderr
    whole = command(place, "logs", "left", *cluster.reached).stdout
    assert again.stdout == whole
    assert whole.startswith("".join(seen))
    assert [number for number in range(1, 4) if f"[{number}/3]" in whole] == [1, 2, 3]
    figure("lines lost when re-attached", "0")

    status = json.loads(command(place, "status", "left", "--json", *cluster.reached).stdout)
    assert (status["state"], status["done"]) == ("finished", 3)
    report = place.folder / "left.html"
    assert command(place, "report", "left", "-o", report, *cluster.reached).returncode == 0
    assert "<html" in report.read_text()
    acts = [json.loads(line) for line in (cluster.home / "audit.jsonl").read_text().splitlines()]
    assert [(act["what"], act["sweep"]) for act in acts] == [("run", "left")]
    assert acts[0]["for"]
    assert acts[0]["time"].endswith("+00:00")
    leaks.assert_home_clean(cluster.home)
    leaks.assert_ray_clean(cluster.rig.address)


@pytest.mark.slow
@pytest.mark.fault("A4", "A6")
@pytest.mark.parametrize("how", ["brimful", "ray"])
def test_a_sweep_is_stopped_and_resumed_from_outside(cluster: Cluster, how: str) -> None:
    """The client leaves by Ctrl-C or with its terminal. `brimful stop` asks the driver; `ray job stop` sends it
    SIGTERM, which is a clean end too."""
    place, name = cluster.place, f"stopped-{how}"
    client = place.start("submit", place.spec(name, steps=100_000), *cluster.reached, "tracking.enabled=false")
    cluster.await_training(name)
    client.send_signal(signal.SIGINT if how == "brimful" else signal.SIGHUP)
    _, told = client.communicate(timeout=place.deadline_s)
    if how == "brimful":
        assert client.returncode == 130
        assert f"brimful logs {name} --address {cluster.url} --remote-home {cluster.home} --follow" in told
    job = cluster.jobs().newest(SWEEP_KEY, name)
    assert job is not None
    assert cluster.jobs().end(job) is None
    if how == "brimful":
        assert command(place, "stop", name, *cluster.reached).returncode == 0
    else:
        cluster.jobs()._client.stop_job(job)
    end = cluster.jobs().wait(job)
    assert end.exit_code in ((4,) if how == "brimful" else (143, -15, None))
    status = json.loads(command(place, "status", name, "--json", *cluster.reached).stdout)
    assert status["state"] == "stopped"
    if how == "brimful":
        again = place.start("resume", name, *cluster.reached)
        until(lambda: Ledger(cluster.home, name).is_driven())
        assert command(place, "stop", name, *cluster.reached).returncode == 0
        again.communicate(timeout=place.deadline_s)
        assert again.returncode == 4
        acts = [json.loads(line) for line in (cluster.home / "audit.jsonl").read_text().splitlines()]
        assert [act["what"] for act in acts if act["sweep"] == name] == ["run", "stop", "resume", "stop"]
    leaks.assert_home_clean(cluster.home)
    leaks.assert_ray_clean(cluster.rig.address)


@pytest.mark.fault("C15")
@pytest.mark.parametrize("verb", ["submit", "run"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (TOKENLESS, "wants a token and there is none here"),
        ({**TOKENLESS, "RAY_AUTH_MODE": "disabled"}, "wants a token, but RAY_AUTH_MODE is disabled here"),
        ({"RAY_AUTH_TOKEN_PATH": None, "RAY_AUTH_TOKEN": "f" * 64}, "refuses the token"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "cannot be read (No such file or directory)"),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null"}, "is empty"),
    ],
    ids=["missing", "mode", "wrong", "unreadable", "empty"],
)
def test_each_fault_of_the_token_is_told(
    cluster: Cluster, verb: str, changes: dict[str, str | None], words: str
) -> None:
    address = cluster.url if verb == "submit" else cluster.rig.address
    run = command(
        cluster.place,
        verb,
        cluster.place.spec("refused"),
        "--address",
        address,
        HOME=str(cluster.place.folder),
        **changes,
    )
    assert run.returncode == 5
    said = run.stdout + run.stderr
    assert words in said
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "ray get-auth-token"):
        assert name in said
    assert "Traceback" not in said
    assert token() not in said
    assert "f" * 64 not in said


@pytest.mark.fault("I2")
@pytest.mark.parametrize("headers", [{}, {"User-Agent": "Mozilla/5.0", "Origin": "http://evil.example"}])
def test_without_the_token_no_job_is_started_shown_or_removed(cluster: Cluster, headers: dict[str, str]) -> None:
    canary = cluster.place.folder / "canary"
    jobs = f"{cluster.url}/api/jobs/"
    answers = [
        requests.post(jobs, json={"entrypoint": f"touch {canary}"}, headers=headers, timeout=10),
        requests.get(jobs, headers=headers, timeout=10),
        requests.delete(f"{jobs}raysubmit_1", headers=headers, timeout=10),
    ]
    assert all(answer.status_code in (401, 403) for answer in answers)
    assert not canary.exists()


@pytest.mark.fault("I6")
def test_words_reach_the_command_as_they_are(cluster: Cluster) -> None:
    canary = cluster.place.folder / "injected"
    words = [
        f"; touch {canary}",
        f"$(touch {canary})",
        f"`touch {canary}`",
        "--config=/etc/passwd",
        "'",
        '"',
        "a b",
        "*",
    ]
    jobs = cluster.jobs()
    job = jobs.submit(JobRequest(["python", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *words]))
    assert jobs.wait(job).exit_code == 0
    assert json.loads(jobs.log(job).splitlines()[-1]) == words
    assert not canary.exists()


@contextmanager
def proxied(url: str) -> Iterator[tuple[str, threading.Event]]:
    """Another address of the dashboard; while the event is set it refuses every connection."""
    host, port = url.removeprefix("http://").split(":")
    is_away = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if is_away.is_set():
                    break
                sink.sendall(data)
        except OSError:
            pass
        source.close()
        sink.close()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if is_away.is_set():
                client.close()
                continue
            server = socket.create_connection((host, int(port)))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", is_away
    finally:
        listener.close()


@pytest.mark.slow
@pytest.mark.fault("A12")
def test_a_watched_state_outlives_the_connection(cluster: Cluster) -> None:
    place = cluster.place
    spec = place.spec("watched", steps=100_000)
    sent = command(place, "submit", spec, *cluster.reached, "--no-wait", "--json", "tracking.enabled=false")
    assert sent.returncode == 0, sent.stderr
    cluster.await_training("watched")
    with proxied(cluster.url) as (url, is_away):
        watch = place.start("status", "watched", "--watch", "--address", url, "--remote-home", str(cluster.home))
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert watch.stdout.readline().startswith("watched: running")
        is_away.set()
        assert re.match(r"Stale since \d\d:\d\d:\d\d: ", watch.stderr.readline())
        is_away.clear()
        assert command(place, "stop", "watched", *cluster.reached).returncode == 0
        out, _ = watch.communicate(timeout=place.deadline_s)
    assert watch.returncode == 0
    assert out.splitlines()[-1].startswith("watched: stopped")


class _Dashboard(BaseHTTPRequestHandler):
    """Answers as a Ray dashboard does when it is asked for its version, and refuses all else."""

    def do_GET(self) -> None:
        is_version = self.path == "/api/version"
        body = (
            json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "0"}).encode() if is_version else b"no"
        )
        self.send_response(200 if is_version else 500)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.fault("I3")
@pytest.mark.parametrize("is_insecure", [False, True])
def test_a_token_in_clear_text_to_another_host_is_warned_of(cluster: Cluster, is_insecure: bool) -> None:
    name = socket.gethostname()  # where it leads is not asked: by its name it is another host
    server = ThreadingHTTPServer((name, 0), _Dashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        words = ("--address", f"http://{name}:{server.server_port}", *(["--insecure"] if is_insecure else []))
        run = command(cluster.place, "submit", cluster.place.spec("clear"), *words)
    finally:
        server.shutdown()
        server.server_close()
    assert run.returncode == 2
    assert ("travels to" in run.stderr and "in clear text" in run.stderr) is not is_insecure
    assert token() not in run.stdout + run.stderr
