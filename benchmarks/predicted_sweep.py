"""How well are memory and speed of a sweep's trials predicted?

    python -m benchmarks.predicted_sweep [--trials 24] [--home FOLDER --sweep NAME] [--output PAGE]

Without `--sweep`, runs the quickstart's candidates in random order under a limit that none of them meets, so that every
peak is measured. Predicts each trial from its configuration alone (a trace of the model on tensors without data), then
prints predicted beside measured: peak bytes as the bill gives them, and corrected by what the *other* trials showed
(leave one out); and the rank correlation of predicted and measured tokens per second. Writes the tables to the page
(docs/measurements/predicted-quickstart.md).
"""

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
from scipy.stats import spearmanr

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.facts import Facts
from orchestrator.contract.handoff import read_model
from orchestrator.contract.outcome import Measurement, Ok, OverLimit
from orchestrator.contract.profile import Profile
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import GIB, MIB, format_bytes
from orchestrator.placement.rows import Rows, prepared_rows
from orchestrator.placement.tracing import Untraceable, request_key, trace_all
from orchestrator.predict.calibrate import MemoryObservation, MemoryPrior, TimeObservation, calibrate, calibrate_memory
from orchestrator.predict.constants import CPU_CLOCK
from orchestrator.predict.machine import cpu_links, cpu_processor
from orchestrator.predict.memory import bill
from orchestrator.predict.overhead import CPU
from orchestrator.predict.time import priced
from orchestrator.predict.trials import job_of, trace_request
from orchestrator.predict.work import step_work
from orchestrator.report.markdown import markdown_table
from orchestrator.report.tables import Table
from orchestrator.sweep.ledger import Ledger

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "experiments" / "quickstart.yaml"
PAGE = ROOT / "docs" / "measurements" / "predicted-quickstart.md"
SWEEP = "predicted"
ROOMY = "4GiB"
COLUMNS = ("configuration", "measured peak", "bill", "corrected", "error", "measured tokens/s", "predicted tokens/s")
PACKAGES = ("torch", "deepspeed", "transformers", "peft")


@dataclass(frozen=True)
class Row:
    """One measured trial beside its prediction. Corrected figures come from the other trials' residuals."""

    label: str
    measured_bytes: int
    bill_bytes: int
    corrected_bytes: float
    measured_tokens_per_s: float
    predicted_tokens_per_s: float

    @property
    def error(self) -> float:
        """Of the corrected peak."""
        return self.corrected_bytes / self.measured_bytes - 1


def run_sweep(home: Path, trials: int) -> None:
    """Measure the quickstart's candidates."""
    overrides = [f"name={SWEEP}", f"limits.device_memory={ROOMY}", "search.sampler=random", "search.seed=1"]
    overrides += ["resources.max_concurrent_trials=1", "measure.min_steps=6", "measure.relative_precision=0.05"]
    command = [sys.executable, "-m", "orchestrator.cli", "run", str(SPEC), *overrides, f"budget.trials={trials}"]
    subprocess.run([*command, "--home", str(home), "--no-tracking"], check=True, stdout=sys.stderr)


def rows_of(home: Path, name: str, cache: Path) -> list[Row]:
    """Every trial of the sweep `name` that was measured."""
    ledger = Ledger(home, name)
    facts = read_model(ledger.facts_file, Facts)
    measured = [(record, found) for record in ledger.read_trials() if (found := _measurement(record)) is not None]
    lengths = prepared_rows(facts.data)
    requests = [
        trace_request(record.config, facts.device, lengths.is_padded(record.config.knobs.micro_batch))
        for record, _ in measured
    ]
    profiles = trace_all(requests, cache, processes=2, progress=_progress)
    keys = [request_key(request) for request in requests]
    found = [profiles[key] for key in keys]
    usable = [profile for profile in found if not isinstance(profile, Untraceable)]
    assert len(usable) == len(found), [str(each) for each in found if isinstance(each, Untraceable)]
    runs = [
        _run(profile, record.config, lengths, facts, measurement)
        for profile, (record, measurement) in zip(usable, measured, strict=True)
    ]
    memory = [
        MemoryObservation(f"{key} {record.config.knobs.zero_stage}", predicted_bytes, measurement.peak_memory_bytes)
        for key, (predicted_bytes, _), (record, measurement) in zip(keys, runs, measured, strict=True)
    ]
    return [
        Row(
            label=record.label,
            measured_bytes=measurement.peak_memory_bytes,
            bill_bytes=round(runs[number][0]),
            corrected_bytes=_corrected(memory, number),
            measured_tokens_per_s=measurement.tokens_per_second,
            predicted_tokens_per_s=_predicted_speed(
                [run for _, run in runs], number, lengths.padding_fraction(record.config.knobs.micro_batch)
            ),
        )
        for number, (record, measurement) in enumerate(measured)
    ]


