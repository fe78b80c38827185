"""Does the exported configuration train as fast, and in as much memory, as its trial measured?

    python -m benchmarks.export_reproduces quickstart [--home .brimful] [--pairs 5] [--steps 12]

Exports the winner of a finished sweep. Then, turn by turn: the trial again by `python -m orchestrator.trial`, and the
exported train.py (transformers' Trainer with DeepSpeed and PEFT, no Brimful in it) by its launch line, over the same
rows and as many steps. Prints each pair, the medians, and the ratio with its 95 % interval over pairs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.paired import mean_interval
from orchestrator.contract.config import MeasureSettings
from orchestrator.contract.handoff import AttemptFiles, write_atomic
from orchestrator.contract.outcome import Ok, OverLimit
from orchestrator.contract.record import TrialRecord
from orchestrator.search.ranking import best
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger

PROBE_AND_WARM_UP_STEPS = 3
METRICS = ("tokens_per_second", "peak_memory_bytes")


def again(record: TrialRecord, folder: Path, measure: MeasureSettings) -> dict[str, float]:
    """The trial once more, by hand."""
    folder.mkdir()
    files = AttemptFiles(folder)
    write_atomic(files.config, record.config.model_copy(update={"measure": measure}).model_dump_json())
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(record.config.world_size)]
    launcher = ranks if record.config.world_size > 1 else []
    run = subprocess.run(
        [sys.executable, *launcher, "-m", "orchestrator.trial", str(folder)], capture_output=True, text=True
    )
    outcome = files.read_outcome()
    if not isinstance(outcome, Ok | OverLimit):
        raise SystemExit(f"the trial did not run again: {outcome}\n{run.stderr}")
    return {name: getattr(outcome.measurement, name) for name in METRICS}


def exported(folder: Path, output: Path, steps: int) -> dict[str, float]:
    """One run of the exported script over `steps` measured steps: all that it prints."""
    words = ["--max-steps", str(PROBE_AND_WARM_UP_STEPS + steps), "--no-save", "--output", str(output)]
    run = subprocess.run(
        ["bash", str(folder / "launch.sh"), *words],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    results = [line for line in run.stdout.splitlines() if line.startswith('{"tokens_per_second"')]
    if not results:
        raise SystemExit(f"the exported script failed:\n{run.stdout}\n{run.stderr}")
    result: dict[str, float] = json.loads(results[-1])
    return result


def export(name: str, home: Path, folder: Path) -> None:
    """Export the best of the sweep `name` to `folder`."""
    command = [sys.executable, "-m", "orchestrator.cli", "export", name, "--home", str(home), "-o", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def verdict(pairs: list[tuple[dict[str, float], dict[str, float]]], metric: str) -> dict[str, float]:
    """Medians of both sides, their ratio, and the 95 % interval of the mean ratio over pairs."""
    ratios = [after[metric] / before[metric] for before, after in pairs]
    trial = statistics.median(before[metric] for before, _ in pairs)
    script = statistics.median(after[metric] for _, after in pairs)
    _, low, high = mean_interval(ratios)
    return {
        "trial_median": trial,
        "export_median": script,
        "ratio_of_medians": round(script / trial, 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--home", type=Path, default=Path(".brimful"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    ledger = Ledger(arguments.home, arguments.name)
    spec = SweepSpec.model_validate(ledger.read_sweep().spec)
    winner = best(spec.objective, ledger.read_trials())
    if winner is None:
        raise SystemExit(f"sweep {arguments.name} has no winner")
    steps = arguments.steps
    measure = MeasureSettings(warmup_steps=1, min_steps=steps, max_steps=steps, max_measure_s=3600)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(arguments.name, arguments.home, folder / "export")
        pairs = []
        for number in range(arguments.pairs):
            before = again(winner, folder / f"trial{number}", measure)
            after = exported(folder / "export", folder / f"output{number}", arguments.steps)
            print(f"pair {number + 1}: trial {before}, export {after}", file=sys.stderr, flush=True)
            pairs.append((before, after))
    result = {metric: verdict(pairs, metric) for metric in METRICS}
    document = {"configuration": winner.label, "pairs": arguments.pairs, "steps": arguments.steps, **result}
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
