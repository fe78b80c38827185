"""Does a sweep come to its end while parts of its cluster are killed again and again?

    python -m benchmarks.chaos [--trials 40] [--steps 1000] [--every 20] [--seed 0] [--output PAGE]

Runs a sweep of short real trials (a Llama of two layers, real DeepSpeed) by the real command over three Ray nodes on
this machine, with a MLflow server beside it. Every so many seconds one of four things is killed with SIGKILL, in turns
that the seed decides: a rank of a running trial, the raylet of a node, the driver, the MLflow server. What was killed
is started again as its owner would: the node joins anew, the server comes back, the same command is said again. The
head's raylet is left alone: without a store of its own Ray's head is the cluster (fault tests C7 and C8 tell what
happens then). In the end every trial must have exactly one result, no result may have changed once it was there,
MLflow must hold them all, and no process or placement group may be left. Writes the page
(docs/measurements/chaos.md); exits with 1 when anything is not so.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.arguments import positive
from benchmarks.two_nodes import machine
from orchestrator.contract.errors import EXIT_NOTHING_FITS, EXIT_OK
from orchestrator.contract.outcome import INTERRUPTED_KINDS
from orchestrator.placement.ports import free_port
from orchestrator.placement.processes import TEMPLATE_VARIABLE, find_marked
from orchestrator.report.markdown import markdown_table
from orchestrator.report.tables import Table
from orchestrator.sweep.ledger import Ledger
from tests.faults.leaks import ranks_among
from tests.pools.rig import RayRig, token_environment

PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "chaos.md"
NAME = "chaos"
MOST_SESSIONS = 40
GONE_DEADLINE_S = 60.0
SERVER_DEADLINE_S = 120.0
SPEC = """\
version: 1
name: chaos
model:
  config: {{model_type: llama, vocab_size: 320, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128}}
