"""Writes docs/measurements/strategies.md: every comparison of strategies in one go.

    python -m benchmarks.strategies.page --simulated FOLDER [--seeds 10] [--slow-seeds 3] [--budget 40]
        [--output docs/measurements/strategies.md]

FOLDER holds the tables of `python -m benchmarks.landscapes.simulate FOLDER`; the measured ones are those of
benchmarks/landscapes. `tpe_*` and `gp_*` are played with `--slow-seeds`. Takes an hour or so on one core, most of it
the Gaussian process's.
"""

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import fill

import psutil

from benchmarks.landscapes.table import Landscape, UnreadableLandscape
from benchmarks.strategies.__main__ import STRATEGIES, TABLES, compare, reachable_of, report, tables_at
from benchmarks.strategies.play import Run
from benchmarks.strategies.scores import COLUMNS, cells, scores
from orchestrator.contract.units import GIB
from orchestrator.report.markdown import markdown_table
from orchestrator.report.tables import Table

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "strategies.md"
SLOW = ("tpe_fail", "tpe_constraint", "gp_constraint")
TOGETHER = ("guided", "guided_stop", "prior_order", "random_fit", "random", "tpe_constraint")
"""Those that can have several launches at once; tuners of others run one after another."""
REACHING = ("guided", "guided_stop", "prior_order", "random", "tpe_constraint", "deepspeed_fast", "deepspeed_full",
            "dsat_binary", "dsat_random", "dsat_asha")  # fmt: skip

_INTRODUCTION = """\
# Strategies side by side: launches to a good configuration

`python -m benchmarks.landscapes.simulate FOLDER` and `python -m benchmarks.strategies.page --simulated FOLDER`
({machine}; {packages}). Launches are counted, not
seconds: only the last column hangs on the machine.

A landscape is a table of all configurations of a space with what becomes of each. A strategy is played on it: what it
launches tells the table's value with the noise of a run. A launch is a distinct configuration; a profile run counts as
one. The incumbent is the fastest run as measured; it is judged by the table's own value against the best of the table.
"3 % median" and "p90": launches until the incumbent is within 3 % of the best, over all searches, one that never gets
there counting as infinitely many; "solved": the share that gets there within the budget of {budget} (25 in the table of
what the autotuner reaches). Regrets are medians.

{measured}
{simulated}
  No figure of these tables was measured on a GPU. The prediction is Brimful's own bill and clock; the truth prices the
  same work in another way, with non-idealities that the prediction does not know: dips at single micro-batches,
  saturation and fall-off, thrashing near the limit, partial overlap, shared PCIe switches, cliffs between nodes, a bill
  that is off by up to 14 % and more in single terms, traps (two settings of the prediction's favourite that are slow
  together), noise of 1 to 3 %. Both are ours, so what these tables show is how a strategy deals with errors of that
  kind, not how large they are on a real cluster.

`guided` is `search.sampler: guided`, `guided_stop` the same with a stop rule. `prior_order`, `random_fit`: those that
are predicted to fit, from the fastest down or by chance. `tpe_*` and `gp_*` are Optuna's TPESampler (multivariate,
group) and GPSampler, told of an OOM by FAIL or by a broken constraint, without a prediction; seeds: {slow}, of the
others {seeds}. `deepspeed_*` and `dsat_*` are **simulators** of DeepSpeed's autotuner and of Determined's dsat, written
from their documented algorithms (`benchmarks/strategies/`), not those programs; the other knobs are as a user sets
them: LoRA where the space has it, checkpointing, no offload, DeepSpeed's default buckets.
"""


