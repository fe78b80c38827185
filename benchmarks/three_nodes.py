"""Do trials of two ranks, each on another Ray node, keep three nodes busy, on the nodes that placement says?

    python -m benchmarks.three_nodes [--trials 9] [--home FOLDER] [--output PAGE]

Runs the quickstart by the real command over three Ray nodes of two CPU slots each, all on this machine, with
`resources: {devices_per_trial: 2, nodes: 2}`: real DeepSpeed training over gloo, three trials side by side. Meanwhile
it looks at the running ranks: whose raylet each one descends from is the node that it really is on. Prints a table of
the nodes with their busy time, from the attempts' records, and one of the trials with the recorded and the seen node of
each rank; writes both to the page (docs/measurements/three-nodes.md), and exits with 1 when the sweep does not finish,
a rank was seen elsewhere than recorded, or a node ran no trial.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

from orchestrator.contract.errors import EXIT_NOTHING_FITS, EXIT_OK
from orchestrator.contract.record import AttemptRecord, SweepState, TrialRecord
from orchestrator.contract.units import GIB
from orchestrator.report.markdown import markdown_table
from orchestrator.report.rows import describe
from orchestrator.report.tables import Table
from orchestrator.sweep.ledger import Ledger
from tests.pools.rig import RayRig, token_environment

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "experiments" / "quickstart.yaml"
PAGE = ROOT / "docs" / "measurements" / "three-nodes.md"
NAME = "three-nodes"
NODES, SLOTS = 3, 2
LOOK_INTERVAL_S = 0.2
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "ray")
_RANK_LOG = re.compile(r"trials/(\d+)/attempt-(\d+)/rank(\d+)\.log$")
_NODE_ID = re.compile(r"--node[-_]id=([0-9a-f]+)")

Where = tuple[int, int, int]
"""Trial, attempt and rank."""


@dataclass
class Witness:
    """Watches which raylet each rank of this machine descends from."""

    home: Path
    seen: dict[Where, str] = field(default_factory=dict)
    """By rank the first six digits of its node's id, as they stand in node names."""
    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Look until `stop`; runs in a thread of its own."""
        while not self._over.wait(LOOK_INTERVAL_S):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    self._look(process)

    def stop(self) -> None:
        """End `watch`."""
        self._over.set()

    def _look(self, process: psutil.Process) -> None:
        if "python" not in process.name():
            return
        for file in process.open_files():
            found = _RANK_LOG.search(file.path)
            if found is None or not file.path.startswith(str(self.home)):
                continue
            where = (int(found[1]), int(found[2]), int(found[3]))
            if where in self.seen:
                continue
            for parent in process.parents():
                node = _NODE_ID.search(" ".join(parent.cmdline())) if parent.name() == "raylet" else None
                if node is not None:
                    self.seen[where] = node[1][:6]


@dataclass(frozen=True)
class NodeUse:
    """One node over the sweep. `busy_s`: rank-seconds of attempts; `share`: of its slots' time from the first dispatch
    to the last one, while there was always a trial to start."""

    node: str
    attempts: int
    busy_s: float
    share: float


def attempts_of(records: Sequence[TrialRecord]) -> Iterator[tuple[TrialRecord, AttemptRecord]]:
    """All launched attempts that have ended."""
    for record in records:
        for attempt in record.attempts:
            if attempt.nodes:
                yield record, attempt


def uses(records: Sequence[TrialRecord], slots: int) -> list[NodeUse]:
    """What each node did."""
    ended = [attempt for _, attempt in attempts_of(records)]
    begin_s, last_s = min(each.dispatched_s for each in ended), max(each.dispatched_s for each in ended)
    found = []
    for node in sorted({node for attempt in ended for node in attempt.nodes}):
        here = [(each, each.nodes.count(node)) for each in ended if node in each.nodes]
        busy_s = sum(ranks * (_end_s(each) - each.dispatched_s) for each, ranks in here)
        until_last_s = sum(ranks * (min(_end_s(each), last_s) - each.dispatched_s) for each, ranks in here)
        window_s = slots * (last_s - begin_s)
        found.append(NodeUse(node, len(here), busy_s, until_last_s / window_s if window_s else 1.0))
    return found


def _end_s(attempt: AttemptRecord) -> float:
    return attempt.ended_s if attempt.ended_s is not None else attempt.dispatched_s


def misplaced(records: Sequence[TrialRecord], seen: Mapping[Where, str]) -> list[str]:
    """Ranks that were seen on another node than recorded, in words."""
    found = []
    for record, attempt in attempts_of(records):
        for rank, node in enumerate(attempt.nodes):
            real = seen.get((record.trial, attempt.attempt, rank))
            if real is not None and not node.endswith(f"#{real}"):
                found.append(f"trial {record.trial}, rank {rank}: recorded on {node}, seen on {real}")
    return found


def node_table(found: Sequence[NodeUse]) -> Table:
    """A row for each node."""
    columns = ("node", "attempts", "rank-seconds", "busy until the last start")
    rows = tuple((each.node, str(each.attempts), f"{each.busy_s:.0f}", f"{each.share:.0%}") for each in found)
    return Table("Nodes", columns, rows, frozenset({"node"}))


def trial_table(records: Sequence[TrialRecord], seen: Mapping[Where, str]) -> Table:
    """A row for each attempt."""
    columns = ("trial", "configuration", "outcome", "seconds", "ranks on", "seen on")
    rows = []
    for record, attempt in attempts_of(records):
        real = [seen.get((record.trial, attempt.attempt, rank), "not seen") for rank in range(len(attempt.nodes))]
        said = describe(attempt.outcome) if attempt.outcome is not None else ""
        seconds = f"{_end_s(attempt) - attempt.dispatched_s:.0f}"
        rows.append((str(record.trial), record.label, said, seconds, ", ".join(attempt.nodes), ", ".join(real)))
    return Table("Trials", columns, tuple(rows), frozenset(columns) - {"trial", "seconds"})


def machine() -> str:
    """This machine and what ran on it, in words."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    memory_gib = psutil.virtual_memory().total / GIB
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{psutil.cpu_count()} CPUs ({processor}), {memory_gib:.0f} GiB; {packages}; {time.strftime('%Y-%m-%d')}"


