"""DeepSpeed's own autotuner beside Brimful: the same model, rows, space and limit, each from its command to a winner.

    python -m benchmarks.against_deepspeed [KEY=VALUE ...] [--pairs 5] [--steps 100] [--json] [--out FILE.md]

Runs `brimful run` on benchmarks/against_deepspeed.yaml in an empty home (with Ray, then without), then the autotuner of
the installed DeepSpeed (`fast: false`), then trains with both winners in turns by benchmarks/plain_training.py, on CPU
ranks. Nothing else should run on the machine. KEY=VALUE changes the spec, for both sides.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.against_deepspeed_page import BrimfulResult, Comparison, Pair, page
from benchmarks.autotuner_run import SCRIPT, autotuner_config, cpu_environment, last_error, run_autotuner
from orchestrator.contract.outcome import Ok, OverLimit, Rejected
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import format_bytes
from orchestrator.placement.preflight import preflight
from orchestrator.search.ranking import best
from orchestrator.spec.load import load_spec
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger
from orchestrator.trial.device import cpu_name
from orchestrator.trial.preload import TRAINING_MODULES

SPEC = Path(__file__).parent / "against_deepspeed.yaml"
POOLS = ("ray", "local")
PACKAGES = ("deepspeed", "torch", "transformers", "ray", "optuna", "brimful")


def settings(spec: SweepSpec, cache: Path) -> dict[str, Any]:
    """What the plain script needs, its rows prepared under `cache`. Bucket sizes are those that Brimful takes."""
    facts = preflight(spec, str(SPEC), cache, threads_per_rank=1)
    rows = Path(facts.data.directory)
    assert spec.model.config is not None, "the benchmark's model is written out in its spec"
    width = int(str(spec.model.config["hidden_size"]))
    buckets = {"reduce_bucket_size": width**2, "allgather_bucket_size": width**2}
    sharded = {"stage3_prefetch_bucket_size": width**2 * 9 // 10, "stage3_param_persistence_threshold": 10 * width}
    return {
        "model": spec.model.config,
        "rows": str(rows),
        "pad_token_id": json.loads((rows / "data.json").read_text())["pad_token_id"],
        "learning_rate": spec.train.learning_rate,
        "weight_decay": spec.train.weight_decay,
        "seed": spec.train.seed,
        "memory_limit_bytes": spec.limits.device_memory,
        "threads": 1,
        "preload": [name for name in TRAINING_MODULES if not name.startswith("orchestrator.")],
        "zero_defaults": {"1": buckets, "2": buckets, "3": {"reduce_bucket_size": width**2, **sharded}},
    }


def run_brimful(pool: str, overrides: list[str], folder: Path, timeout_s: float) -> BrimfulResult:
    """`brimful run` in the empty home `folder`, and the export of its winner to `folder`/winner."""
    brimful = [sys.executable, "-m", "orchestrator.cli"]
    home = ["--home", str(folder)]
    name = load_spec(SPEC, overrides).spec.name
    command = [*brimful, "run", str(SPEC), *overrides, *home, "--pool", pool]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=sys.stderr, stdin=subprocess.DEVNULL) as run:
        try:
            run.wait(timeout_s)
        finally:
            # asked so, it ends its trials first; `with` waits for that
            if run.poll() is None:
                run.terminate()
    wall_s = time.perf_counter() - start_s
    if run.returncode != 0:
        raise SystemExit(f"`brimful run --pool {pool}` ended with code {run.returncode}")
    ledger = Ledger(folder, name)
    spec = SweepSpec.model_validate(ledger.read_sweep().spec)
    records = list(ledger.read_trials())
    winner = best(spec.objective, records)
    if winner is None:
        raise SystemExit(f"`brimful run --pool {pool}` found no configuration that fits")
    export = [*brimful, "export", name, *home, "-o", str(folder / "winner")]
    subprocess.run(export, check=True, stdout=sys.stderr)
    return brimful_result(pool, wall_s, records, winner.label)


def brimful_result(pool: str, wall_s: float, records: list[TrialRecord], label: str) -> BrimfulResult:
    """The figures of a finished sweep. A candidate that was predicted not to fit has a record, and no launch."""
    launched = [record for record in records if not isinstance(record.outcome, Rejected)]
    return BrimfulResult(
        pool=pool,
        wall_s=wall_s,
        trials=sum(len(record.searches) for record in launched),
        confirmations=sum(len(record.confirmations) for record in launched),
        failed=sum(not isinstance(record.outcome, Ok | OverLimit) for record in launched),
        not_launched=len(records) - len(launched),
        label=label,
    )


def throughput(config: Path, settings_file: Path, ranks: int, steps: int, folder: Path) -> float | None:
    """Tokens/s of one configuration by the neutral script; None when it fails, with the reason on standard error."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT)]
    words = ["--deepspeed_config", str(config), "--settings", str(settings_file), "--steps", str(steps)]
    result, log = folder / "result.json", folder / "training.log"
    with log.open("wb") as stream:
        subprocess.run(
            [sys.executable, *launcher, *words, "--result", str(result)],
            env={**os.environ, **cpu_environment()},
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
        )
    if not result.is_file():
        print(f"the neutral script failed with {config}: {last_error(log)}", file=sys.stderr)
        return None
    figures = json.loads(result.read_text())
    return float(figures["tokens"] / figures["seconds"])


