"""How well are memory and speed of a sweep's trials predicted?

    python -m benchmarks.predicted_sweep [--trials 24] [--home FOLDER] [--sweep FOLDER] [--cache FOLDER] [--output PAGE]

Without `--sweep`, runs the quickstart's candidates in random order under a limit that none of them meets, so that every
peak is measured; with it, reads a sweep that was run (HOME/sweeps/NAME) and leaves it as it is. Predicts each trial
from its configuration alone (a trace of the model on tensors without data), then prints predicted beside measured: peak
bytes as the bill gives them, and corrected by what *other* trials showed; the rank correlation of predicted and
measured tokens per second, with the constants that a sweep starts from and with those fitted to other trials; and how
far predictions are off after a few trials. Writes all to the page (docs/measurements/predicted-quickstart.md).

The trials are dealt in parts, at most 24, in turns; "other trials" are those of all other parts.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import log
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.record_landscape import ledger_at
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
from orchestrator.predict.constants import CPU_CLOCK, ClockConstants
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
COLUMNS = (
    "configuration", "measured peak", "bill", "corrected", "error", "measured tokens/s", "predicted tokens/s",
    "at start",
)  # fmt: skip
PARTS = 24
LESSONS = (1, 3, 5, 10, 20)
DRAWS = 10
PACKAGES = ("torch", "deepspeed", "transformers", "peft")


@dataclass(frozen=True)
class Row:
    """One measured trial beside its prediction. Corrected figures come from the other trials' residuals."""

    label: str
    measured_bytes: int
    bill_bytes: int
    corrected_bytes: float
    measured_tokens_per_s: float
    start_tokens_per_s: float
    """Predicted with the constants that a sweep starts from."""
    predicted_tokens_per_s: float

    @property
    def error(self) -> float:
        """Of the corrected peak."""
        return self.corrected_bytes / self.measured_bytes - 1


def run_sweep(home: Path, trials: int) -> None:
    """Measure the quickstart's candidates."""
    overrides = [f"name={SWEEP}", f"limits.device_memory={ROOMY}", "search.sampler=random", "search.seed=1"]
    overrides += ["resources.max_concurrent_trials=1", "measure.min_steps=6", "measure.relative_precision=0.05"]
    # every trial is measured whole, and once
    overrides += ["measure.racing=false", "measure.confirm.top=0"]
    command = [sys.executable, "-m", "orchestrator.cli", "run", str(SPEC), *overrides, f"budget.trials={trials}"]
    subprocess.run([*command, "--home", str(home), "--no-tracking"], check=True, stdout=sys.stderr)


@dataclass(frozen=True)
class Lesson:
    """After how many trials the clock is how far off those that had no part in it; root mean squares of log errors."""

    trials: int
    fitted: float
    common_factor: float
    """By the constants that a sweep starts from and one factor, the trials' median."""


def rows_of(sweep: Path, cache: Path) -> tuple[list[Row], list[Lesson]]:
    """Every trial of the sweep in the folder `sweep` that was measured, and what the clock learns from few of them."""
    ledger = ledger_at(sweep)
    facts = read_model(ledger.facts_file, Facts)
    measured = [(record, found) for record in ledger.read_trials() if (found := _measurement(record)) is not None]
    lengths = prepared_rows(facts.data)
    requests = [
        trace_request(record.config, facts.device, lengths.is_padded(record.config.knobs.micro_batch))
        for record, _ in measured
    ]
    profiles = trace_all(requests, cache, processes=2, progress=_progress)
    keys = [request_key(request) for request in requests]
    outcomes = [profiles[key] for key in keys]
    usable = [profile for profile in outcomes if not isinstance(profile, Untraceable)]
    assert len(usable) == len(outcomes), [str(each) for each in outcomes if isinstance(each, Untraceable)]
    runs = [
        _run(profile, record.config, lengths, facts, measurement)
        for profile, (record, measurement) in zip(usable, measured, strict=True)
    ]
    memory = [
        MemoryObservation(f"{key} {record.config.knobs.zero_stage}", predicted_bytes, measurement.peak_memory_bytes)
        for key, (predicted_bytes, _), (record, measurement) in zip(keys, runs, measured, strict=True)
    ]
    steps = [run for _, run in runs]
    padding = [lengths.padding_fraction(record.config.knobs.micro_batch) for record, _ in measured]
    corrected, fitted = _by_other_parts(memory, steps)
    rows = [
        Row(
            label=record.label,
            measured_bytes=measurement.peak_memory_bytes,
            bill_bytes=round(runs[number][0]),
            corrected_bytes=corrected[number],
            measured_tokens_per_s=measurement.tokens_per_second,
            start_tokens_per_s=_tokens_per_s(steps[number], CPU_CLOCK, padding[number]),
            predicted_tokens_per_s=_tokens_per_s(steps[number], fitted[number], padding[number]),
        )
        for number, (record, measurement) in enumerate(measured)
    ]
    return rows, [_lesson(steps, count) for count in LESSONS if 2 * count <= len(steps)]


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