def page(records: Sequence[TrialRecord], seen: Mapping[Where, str], trials: int, seconds: float) -> str:
    """The measurement as a Markdown page."""
    ranks = sum(len(attempt.nodes) for _, attempt in attempts_of(records))
    wrong = misplaced(records, seen)
    paragraphs = (
        f"`python -m benchmarks.three_nodes --trials {trials}`: {machine()}.",
        f"The quickstart over {NODES} Ray nodes of {SLOTS} CPU slots each, every trial with two ranks on two nodes "
        "(DeepSpeed over gloo), three trials side by side. All nodes lie on this machine and talk over loopback: "
        "nothing here says how fast a real network is.",
        f"The sweep finished after {seconds:.0f} s. {len(seen)} of {ranks} ranks were met while they ran, "
        f"{len(wrong)} of them elsewhere than recorded. A device is busy from an attempt's dispatch to its end, as "
        "recorded; from the last start on there is no trial left for devices that come free.",
    )
    text = [textwrap.fill(paragraph, width=120, break_on_hyphens=False) for paragraph in paragraphs]
    tables = [markdown_table(node_table(uses(records, SLOTS))), markdown_table(trial_table(records, seen))]
    return "\n\n".join(["# Three nodes, trials over two of them", *text, *tables]) + "\n"


def sweep(home: Path, trials: int, settings: Sequence[str] = ()) -> tuple[Witness, float]:
    """Run the sweep over fresh nodes. Returns what was seen, and the command's seconds."""
    witness = Witness(home.absolute())
    with closing(RayRig(health_checks={})) as rig:
        rig.head(cpus=SLOTS)
        for _ in range(NODES - 1):
            rig.node(cpus=SLOTS)
        overrides = [
            *(f"name={NAME}", f"budget.trials={trials}", "resources.devices_per_trial=2", "resources.nodes=2"),
            *("search.sampler=random", "search.seed=1", "measure.confirm.top=0", "measure.racing=false", *settings),
        ]
        command = [sys.executable, "-m", "orchestrator.cli", "run", str(SPEC), *overrides]
        options = ["--address", rig.address, "--home", str(home), "--no-tracking", "--no-predictions"]
        watcher = threading.Thread(target=witness.watch, daemon=True)
        watcher.start()
        started_s = time.monotonic()
        run = subprocess.run([*command, *options], check=False, stdout=sys.stderr)
        witness.stop()
        watcher.join()
    if run.returncode not in (EXIT_OK, EXIT_NOTHING_FITS):
        raise SystemExit(f"the sweep ended with exit code {run.returncode}")
    return witness, time.monotonic() - started_s


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--home", type=Path, help="keep the sweep here; by default it is removed")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = arguments.home or folder / "home"
        os.environ |= token_environment(folder)
        witness, seconds = sweep(home, arguments.trials)
        ledger = Ledger(home, NAME)
        records, state = ledger.read_trials(), ledger.read_sweep().state
    text = page(records, witness.seen, arguments.trials, seconds)
    arguments.output.write_text(text)
    print(text)
    wrong = misplaced(records, witness.seen)
    used = {node for _, attempt in attempts_of(records) for node in attempt.nodes}
    if state is not SweepState.FINISHED or wrong or len(used) < NODES:
        raise SystemExit("; ".join([f"the sweep is {state}", f"{len(used)} of {NODES} nodes were used", *wrong]))


if __name__ == "__main__":
    main()