data: {{path: rows.txt, sequence_length: 64}}
train: {{global_batch: 4, learning_rate: 1e-3, zero_stage: 0}}
search: {{sampler: grid, method: [full, lora], lora_rank: {ranks}, micro_batch: [1, 2]}}
limits: {{device_memory: 512MiB, reject_probability: 1}}
measure: {{min_steps: {steps}, max_steps: {steps}, racing: false, confirm: {{top: 0}}}}
budget: {{trials: {trials}}}
tracking: {{uri: "{uri}"}}
"""


@dataclass
class Chaos:
    """Everything that runs, and what became of it."""

    folder: Path
    rig: RayRig
    nodes: list[str]
    trials: int
    mlflow_port: int
    server: "subprocess.Popen[bytes] | None" = None
    driver: "subprocess.Popen[bytes] | None" = None
    sessions: int = 0
    killed: list[tuple[float, str]] = field(default_factory=list)
    seen: dict[Path, bytes] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.mlflow_port}"

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.home, NAME)

    def start_server(self) -> None:
        """Start the MLflow server on the store that it had before."""
        command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.mlflow_port)),
            *("--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}", "--workers", "1"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]
        log = (self.folder / "server.log").open("ab")
        self.server = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def start_driver(self) -> None:
        """Say the command; the same one each time."""
        command = [sys.executable, "-m", "orchestrator.cli", "run", str(self.folder / "chaos.yaml")]
        options = ["--address", self.rig.address, "--home", str(self.home), "--no-predictions"]
        log = (self.folder / "driver.log").open("ab")
        self.driver = subprocess.Popen([*command, *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.sessions += 1

    def kill_rank(self) -> bool:
        """Kill the youngest process of a running trial: a rank, not who keeps it."""
        ranks = ranks_among(find_marked("TMPDIR", str(self.folder)))
        if not ranks:
            return False
        _kill(ranks[-1])
        return True

    def kill_node(self) -> bool:
        """Kill the raylet of a node that is not the head's; another node takes its place."""
        self.rig.kill_node(self.nodes.pop(0))
        self.nodes.append(self.rig.node(cpus=1))
        return True

    def kill_driver(self) -> bool:
        """Kill the driver; the same command is said again."""
        if self.driver is None or self.driver.poll() is not None:
            return False
        self.driver.kill()
        self.driver.wait()
        self.start_driver()
        return True

    def kill_server(self) -> bool:
        """Kill the MLflow server with its workers; it comes back."""
        assert self.server is not None
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        self.start_server()
        return True

    def look(self) -> None:
        """Hold what has ended against what it was before."""
        if not self.ledger.exists():
            return
        for record in self.ledger.read_trials():
            outcome = record.outcome
            if outcome is None or outcome.kind in (*INTERRUPTED_KINDS, "infra", "lost_node", "preempted"):
                continue
            file = self.ledger.folder / "trials" / f"{record.trial:04d}" / "trial.json"
            content = file.read_bytes()
            if outcome.kind == "crashed" and len(record.attempts) == 1:
                continue  # a killed rank is tried once more
            if self.seen.setdefault(file, content) != content:
                self.faults.append(f"the record of trial {record.trial} changed after its end")
                self.seen[file] = content


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@contextmanager
def prepared(trials: int, steps: int) -> Iterator[Chaos]:
    """Three nodes, a server that answers, and a spec."""
    folder = Path(tempfile.mkdtemp(prefix="bfchaos", dir="/tmp"))
    os.environ |= {**token_environment(folder), "TMPDIR": str(folder)}
    rig = RayRig(health_checks={})
    chaos = Chaos(folder, rig, [], trials, free_port())
    try:
        rig.head(cpus=1)
        chaos.nodes += [rig.node(cpus=1), rig.node(cpus=1)]
        chaos.start_server()
        ranks = list(range(1, max(2, trials // 2)))
        (folder / "rows.txt").write_text("".join(f"line {number} of a text\n" for number in range(60)))
        (folder / "chaos.yaml").write_text(SPEC.format(ranks=ranks, trials=trials, steps=steps, uri=chaos.uri))
        yield chaos
    finally:
        for process in (chaos.driver, chaos.server):
            if process is not None and process.poll() is None:
                (os.killpg if process is chaos.server else os.kill)(process.pid, signal.SIGKILL)
                process.wait()
        rig.close()


def wreak(chaos: Chaos, every_s: float, dice: random.Random) -> None:
    """Run the sweep to its end while things are killed."""
    chaos.start_driver()
    started_s = time.monotonic()
    next_s = started_s + every_s
    waiting: list[tuple[str, Callable[[], bool]]] = []
    while chaos.driver is not None and chaos.sessions <= MOST_SESSIONS:
        chaos.look()
        code = chaos.driver.poll()
        if code in (EXIT_OK, EXIT_NOTHING_FITS):
            return
        if code is not None:
            chaos.start_driver()  # it told that it lost what it needs, and how to go on: by the same command
        if time.monotonic() >= next_s:
            if not waiting:
                waiting = [
                    ("a rank", chaos.kill_rank),
                    ("a raylet", chaos.kill_node),
                    ("the driver", chaos.kill_driver),
                    ("the MLflow server", chaos.kill_server),
                ]
                dice.shuffle(waiting)
            name, kill = waiting[0]
            if kill():
                waiting.pop(0)
                chaos.killed.append((time.monotonic() - started_s, name))
                print(f"{chaos.killed[-1][0]:.0f} s: killed {name}", file=sys.stderr, flush=True)
                next_s = time.monotonic() + every_s
        time.sleep(0.5)
    chaos.faults.append(f"the sweep was not over after {chaos.sessions} sessions")


def judge(chaos: Chaos) -> Counter[str]:
    """Note what does not hold in the end; returns how often each outcome came about."""
    chaos.look()
    records = chaos.ledger.read_trials()
    final = [record for record in records if record.outcome is not None and record.running is None]
    if len(final) != chaos.trials or [record.trial for record in records] != list(range(chaos.trials)):
        chaos.faults.append(f"{len(final)} of {chaos.trials} trials are over")
    if len({record.candidate for record in records}) != len(records):
        chaos.faults.append("a candidate was tried twice")
    for record in records:
        measured = [a for a in record.searches if a.outcome is not None and a.outcome.kind in ("ok", "over_limit")]
        if len(measured) > 1:
            chaos.faults.append(f"trial {record.trial} was measured {len(measured)} times")
    _judge_mlflow(chaos, sum(len(record.attempts) for record in records))
    left = _left(chaos)
    if left:
        chaos.faults.append(f"still there: {left}")
    return Counter(record.outcome.kind for record in final if record.outcome is not None)


def _judge_mlflow(chaos: Chaos, attempts: int) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "sync", NAME, "--home", str(chaos.home)]
    deadline_s = time.monotonic() + SERVER_DEADLINE_S
    while subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > deadline_s:
            chaos.faults.append("MLflow could not be brought up to date")
            return
        time.sleep(1.0)
    command = [sys.executable, "-c", _RUNS, chaos.uri]
    runs = json.loads(_told(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    if len(runs) != attempts + 1:
        chaos.faults.append(f"MLflow holds {len(runs)} runs of {attempts} attempts and the sweep")
    if "RUNNING" in runs:
        chaos.faults.append(f"{runs.count('RUNNING')} MLflow runs are still RUNNING")


def _told(output: str) -> str:
    """What a script of ours told, whatever Ray and MLflow say beside."""
    return next(line.removeprefix("told ") for line in output.splitlines() if line.startswith("told "))


_RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
experiments = [e.experiment_id for e in client.search_experiments()]
runs, token = [], None
while True:
    page = client.search_runs(experiments, max_results=1000, page_token=token)
    runs += [run.info.status for run in page]
    token = page.token
    if not token:
        break
print("told", json.dumps(runs))
"""
_GROUPS = """
import json, sys, time, ray
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
print("told", sum(group["state"] != "REMOVED" for group in placement_group_table().values()))
"""


def _left(chaos: Chaos) -> list[str]:
    """Processes of trials and placement groups that do not go away."""
    deadline_s = time.monotonic() + GONE_DEADLINE_S
    while True:
        processes = find_marked("TMPDIR", str(chaos.folder))
        left = [f"process {process.pid}" for process in processes if _has_template(process)]
        run = subprocess.run(
            [sys.executable, "-c", _GROUPS, chaos.rig.address], check=True, capture_output=True, text=True
        )
        groups = int(_told(run.stdout))
        left += [f"{groups} placement groups"] if groups else []
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(1.0)


def _has_template(process: psutil.Process) -> bool:
    """Whether it is a template or came from one."""
    try:
        return TEMPLATE_VARIABLE in process.environ()
    except psutil.Error:
        return False


def page(chaos: Chaos, arguments: argparse.Namespace, seconds: float, outcomes: Counter[str]) -> str:
    """The measurement as a Markdown page."""
    options = f"--trials {arguments.trials} --steps {arguments.steps} --every {arguments.every:g}"
    command = f"python -m benchmarks.chaos {options} --seed {arguments.seed}"
    attempts = Counter(len(record.attempts) for record in chaos.ledger.read_trials())
    kinds = Counter(
        attempt.outcome.kind
        for r in chaos.ledger.read_trials()
        for attempt in r.attempts
        if attempt.outcome is not None
    )
    paragraphs = (
        f"`{command}`: {machine()}.",
        f"{chaos.trials} real trials over three Ray nodes on this machine, with a MLflow server beside them; every "
        f"{arguments.every:g} s one thing was killed with SIGKILL. The head's raylet was left alone.",
        f"{sum(outcomes.values())} of {chaos.trials} trials came to an end of their own "
        f"({', '.join(f'{count} {kind}' for kind, count in outcomes.most_common())}) in {seconds:.0f} s, "
        f"{len(chaos.killed)} kills and {chaos.sessions} sessions of the driver. Attempts a trial: "
        f"{', '.join(f'{count} trials with {number}' for number, count in sorted(attempts.items()))}; all attempts: "
        f"{', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}.",
        "Each trial was measured at most once, no record changed after its end, MLflow held a run of every attempt and "
        "none as RUNNING, and no trial's process and no placement group was left."
        if not chaos.faults
        else "NOT held: " + "; ".join(chaos.faults) + ".",
    )
    rows = tuple((f"{at_s:.0f}", name) for at_s, name in chaos.killed)
    table = markdown_table(Table("kills", ("after, s", "killed"), rows, frozenset({"killed"})))
    text = (textwrap.fill(paragraph, width=120, break_on_hyphens=False) for paragraph in paragraphs)
    return "\n\n".join(["# A sweep among kills", *text, table]) + "\n"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=positive, default=40)
    parser.add_argument("--steps", type=positive, default=1000, help="measured steps of each trial")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    with prepared(arguments.trials, arguments.steps) as chaos:
        started_s = time.monotonic()
        wreak(chaos, arguments.every, random.Random(arguments.seed))
        seconds = time.monotonic() - started_s
        outcomes = judge(chaos)
        text = page(chaos, arguments, seconds, outcomes)
    arguments.output.write_text(text)
    print(text)
    if chaos.faults:
        print(f"what was left: {chaos.folder}", file=sys.stderr)
        raise SystemExit(1)
    shutil.rmtree(chaos.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