def _by_other_parts(
    memory: Sequence[MemoryObservation], steps: Sequence[TimeObservation]
) -> tuple[list[float], list[ClockConstants]]:
    """Of each trial its peak and the clock's constants, by the trials of all parts but its own."""
    prior = MemoryPrior(spread=0.08, base_spread_bytes=32 * MIB, noise=0.06)
    corrected, fitted = [0.0] * len(steps), [CPU_CLOCK] * len(steps)
    parts = min(PARTS, len(steps))
    for part in range(parts):
        others = [number for number in range(len(steps)) if number % parts != part]
        peaks = calibrate_memory([memory[number] for number in others], prior)
        clock = calibrate([steps[number] for number in others], CPU_CLOCK)
        for number in range(part, len(steps), parts):
            seen = memory[number]
            corrected[number] = peaks.corrected_bytes(seen.structure, seen.predicted_bytes)
            fitted[number] = clock.constants
    return corrected, fitted


def _tokens_per_s(seen: TimeObservation, constants: ClockConstants, padding_fraction: float) -> float:
    return priced(seen.work, seen.processor, seen.links, constants, padding_fraction).tokens_per_second


def _log_errors(steps: Sequence[TimeObservation], constants: ClockConstants) -> NDArray[np.float64]:
    return np.array(
        [log(priced(seen.work, seen.processor, seen.links, constants).step_s / seen.step_s) for seen in steps]
    )


def _lesson(steps: Sequence[TimeObservation], count: int) -> Lesson:
    """The mean over draws of `count` trials."""
    fitted, common = [], []
    for seed in range(DRAWS):
        order = np.random.default_rng(seed).permutation(len(steps))
        known, others = [steps[number] for number in order[:count]], [steps[number] for number in order[count:]]
        learned = _log_errors(others, calibrate(known, CPU_CLOCK).constants)
        shifted = _log_errors(others, CPU_CLOCK) - np.median(_log_errors(known, CPU_CLOCK))
        fitted.append(float(np.sqrt(np.mean(learned**2))))
        common.append(float(np.sqrt(np.mean(shifted**2))))
    return Lesson(count, float(np.mean(fitted)), float(np.mean(common)))


def _progress(done: int, total: int) -> None:
    print(f"traced {done} of {total} structures", file=sys.stderr)


def summary(rows: Sequence[Row], lessons: Sequence[Lesson]) -> str:
    """The figures that the tables come to."""
    errors = np.abs([row.error for row in rows])
    memory = spearmanr([row.bill_bytes for row in rows], [row.measured_bytes for row in rows]).statistic
    measured = [row.measured_tokens_per_s for row in rows]
    start = spearmanr([row.start_tokens_per_s for row in rows], measured).statistic
    speed = spearmanr([row.predicted_tokens_per_s for row in rows], measured).statistic
    learned = "; ".join(
        f"{lesson.trials} trials {lesson.fitted:.1%} (by a common factor {lesson.common_factor:.1%})"
        for lesson in lessons
    )
    return (
        f"{len(rows)} trials. Peak, corrected by the other trials: median error {np.median(errors):.1%}, "
        f"90th percentile {np.quantile(errors, 0.9):.1%}, worst {errors.max():.1%}. "
        f"Rank correlation: bill and measured peak {memory:.3f}, predicted and measured tokens/s {speed:.3f} "
        f"(with the constants that a sweep starts from {start:.3f}). Step times of trials that the clock has not seen, "
        f"root mean square error after {learned}."
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
            f"{row.start_tokens_per_s:,.0f}",
        )
        for row in sorted(rows, key=lambda row: -row.measured_tokens_per_s)
    )
    return Table("Predicted beside measured", COLUMNS, cells, frozenset({"configuration"}))


def page(title: str, rows: Sequence[Row], lessons: Sequence[Lesson]) -> str:
    """The page of measurements, in Markdown."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    machine = f"{platform.machine()}, {psutil.cpu_count()} CPU cores, {psutil.virtual_memory().total / GIB:.0f} GiB"
    return "\n".join(
        [
            f"# Predicted beside measured: {title}",
            "",
            "Measured by `python -m benchmarks.predicted_sweep` on a machine without a GPU "
            f"({machine}; {packages}). The bill is of tensors; what a process takes beside them is fitted on the other "
            "trials, and so are the clock's constants.",
            "",
            summary(rows, lessons),
            "",
            markdown_table(table(rows)),
            "",
        ]
    )


def main() -> int:
    """Measure unless a sweep is named, predict, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--home", type=Path, help="where the sweep is to be run (default: a temporary folder)")
    parser.add_argument("--sweep", type=Path, help="the folder of a sweep that was run already: HOME/sweeps/NAME")
    parser.add_argument("--cache", type=Path, help="folder of traces (default: in the home)")
    parser.add_argument("--title", default="the quickstart's candidates", help="what the page's trials are")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="brimful-predicted-") as folder:
        home = arguments.home or Path(folder)
        if arguments.sweep is None:
            run_sweep(home, arguments.trials)
        sweep = arguments.sweep or Ledger(home, SWEEP).folder
        rows, lessons = rows_of(sweep, arguments.cache or home / "cache")
    print(summary(rows, lessons))
    arguments.output.write_text(page(arguments.title, rows, lessons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
