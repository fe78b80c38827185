"""`guided` on what DeepSpeed's autotuner can reach: ZeRO stage and micro-batch, all else as a user sets it.

    python -m benchmarks.dsa_subspace FOLDER|FILE.csv ... [--seeds 10] [--budget 25] [--strategies NAME ...]

Full checkpointing, no offload, LoRA of rank 8 (or 16) where the space has it, default buckets. Landscapes without two
micro-batches of each stage there, or where nothing there fits, are left out and named.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.__main__ import STRATEGIES, print_table, tables_at
from benchmarks.strategies.play import Unplayable, play
from benchmarks.strategies.scores import scores
from benchmarks.strategies.stages import stages_of


def subspace(landscape: Landscape) -> Landscape:
    """The part of `landscape`. Raises Unplayable where there is none, or nothing in it fits."""
    stages = stages_of(landscape)
    rows = np.array(sorted(row for (_, _, bucket), row in stages.rows.items() if bucket == stages.default_bucket))
    if not landscape.feasible[rows].any():
        raise Unplayable(f"{landscape.name}: nothing fits beside a user's settings")
    return replace(
        landscape,
        candidates=tuple(landscape.candidates[row] for row in rows),
        feasible=landscape.feasible[rows],
        oom_kinds=tuple(landscape.oom_kinds[row] for row in rows),
        tokens_per_s=landscape.tokens_per_s[rows],
        peak_gib=landscape.peak_gib[rows],
        host_gib=landscape.host_gib[rows],
        prior={name: column[rows] for name, column in landscape.prior.items()},
    )


def subspaces(landscapes: Sequence[Landscape]) -> list[Landscape]:
    """Those that there are; what is left out is said on standard error."""
    found = []
    for each in landscapes:
        try:
            found.append(subspace(each))
        except Unplayable as reason:
            print(f"left out: {reason}", file=sys.stderr)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", metavar="FOLDER|FILE.csv")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=int, default=25)
    parser.add_argument("--strategies", nargs="+", default=["guided", "prior_order"], choices=list(STRATEGIES))
    given = parser.parse_args()
    found = subspaces(tables_at(given.tables))
    rows = {
        name: scores(
            [play(each, STRATEGIES[name], seed, given.budget) for each in found for seed in range(given.seeds)]
        )
        for name in given.strategies
    }
    print_table(f"{len(found)} subspaces, {given.seeds} seeds", rows, given.budget, Console(width=180))


if __name__ == "__main__":
    main()
