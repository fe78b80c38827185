"""Strategies side by side: how many launches does each need on recorded and on simulated landscapes?

    python -m benchmarks.strategies [--tables FOLDER|FILE.csv ...] [--strategies NAME ...] [--seeds 5] [--budget 40]
        [--workers 1] [--reachable] [--by-table] [--json]

`--reachable`: only of what DeepSpeed's autotuner can reach, ZeRO stages and micro-batches beside a user's settings.

Tables are those of `benchmarks.landscapes` (default: the folder of the measured ones). What a launch tells comes from
the table with its noise; nothing is run. Measured and simulated tables are pooled apart. A strategy of others is
simulated from its documentation (`deepspeed_*`, `dsat_*`) or is Optuna's own (`tpe_*`, `gp_*`). One that cannot play a
table, as it lacks a ZeRO stage, has no score on it. Exit code 2: a table cannot be read, or a strategy is unknown.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.landscapes.table import Landscape, UnreadableLandscape, read_landscape
from benchmarks.strategies import deepspeed_autotuner, dsat, guided, optuna_samplers, plain
from benchmarks.strategies.play import Factory, Run, Unplayable, play
from benchmarks.strategies.scores import COLUMNS, cells, scores
from benchmarks.strategies.stages import reachable

TABLES = Path(__file__).parent.parent / "landscapes"
STRATEGIES: dict[str, Factory] = {
    "guided": guided.guided,
    "guided_stop": guided.guided_stop,
    "prior_order": plain.prior_order,
    "random_fit": plain.random_fit,
    "random": plain.random,
    "grid": plain.grid,
    "tpe_fail": optuna_samplers.tpe_fail,
    "tpe_constraint": optuna_samplers.tpe_constraint,
    "gp_constraint": optuna_samplers.gp_constraint,
    "deepspeed_fast": deepspeed_autotuner.deepspeed_fast,
    "deepspeed_full": deepspeed_autotuner.deepspeed_full,
    "dsat_binary": dsat.dsat_binary,
    "dsat_random": dsat.dsat_random,
    "dsat_asha": dsat.dsat_asha,
}


def tables_at(paths: Iterable[Path]) -> list[Landscape]:
    """Of files, and of all CSV files of folders. Raises UnreadableLandscape."""
    files = [file for path in paths for file in (sorted(path.glob("*.csv")) if path.is_dir() else [path])]
    if not files:
        raise UnreadableLandscape("there is no table; `python -m benchmarks.landscapes.simulate FOLDER` makes some")
    return [read_landscape(file) for file in files]


def reachable_of(landscapes: Sequence[Landscape]) -> list[Landscape]:
    """The autotuner's part of each; those of which nothing fits are left out, and that is said."""
    found = []
    for land in landscapes:
        try:
            found.append(reachable(land))
        except Unplayable as reason:
            print(f"left out: {reason}", file=sys.stderr)
    return found


def compare(
    landscapes: Sequence[Landscape], names: Sequence[str], seeds: int, budget: int, workers: int
) -> dict[str, dict[str, list[Run]]]:
    """Searches by strategy and landscape. Progress goes to standard error."""
    found: dict[str, dict[str, list[Run]]] = {}
    for name in names:
        found[name] = {}
        for land in landscapes:
            try:
                found[name][land.name] = [play(land, STRATEGIES[name], seed, budget, workers) for seed in range(seeds)]
            except Unplayable as reason:
                print(f"{name}: {reason}", file=sys.stderr)
        print(f"{name}: {len(landscapes)} landscapes, {seeds} seeds", file=sys.stderr, flush=True)
    return found


def kinds_of(landscapes: Sequence[Landscape]) -> dict[str, list[str]]:
    """Names of the measured and of the simulated ones. A table that does not say is taken as simulated."""
    kinds: dict[str, list[str]] = {}
    for land in landscapes:
        kinds.setdefault(str(land.facts.get("kind", "simulated")), []).append(land.name)
    return kinds


def report(found: dict[str, dict[str, list[Run]]], kinds: dict[str, list[str]]) -> dict[str, Any]:
    """Scores by kind of landscape (pooled) and by landscape, then by strategy."""
    by_kind = {
        kind: {name: scores(pooled) for name, runs in found.items() if (pooled := _pooled(runs, lands))}
        for kind, lands in kinds.items()
    }
    by_table = {
        land: {name: scores(runs[land]) for name, runs in found.items() if land in runs}
        for lands in kinds.values()
        for land in lands
    }
    return {"pooled": by_kind, "by_table": by_table}


def _pooled(runs: dict[str, list[Run]], lands: Sequence[str]) -> list[Run]:
    return [run for land in lands for run in runs.get(land, ())]


def print_table(title: str, found: dict[str, Any], budget: int, console: Console) -> None:
    """A row a strategy."""
    table = Table(title=title, header_style="bold", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for name, each in found.items():
        table.add_row(*cells(name, each, budget))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tables", type=Path, nargs="+", default=[TABLES], metavar="FOLDER|FILE.csv")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME", choices=list(STRATEGIES))
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--budget", type=positive, default=40)
    parser.add_argument("--workers", type=positive, default=1)
    parser.add_argument("--reachable", action="store_true", help="only what DeepSpeed's autotuner can reach")
    parser.add_argument("--by-table", action="store_true", help="print a table for each landscape too")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    chosen = parser.parse_args(arguments)
    try:
        landscapes = tables_at(chosen.tables)
    except UnreadableLandscape as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.reachable:
        landscapes = reachable_of(landscapes)
    kinds = kinds_of(landscapes)
    found = report(compare(landscapes, chosen.strategies, chosen.seeds, chosen.budget, chosen.workers), kinds)
    if chosen.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return 0
    console = Console(width=180)
    for kind, each in found["pooled"].items():
        title = f"{len(kinds[kind])} {kind} landscapes, {chosen.seeds} seeds, {chosen.workers} at once"
        print_table(title, each, chosen.budget, console)
    for name, each in found["by_table"].items() if chosen.by_table else ():
        print_table(name, each, chosen.budget, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