def compare(arguments: argparse.Namespace, folder: Path) -> Comparison:
    """All of it, in `folder`."""
    spec = load_spec(SPEC, arguments.overrides).spec
    assert spec.search is not None, "the benchmark's spec names its space"
    assert spec.limits.device_memory is not None, "the benchmark's spec has a limit"
    ranks = spec.resources.devices_per_trial
    stages = [int(str(stage)) for stage in spec.search.knobs["zero_stage"]]
    micro_batches = [int(str(rows)) for rows in spec.search.knobs["micro_batch"]]
    settings_file = folder / "settings.json"
    settings_file.write_text(json.dumps(settings(spec, folder / "cache"), indent=1))
    sides = tuple(
        run_brimful(pool, arguments.overrides, folder / f"home-{pool}", arguments.timeout) for pool in arguments.pools
    )
    config = autotuner_config(spec.train.model_dump(), stages, micro_batches, ranks)
    tuner = run_autotuner(config, settings_file, ranks, folder / "autotuner", arguments.timeout)
    if tuner.optimal is None:
        raise SystemExit(f"the autotuner found no configuration: {tuner.experiments}")
    rival = folder / "autotuner_winner.json"
    rival.write_text(json.dumps(tuner.optimal))
    ours = folder / f"home-{arguments.pools[0]}" / "winner" / "ds_config.json"
    pairs = []
    for number in range(arguments.pairs):
        turn = [
            throughput(winner, settings_file, ranks, arguments.steps, folder / f"{number}-{winner.stem}")
            for winner in (rival, ours)
        ]
        pairs.append(Pair(*turn))
        print(f"pair {number + 1}: {pairs[-1]}", file=sys.stderr, flush=True)
    return Comparison(
        machine=f"{cpu_name()} and {format_bytes(psutil.virtual_memory().total)}",
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        date=datetime.date.today().isoformat(),
        space=f"ZeRO stages {stages} and micro-batches {micro_batches}, {spec.train.global_batch} rows a step",
        ranks=ranks,
        limit=format_bytes(spec.limits.device_memory),
        steps=arguments.steps,
        autotuner=tuner,
        brimful=sides,
        pairs=tuple(pairs),
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="timed optimizer steps of each turn")
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds that either side may take")
    parser.add_argument("--folder", type=Path, help="work in this empty folder and keep it, not in a temporary one")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON, not the page")
    parser.add_argument("--out", type=Path, help="write the page here too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() if arguments.folder is None else nullcontext(arguments.folder) as name:
        folder = Path(name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        result = compare(arguments, folder)
    text = page(result, "python -m benchmarks.against_deepspeed " + " ".join(arguments.overrides))
    if arguments.out is not None:
        arguments.out.write_text(text)
    print(json.dumps(result.document(), indent=1) if arguments.json else text)


if __name__ == "__main__":
    main()
