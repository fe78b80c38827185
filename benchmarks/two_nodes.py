"""Does a trial that spans two Ray nodes end as it does on one?

    python -m benchmarks.two_nodes [--trials 8] [--limits 320MiB 192MiB] [--home FOLDER] [--output PAGE]

Runs the quickstart with two devices a trial by the real command, once over a Ray node of two CPU slots and once over
two of one slot each, all on this machine and over loopback, with the same candidates in the same order; under the
spec's own limit, and under one at which most candidates run out of memory. Where a peak was measured within 10 % of the
limit either outcome may come about; everywhere else the outcome's kind must be the same. Prints a table for each limit,
writes them to the page (docs/measurements/two-nodes.md), and exits with 1 on a difference.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from orchestrator.contract.errors import EXIT_NOTHING_FITS, EXIT_OK
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.contract.units import GIB, format_bytes
from orchestrator.report.markdown import markdown_table
from orchestrator.report.rows import TrialRow, trial_row
from orchestrator.report.tables import Table
from orchestrator.sweep.ledger import Ledger
from tests.pools.rig import RayRig, token_environment

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "experiments" / "quickstart.yaml"
PAGE = ROOT / "docs" / "measurements" / "two-nodes.md"
LAYOUTS = {"one-node": (2,), "two-nodes": (1, 1)}
"""CPU slots of each node."""
NEAR_FRACTION = 0.1
"""Peaks vary from run to run (6 % seen on CPU), so that this close to the limit an outcome is a matter of chance."""
COLUMNS = ("trial", "configuration", "one node", "two nodes", "peak, one node", "peak, two nodes", "verdict")
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "ray")


@dataclass(frozen=True)
class Pair:
    """One candidate over one node and over two; None where that sweep did not try it."""

    one: TrialRow | None
    two: TrialRow | None

    @property
    def known(self) -> TrialRow:
        """Either row: what both sweeps say alike is read from it."""
        row = self.one or self.two
        assert row is not None
        return row

    @property
    def verdict(self) -> str:
        """`same`, `near the limit` or `DIFFERENT`."""
        if self.one is None or self.two is None:
            return "DIFFERENT"
        if _kind(self.one) == _kind(self.two):
            return "same"
        return "near the limit" if _is_near(self.one) or _is_near(self.two) else "DIFFERENT"


def _kind(row: TrialRow) -> str:
    return str(row.outcome["kind"]) if row.outcome is not None else "did not end"


def _is_near(row: TrialRow) -> bool:
    if row.peak_memory_bytes is None or row.limit_bytes is None:
        return False
    return abs(row.peak_memory_bytes - row.limit_bytes) <= NEAR_FRACTION * row.limit_bytes


def sweep_over(slots: Sequence[int], name: str, home: Path, settings: Sequence[str]) -> float:
    """Run the sweep `name` over fresh Ray nodes of so many CPU `slots` each. Returns the command's seconds."""
    with closing(RayRig(health_checks={})) as rig:
        rig.head(cpus=slots[0])
        for cpus in slots[1:]:
            rig.node(cpus=cpus)
        overrides = [
            f"name={name}",
            "resources.devices_per_trial=2",
            "search.sampler=random",
            "search.seed=1",
            *settings,
        ]
        command = [sys.executable, "-m", "orchestrator.cli", "run", str(SPEC), *overrides]
        options = ["--address", rig.address, "--home", str(home), "--no-tracking"]
        started_s = time.monotonic()
        run = subprocess.run([*command, *options], check=False, stdout=sys.stderr)
    if run.returncode not in (EXIT_OK, EXIT_NOTHING_FITS):
        raise SystemExit(f"the sweep {name} ended with exit code {run.returncode}")
    return time.monotonic() - started_s


def _rows(sweep: SweepRecord, records: Sequence[TrialRecord]) -> dict[str, TrialRow]:
    return {record.candidate: trial_row(record, sweep.state) for record in records}


def pairs_of(home: Path, limit: str) -> list[Pair]:
    """The candidates of both sweeps under `limit`, in the order in which the first one tried them."""
    ledgers = [Ledger(home, f"{layout}-{limit}") for layout in LAYOUTS]
    one, two = (_rows(ledger.read_sweep(), ledger.read_trials()) for ledger in ledgers)
    return [Pair(one.get(candidate), two.get(candidate)) for candidate in {**one, **two}]


def table(pairs: Sequence[Pair]) -> Table:
    """A row for each pair."""
    rows = tuple(
        (
            str(pair.known.trial),
            pair.known.label,
            *(row.summary if row is not None else "not tried" for row in (pair.one, pair.two)),
            *(_peak(row) for row in (pair.one, pair.two)),
            pair.verdict,
        )
        for pair in pairs
    )
    return Table("One node and two", COLUMNS, rows, frozenset(COLUMNS) - {"trial", *COLUMNS[4:6]})


def _peak(row: TrialRow | None) -> str:
    return format_bytes(row.peak_memory_bytes) if row is not None and row.peak_memory_bytes is not None else ""


def machine() -> str:
    """This machine and what ran on it, in words."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    memory_gib = psutil.virtual_memory().total / GIB
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return f"{psutil.cpu_count()} CPUs ({processor}), {memory_gib:.0f} GiB; {packages}; {time.strftime('%Y-%m-%d')}"


def section(pairs: Sequence[Pair], limit: str, seconds: dict[str, float]) -> str:
    """The pairs under one limit, as Markdown."""
    verdicts = [pair.verdict for pair in pairs]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts), reverse=True))
    text = f"{seconds['one-node']:.0f} s on one node, {seconds['two-nodes']:.0f} s on two. Outcomes: {counts}."
    return f"## {limit} a rank\n\n{text}\n\n{markdown_table(table(pairs))}"


def page(sections: Sequence[str], trials: int) -> str:
    """The measurement as a Markdown page."""
    paragraphs = (
        f"`python -m benchmarks.two_nodes --trials {trials}`: {machine()}.",
        "The quickstart with two devices a trial, over one Ray node of two CPU slots and over two nodes of one slot "
        "each, which lie on the same machine and talk over loopback: nothing here says how fast a real network is. "
        f"Outcomes may differ only where a measured peak lies within {NEAR_FRACTION:.0%} of the limit. Seconds are the "
        "whole command's and do not compare on a machine that is busy with other work.",
    )
    text = (textwrap.fill(paragraph, width=120, break_on_hyphens=False) for paragraph in paragraphs)
    return "\n\n".join(["# Two nodes beside one", *text, *sections]) + "\n"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--limits", nargs="+", default=["320MiB", "192MiB"], help="device memory of a rank")
    parser.add_argument("--home", type=Path, help="keep the sweeps here; by default they are removed")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    sections, verdicts = [], set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = arguments.home or folder / "home"
        os.environ |= token_environment(folder)
        for limit in arguments.limits:
            settings = [f"budget.trials={arguments.trials}", f"limits.device_memory={limit}"]
            seconds = {
                layout: sweep_over(slots, f"{layout}-{limit}", home, settings) for layout, slots in LAYOUTS.items()
            }
            pairs = pairs_of(home, limit)
            verdicts |= {pair.verdict for pair in pairs}
            sections.append(section(pairs, limit, seconds))
    text = page(sections, arguments.trials)
    arguments.output.write_text(text)
    print(text)
    if "DIFFERENT" in verdicts:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
