"""Is the speed that a report states what plain training reaches?

    python -m benchmarks.confirmed_speed quickstart [--home .brimful] [--pairs 5] [--steps 200] [--json] [--page FILE]

Takes the winner of a finished sweep as it is reported, with its interval. Then, turn by turn: the trial measured
again as its confirmation was, and the exported train.py (transformers' Trainer with DeepSpeed and PEFT, no Brimful in
it) over `--steps` optimizer steps, counted end to end with all that passes between them. Each pair is printed as it
ends.

The reported speed holds when the median of script over trial is within 2 % of 1, or, where the machine's noise is
wider, when the script's median lies inside the reported 95 % interval. Exit code 1 when it does not.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.export_reproduces import PROBE_AND_WARM_UP_STEPS, again, export, exported
from orchestrator.contract.record import TrialRecord
from orchestrator.search.ranking import best
from orchestrator.search.reported import Reported, reported
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger

TOLERANCE = 0.02
"""How far the median ratio may be from 1 (the project's goal for reported speeds)."""


@dataclass(frozen=True)
class Pair:
    """One turn, in tokens/s without padding, all ranks together."""

    trial_tokens_per_second: float
    script_tokens_per_second: float

    @property
    def ratio(self) -> float:
        """Script over trial."""
        return self.script_tokens_per_second / self.trial_tokens_per_second


@dataclass(frozen=True)
class Result:
    """All turns beside what the sweep reports of its winner."""

    sweep: str
    label: str
    device: str
    steps: int
    runs: int
    """Runs of the confirmation behind the reported figure; 0: it is the search's."""
    search_tokens_per_second: float
    reported_tokens_per_second: float
    reported_low: float
    reported_high: float
    pairs: tuple[Pair, ...]

    @property
    def median_ratio(self) -> float:
        """Median over pairs of script over trial."""
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def script_median(self) -> float:
        """Median tokens/s of the script."""
        return statistics.median(pair.script_tokens_per_second for pair in self.pairs)

    @property
    def is_within_tolerance(self) -> bool:
        """Whether trial and script agree turn by turn."""
        return abs(self.median_ratio - 1) <= TOLERANCE

    @property
    def is_inside_interval(self) -> bool:
        """Whether the script reaches what the report promises."""
        return self.reported_low <= self.script_median <= self.reported_high

    @property
    def holds(self) -> bool:
        """Whether either is true."""
        return self.is_within_tolerance or self.is_inside_interval

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        if self.is_within_tolerance:
            where = "inside" if self.is_inside_interval else "outside of"
            return f"holds: within {TOLERANCE:.0%} turn by turn ({where} the reported interval)"
        if self.is_inside_interval:
            return f"holds: inside the reported interval (not within {TOLERANCE:.0%} turn by turn)"
        return f"does not hold: neither within {TOLERANCE:.0%} nor inside the reported interval"


def result_lines(result: Result) -> list[str]:
    """The result for a terminal."""
    half = (result.reported_high - result.reported_low) / 2 / result.reported_tokens_per_second
    return [
        f"reported: {result.reported_tokens_per_second:,.4g} tokens/s +-{half:.1%} ({result.reported_low:,.4g} to "
        f"{result.reported_high:,.4g}), {result.runs} confirmation runs; the search had found "
        f"{result.search_tokens_per_second:,.4g}",
        f"script: median {result.script_median:,.4g} tokens/s, "
        f"{result.script_median / result.reported_tokens_per_second:.3f} of what is reported",
        f"median ratio, script over trial: {result.median_ratio:.3f}",
        result.verdict,
    ]


def page(result: Result, command: str) -> str:
    """The text of a page under docs/measurements."""
    rows = [
        f"| {number} | {pair.trial_tokens_per_second:,.4g} | {pair.script_tokens_per_second:,.4g} | {pair.ratio:.3f} |"
        for number, pair in enumerate(result.pairs, start=1)
    ]
    said = [f"- {line}" for line in result_lines(result)]
    return "\n".join(
        [
            "# The reported speed beside plain training",
            "",
            f"`{command}`, on {result.device}; {datetime.now(UTC):%Y-%m-%d}. The winner of {result.sweep}"
            f" ({result.label}). In each turn the trial is measured again as its confirmation was, then the exported"
            f" train.py trains {result.steps} optimizer steps, counted end to end.",
            "",
            "| turn | trial, tokens/s | script, tokens/s | script / trial |",
            "|---|---|---|---|",
            *rows,
            "",
            *said,
            "",
        ]
    )


def as_document(result: Result) -> dict[str, object]:
    """The result for programs."""
    ratios = [round(pair.ratio, 4) for pair in result.pairs]
    return {
        **asdict(result),
        "ratios": ratios,
        "median_ratio": round(result.median_ratio, 4),
        "script_over_reported": round(result.script_median / result.reported_tokens_per_second, 4),
        "is_within_tolerance": result.is_within_tolerance,
        "is_inside_interval": result.is_inside_interval,
        "verdict": result.verdict,
    }


def take_turns(name: str, home: Path, winner: TrialRecord, pairs: int, steps: int) -> list[Pair]:
    """Run the trial and the script by turns."""
    turns = []
    measure = winner.config.measure.model_copy(update={"quality": None})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export(name, home, folder / "export")
        for number in range(1, pairs + 1):
            trial = again(winner, folder / f"trial{number}", measure)
            script = exported(folder / "export", folder / f"output{number}", steps)
            turns.append(Pair(trial["tokens_per_second"], script["end_to_end_tokens_per_second"]))
            print(
                f"pair {number}: trial {turns[-1].trial_tokens_per_second:,.4g}, script "
                f"{turns[-1].script_tokens_per_second:,.4g} tokens/s, ratio {turns[-1].ratio:.3f}",
                file=sys.stderr,
                flush=True,
            )
    return turns


def announce(winner: TrialRecord, figures: Reported, pairs: int, steps: int) -> None:
    """What is run, and about how long it takes."""
    script_s = figures.mean_step_s * (steps + PROBE_AND_WARM_UP_STEPS)
    print(
        f"trial {winner.trial} ({winner.label}): {pairs} pairs of {steps} steps of {figures.mean_step_s:.2f} s, "
        f"{pairs * script_s / 60:.1f} min in the script's steps alone",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--home", type=Path, default=Path(".brimful"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="write the text of a page under docs/measurements to this file")
    options = parser.parse_args(arguments)
    ledger = Ledger(options.home, options.name)
    spec = SweepSpec.model_validate(ledger.read_sweep().spec)
    records = ledger.read_trials()
    winner = best(spec.objective, records, spec.limits.eval_loss_within)
    if winner is None or winner.measurement is None:
        raise SystemExit(f"sweep {options.name} has no winner")
    figures = reported(records)[winner.trial]
    announce(winner, figures, options.pairs, options.steps)
    turns = take_turns(options.name, options.home, winner, options.pairs, options.steps)
    result = Result(
        sweep=options.name,
        label=winner.label,
        device=f"{winner.config.world_size} x {winner.measurement.device_name}, Python {platform.python_version()}",
        steps=options.steps,
        runs=figures.runs,
        search_tokens_per_second=winner.measurement.tokens_per_second,
        reported_tokens_per_second=figures.tokens_per_second,
        reported_low=figures.tokens_per_second_low,
        reported_high=figures.tokens_per_second_high,
        pairs=tuple(turns),
    )
    print(json.dumps(as_document(result), indent=1) if options.json else "\n".join(result_lines(result)))
    if options.page is not None:
        command = f"python -m benchmarks.confirmed_speed {options.name} --pairs {options.pairs} --steps {options.steps}"
        options.page.write_text(page(result, command))
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
