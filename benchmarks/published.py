"""Predicts published runs and tells how far off it is, by source and in total.

    python -m benchmarks.published FILE.csv [--json] [--rows ROWS.csv] [--cache .brimful/cache] [--check]

FILE.csv has a run a row, with the columns that docs/measurements/published.md names. Rows of tiers A and B that state
enough are traced (weightless, cached by content), priced and compared. `--json` prints one object for `total` (both
tiers), `tier_a` and each source. `--check` exits 1 when a target is missed. Exit code 2: FILE.csv cannot be read.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.published_cells import Row
from benchmarks.published_prices import Unpriced, predict_all
from benchmarks.published_rows import PublishedRun, Skipped, interpret
from benchmarks.published_scores import TARGETS, ScoredRun, Scores, scores, with_margins

NEEDED_COLUMNS = (
    "id", "source", "model", "method", "lora_rank", "lora_targets", "precision", "optimizer", "parallelism", "n_gpus",
    "gpu", "gpu_gb", "offload", "grad_ckpt", "seq_len", "micro_batch", "grad_accum", "packed", "attention", "compile",
    "fused_ce", "oom", "tokens_per_s_per_gpu", "samples_per_s", "step_time_s", "notes", "peak_allocated_gib",
    "peak_reserved_gib", "peak_smi_gib", "tier",
)  # fmt: skip
_ROW_FIELDS = (
    "id", "source", "tier", "outcome", "allocated_gib", "predicted_allocated_gib", "allocated_error_pct",
    "reserved_gib", "predicted_reserved_low_gib", "predicted_reserved_high_gib", "fits_probability", "tokens_per_s",
    "predicted_tokens_per_s", "phase", "term", "skipped",
)  # fmt: skip


class UnreadableTable(Exception):
    """The file is no table of published measurements; the text names it and what is wrong."""


def read_table(path: Path) -> list[Row]:
    """The rows of `path`. Raises UnreadableTable."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableTable(f"{path}: cannot be read: {error}") from error
    missing = [name for name in NEEDED_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise UnreadableTable(f"{path}: columns are missing: {', '.join(missing)}")
    return [{name: row.get(name) or "" for name in reader.fieldnames or ()} for row in rows]


def evaluate(rows: Sequence[Row], cache: Path) -> tuple[list[ScoredRun], list[Skipped]]:
    """Every row with its prediction, or with the reason why it has none, in the order of the table."""
    found = [interpret(row) for row in rows]
    skipped = [row for row in found if isinstance(row, Skipped)]
    runs = [row for row in found if isinstance(row, PublishedRun)]
    priced = []
    for run, prediction in zip(runs, predict_all(runs, cache), strict=True):
        if isinstance(prediction, Unpriced):
            skipped.append(Skipped(run.id, run.source, run.tier, run.measured.outcome, str(prediction)))
        else:
            priced.append(ScoredRun(run, prediction))
    return with_margins(priced), skipped


def groups(runs: Sequence[ScoredRun], skipped: Sequence[Skipped]) -> dict[str, Scores]:
    """Scores of all rows, of tier A alone, and of each source."""
    result = {
        "total": scores(runs, skipped),
        "tier_a": scores([run for run in runs if run.run.tier == "A"], [row for row in skipped if row.tier == "A"]),
    }
    sources = dict.fromkeys([run.run.source for run in runs] + [row.source for row in skipped])
    for source in sources:
        result[source] = scores(
            [run for run in runs if run.run.source == source], [row for row in skipped if row.source == source]
        )
    return result


def print_tables(found: dict[str, Scores], console: Console) -> None:
    """The scores for people: a table of groups, why rows were skipped, and the targets."""
    table = Table(title="Predicted against published", header_style="bold")
    columns = {
        "scored": "rows_scored",
        "skipped": "rows_skipped",
        "allocated": "allocated_rows",
        "median %": "allocated_median_abs_error_pct",
        "p90 %": "allocated_p90_abs_error_pct",
        "reserved": "reserved_rows",
        "inside %": "reserved_inside_interval_pct",
        "OOM": "oom_rows",
        "recall": "oom_recall",
        "precision": "oom_precision",
        "failed": "failed_rows",
        "as OOM %": "failed_predicted_oom_pct",
        "tokens/s": "tokens_per_s_rows",
        "error %": "tokens_per_s_median_abs_error_pct",
        "rank": "tokens_per_s_rank_correlation",
    }
    table.add_column("source")
    for title in columns:
        table.add_column(title, justify="right")
    for name, group in found.items():
        table.add_row(name, *("-" if group[key] is None else str(group[key]) for key in columns.values()))
    console.print(table)
    reasons = found["total"]["skipped_reasons"]
    assert isinstance(reasons, dict)
    for reason, count in reasons.items():
        console.print(f"skipped {count:>4}  {reason}", highlight=False)
    console.print(
        "tokens/s: rows of a source are halved by turns; one constant of each half corrects the other.\n"
        "reserved: the replay's interval, widened by what 90 % of other sources' allocated errors stay under.",
        highlight=False,
    )
    for target in TARGETS:
        verdict = "met" if target.is_met(found) else "missed"
        bound = "at most" if target.is_ceiling else "at least"
        value = found[target.group][target.measure]
        console.print(
            f"{verdict:>6}  {target.group} {target.measure} {value} ({bound} {target.limit})", highlight=False
        )


def write_rows(runs: Sequence[ScoredRun], skipped: Sequence[Skipped], path: Path) -> None:
    """One line a row: measured, predicted, and what binds."""
    gib = 2**30
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _ROW_FIELDS)
        writer.writeheader()
        for scored in runs:
            run, prediction, error = scored.run, scored.prediction, scored.allocated_error
            measured = run.measured
            writer.writerow(
                {
                    "id": run.id,
                    "source": run.source,
                    "tier": run.tier,
                    "outcome": measured.outcome,
                    "allocated_gib": measured.allocated_bytes and round(measured.allocated_bytes / gib, 3),
                    "predicted_allocated_gib": round(prediction.allocated_bytes / gib, 3),
                    "allocated_error_pct": None if error is None else round(100 * error, 2),
                    "reserved_gib": measured.reserved_bytes and round(measured.reserved_bytes / gib, 3),
                    "predicted_reserved_low_gib": round(prediction.reserved_bytes[0] / gib, 3),
                    "predicted_reserved_high_gib": round(prediction.reserved_bytes[1] / gib, 3),
                    "fits_probability": prediction.fits_probability,
                    "tokens_per_s": measured.tokens_per_s,
                    "predicted_tokens_per_s": prediction.tokens_per_s,
                    "phase": prediction.phase,
                    "term": prediction.term,
                }
            )
        for row in skipped:
            writer.writerow({"id": row.id, "source": row.source, "tier": row.tier, "outcome": row.outcome,
                             "skipped": row.reason})  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="FILE.csv", type=Path)
    parser.add_argument("--json", action="store_true", help="print the scores as JSON")
    parser.add_argument("--rows", type=Path, help="write every row with its prediction to this CSV file")
    parser.add_argument("--cache", type=Path, default=Path(".brimful/cache"), help="folder of traces")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    chosen = parser.parse_args(arguments)
    try:
        rows = read_table(chosen.table)
    except UnreadableTable as error:
        print(error, file=sys.stderr)
        return 2
    runs, skipped = evaluate(rows, chosen.cache)
    found = groups(runs, skipped)
    if chosen.rows is not None:
        write_rows(runs, skipped, chosen.rows)
    if chosen.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        print_tables(found, Console(width=200))
    return int(chosen.check and not all(target.is_met(found) for target in TARGETS))


if __name__ == "__main__":
    sys.exit(main())