def _measurement(record: TrialRecord) -> Measurement | None:
    outcome = record.outcome
    return outcome.measurement if isinstance(outcome, Ok | OverLimit) else None


def _run(
    profile: Profile, config: TrialConfig, lengths: Rows, facts: Facts, measurement: Measurement
) -> tuple[float, TimeObservation]:
    """Bytes for the longest row, and the work of a step over rows as long as the data's are."""
    job = job_of(config, facts.device, row_tokens=lengths.longest_tokens)
    usual = job_of(config, facts.device, row_tokens=max(1, round(lengths.width_tokens(config.knobs.micro_batch))))
    processor = cpu_processor(facts.peak_flops_per_s, config.threads_per_rank)
    seen = TimeObservation(
        work=step_work(profile, usual),
        processor=processor,
        links=cpu_links(psutil.cpu_count(logical=False) or 1),
        step_s=float(np.median(measurement.step_s)),
    )
    return float(bill(profile, job, CPU).peak_device_bytes), seen


def _corrected(observations: Sequence[MemoryObservation], number: int) -> float:
    prior = MemoryPrior(spread=0.08, base_spread_bytes=32 * MIB, noise=0.06)
    fit = calibrate_memory([seen for other, seen in enumerate(observations) if other != number], prior)
    return fit.corrected_bytes(observations[number].structure, observations[number].predicted_bytes)


def _predicted_speed(observations: Sequence[TimeObservation], number: int, padding_fraction: float) -> float:
    fit = calibrate([seen for other, seen in enumerate(observations) if other != number], CPU_CLOCK)
    seen = observations[number]
    return priced(seen.work, seen.processor, seen.links, fit.constants, padding_fraction).tokens_per_second


def _progress(done: int, total: int) -> None:
    print(f"traced {done} of {total} structures", file=sys.stderr)


def summary(rows: Sequence[Row]) -> str:
    """The figures that the tables come to."""
    errors = np.abs([row.error for row in rows])
    memory = spearmanr([row.bill_bytes for row in rows], [row.measured_bytes for row in rows]).statistic
    speed = spearmanr(
        [row.predicted_tokens_per_s for row in rows], [row.measured_tokens_per_s for row in rows]
    ).statistic
    return (
        f"{len(rows)} trials. Peak, corrected by the other trials: median error {np.median(errors):.1%}, "
        f"90th percentile {np.quantile(errors, 0.9):.1%}, worst {errors.max():.1%}. "
        f"Rank correlation: bill and measured peak {memory:.3f}, predicted and measured tokens/s {speed:.3f}."
    )


def table(rows: Sequence[Row]) -> Table:
    """A row for each trial, the fastest first."""
    cells = tuple(
        (
            row.label,
            format_bytes(row.measured_bytes),
            format_bytes(row.bill_bytes),
            format_bytes(round(row.corrected_bytes)),
            f"{row.error:+.1%}",
            f"{row.measured_tokens_per_s:,.0f}",
            f"{row.predicted_tokens_per_s:,.0f}",
        )
        for row in sorted(rows, key=lambda row: -row.measured_tokens_per_s)
    )
    return Table("Predicted beside measured", COLUMNS, cells, frozenset({"configuration"}))


def page(rows: Sequence[Row]) -> str:
    """The page of measurements, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    machine = f"{platform.machine()}, {psutil.cpu_count()} CPU cores, {psutil.virtual_memory().total / GIB:.0f} GiB"
    return "\n".join(
        [
            "# Predicted beside measured: the quickstart's candidates",
            "",
            "Measured by `python -m benchmarks.predicted_sweep` on a machine without a GPU "
            f"({machine}; {packages}). The bill is of tensors; what a process takes beside them is fitted on the other "
            "trials, and so are the clock's constants.",
            "",
            summary(rows),
            "",
            markdown_table(table(rows)),
            "",
        ]
    )


def main() -> int:
    """Measure unless a sweep is named, predict, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--home", type=Path, help="where the sweep is, or is to be run (default: a temporary folder)")
    parser.add_argument("--sweep", help="a sweep that was run already")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="brimful-predicted-") as folder:
        home = arguments.home or Path(folder)
        if arguments.sweep is None:
            run_sweep(home, arguments.trials)
        rows = rows_of(home, arguments.sweep or SWEEP, home / "cache")
    print(summary(rows))
    arguments.output.write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
