"""Searches a recorded sweep again by another strategy: what would it have found, and after how many launches?

    python -m benchmarks.replay SWEEP_FOLDER|TABLE.csv --strategy NAME [NAME ...] [--seeds 10] [--budget 40]
        [--workers 1] [--json] [--cache .brimful/cache]

SWEEP_FOLDER is HOME/sweeps/NAME. Candidates are the trials that have ended; nothing is run: what a launch tells is
what the sweep measured, with the noise of its intervals. `launches to 95 %` is of the fastest feasible throughput.
Exit code 2: there is no such sweep or table, or the strategy cannot play it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.landscapes.table import Landscape, UnreadableLandscape, landscape, read_landscape
from benchmarks.record_landscape import landscape_of
from benchmarks.strategies.__main__ import STRATEGIES
from benchmarks.strategies.play import Unplayable, play
from benchmarks.strategies.scores import scores
from orchestrator.contract.errors import BrimfulError

COLUMNS = {
    "launches to 95 %, median": "launches_to_5_pct_median",
    "p90": "launches_to_5_pct_p90",
    "solved": "solved_5_pct",
    "regret @5": "regret_after_5",
    "@10": "regret_after_10",
    "@20": "regret_after_20",
    "end": "regret_at_end",
    "OOM share": "oom_share",
    "launches": "launches_median",
}


def recorded(path: Path, cache: Path) -> Landscape:
    """The sweep's folder or the table at `path`. Raises UnreadableLandscape and BrimfulError."""
    if path.suffix == ".csv":
        return read_landscape(path)
    facts, rows = landscape_of(path, [], cache)
    found = landscape(facts, rows)
    if not found.feasible.any():
        raise UnreadableLandscape(f"{path}: no trial of this sweep has fitted")
    return found


def replay(land: Landscape, names: Sequence[str], seeds: int, budget: int, workers: int) -> dict[str, Any]:
    """Scores by strategy. Raises Unplayable."""
    return {
        name: scores([play(land, STRATEGIES[name], seed, budget, workers) for seed in range(seeds)]) for name in names
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", metavar="SWEEP_FOLDER|TABLE.csv", type=Path)
    parser.add_argument("--strategy", nargs="+", default=["guided"], choices=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--seeds", type=positive, default=10)
    parser.add_argument("--budget", type=positive, default=40)
    parser.add_argument("--workers", type=positive, default=1)
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--cache", type=Path, default=Path(".brimful/cache"), help="folder of traces")
    chosen = parser.parse_args(arguments)
    try:
        land = recorded(chosen.recorded, chosen.cache)
        found = replay(land, chosen.strategy, chosen.seeds, chosen.budget, chosen.workers)
    except (BrimfulError, UnreadableLandscape, Unplayable) as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return 0
    fitting = int(land.feasible.sum())
    kind = land.facts.get("kind", "simulated")
    title = (
        f"{land.name} ({kind}): {len(land.candidates)} configurations, {fitting} fit, best {land.best:,.0f} tokens/s"
    )
    table = Table(title=title, header_style="bold", title_justify="left")
    for column in ("strategy", *COLUMNS):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name, each in found.items():
        table.add_row(name, *(_cell(each[key]) for key in COLUMNS.values()))
    Console(width=140).print(table)
    return 0


def _cell(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:.3f}" if isinstance(value, float) and not value.is_integer() else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