def measured_text(land: Landscape) -> str:
    """What the table of a real machine is, and how far it can be trusted."""
    facts = land.facts
    near = int((land.tokens_per_s[land.feasible] >= 0.97 * land.best).sum())
    shifts = [f"{shift:+.2f}" for shift in facts.get("rerun_shifts", ())]
    text = (
        f"{len(land.candidates)} real trials of a {facts['model']} on {facts['hardware']} ({facts['date']}), all "
        f"launched; {int(land.feasible.sum())} ran, the others ran out of memory. {near} are within 3 % of the best. "
        f"Noise: {land.noise:.1%} ({facts['noise_from']})."
    )
    if shifts:
        text += (
            f" Re-runs ended alike in {facts['rerun_outcomes_same']}, with peaks {facts['rerun_peak_deviation']:.1%} "
            f"apart; their speeds were shifted (natural logarithm) by {', '.join(shifts)}. A session shifted by "
            "more than a tenth found the machine busy, and is left out of the noise."
        )
    return text


def _bullet(text: str) -> str:
    return fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def sections(
    measured: Sequence[Landscape], simulated: Sequence[Landscape], chosen: argparse.Namespace
) -> Iterator[Table]:
    """All tables of the page."""
    plays = [(name, chosen.slow_seeds if name in SLOW else chosen.seeds) for name in STRATEGIES]
    yield _table("Measured: one CPU core", measured, plays, chosen.budget)
    yield _table(f"Simulated: {len(simulated)} GPU clusters", simulated, plays, chosen.budget)
    together = [(name, seeds) for name, seeds in plays if name in TOGETHER]
    yield _table("Simulated, four launches at once", simulated, together, chosen.budget, workers=4)
    reaching = [(name, seeds) for name, seeds in plays if name in REACHING]
    part = reachable_of([*measured, *simulated])
    yield _table("All, of what DeepSpeed's autotuner can reach", part, reaching, min(chosen.budget, 25))


def _table(
    title: str, lands: Sequence[Landscape], plays: Sequence[tuple[str, int]], budget: int, workers: int = 1
) -> Table:
    rows = []
    for name, seeds in plays:
        runs: dict[str, list[Run]] = compare(lands, [name], seeds, budget, workers)[name]
        pooled = [run for each in runs.values() for run in each]
        if pooled:
            rows.append(cells(name, scores(pooled), budget))
    return Table(title, COLUMNS, tuple(rows), frozenset({COLUMNS[0]}))


def by_landscape(lands: Sequence[Landscape], seeds: int, budget: int) -> Table:
    """`guided` on each."""
    found = report(compare(lands, ["guided"], seeds, budget, 1), {"all": [land.name for land in lands]})["by_table"]
    rows = tuple(cells(name, each["guided"], budget) for name, each in found.items())
    return Table("guided, by landscape", ("landscape", *COLUMNS[1:]), rows, frozenset({"landscape"}))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--slow-seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=40)
    parser.add_argument("--output", type=Path, default=PAGE)
    chosen = parser.parse_args(arguments)
    try:
        measured, simulated = tables_at([TABLES]), tables_at([chosen.simulated])
    except UnreadableLandscape as error:
        print(error, file=sys.stderr)
        return 2
    names = ", ".join(land.name.partition("_")[2].replace("_", " on ", 1) for land in simulated)
    introduction = _INTRODUCTION.format(
        machine=f"{platform.machine()}, {psutil.cpu_count()} CPU cores, {psutil.virtual_memory().total / GIB:.0f} GiB",
        packages=", ".join(f"{name} {version(name)}" for name in ("optuna", "numpy", "scipy")),
        budget=chosen.budget,
        measured="\n".join(_bullet(f"**Measured** ({land.name}): {measured_text(land)}") for land in measured),
        simulated=_bullet(
            f"**Simulated** (`benchmarks.landscapes.truth`): {sum(len(land.candidates) for land in simulated):,} "
            f"configurations in all: {names}."
        ),
        slow=chosen.slow_seeds,
        seeds=chosen.seeds,
    )
    tables = [
        *sections(measured, simulated, chosen),
        by_landscape([*measured, *simulated], chosen.seeds, chosen.budget),
    ]
    parts = [introduction, *(f"## {table.title}\n\n{markdown_table(table)}\n" for table in tables)]
    chosen.output.write_text("\n".join(parts), encoding="utf-8")
    print(chosen.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
