"""Seconds from dispatch to the first training step, trial after trial, and what grows meanwhile.

    python -m benchmarks.trial_overhead [--pool local|ray] [--trials 20]

Runs a ZeRO-2 candidate of the quickstart `--trials` times with one rank and as often with two, in warm lanes. Prints
for each the median and the range, the growth of the templates' resident memory, file handles and processes, and beside
it the same trial once in a cold process.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from orchestrator.backends.local_pool import LocalPool
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.config import MeasureSettings, TrialConfig
from orchestrator.contract.handoff import AttemptFiles, trial_command, write_atomic
from orchestrator.contract.units import format_bytes
from orchestrator.placement.preflight import preflight
from orchestrator.space.candidates import build_space
from orchestrator.spec.load import load_spec
from orchestrator.sweep.loop import launch_overhead_s
from orchestrator.sweep.ports import Launch, TrialPool

SPEC = Path(__file__).parent.parent / "experiments" / "quickstart.yaml"
QUICK = MeasureSettings(warmup_steps=0, min_steps=2, max_steps=2)
TARGET_S = {1: 1.5, 2: 2.5}


def short_trial(folder: Path, world_size: int) -> TrialConfig:
    """A ZeRO-2 candidate of the quickstart over `world_size` ranks, with few rows and measured as briefly as may be."""
    overrides = [f"resources.devices_per_trial={world_size}", "train.global_batch=2", "search.micro_batch=[1]"]
    spec = load_spec(SPEC, overrides).spec
    space = build_space(spec, preflight(spec, str(SPEC), folder, threads_per_rank=1))
    sharded = next(each.config for each in space.candidates if each.config.knobs.zero_stage == 2)
    return sharded.model_copy(update={"measure": QUICK})


def run_one(pool: TrialPool, config: TrialConfig, directory: Path) -> float:
    """Run one trial to its end. Returns seconds from dispatch to its first training step."""
    directory.mkdir(parents=True)
    files = AttemptFiles(directory)
    write_atomic(files.config, config.model_dump_json())
    while not pool.has_room(config.world_size):
        pool.wait(0.2)
    dispatched_s = time.time()
    pool.launch(Launch(directory.name, directory, config))
    ended = []
    while not ended:
        ended = pool.wait(1.0)
    overhead_s = launch_overhead_s(files, dispatched_s)
    if overhead_s is None:
        raise SystemExit(f"the trial ended before its first step: {ended[0].outcome}")
    return overhead_s


def footprint() -> tuple[int, int, int]:
    """Resident bytes, file handles and processes of everything that this benchmark started."""
    resident_bytes = handles = processes = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            resident_bytes += process.memory_info().rss
            handles += process.num_fds()
            processes += 1
        except psutil.NoSuchProcess:
            continue
    return resident_bytes, handles, processes


def measure(pool: TrialPool, config: TrialConfig, folder: Path, trials: int) -> dict[str, object]:
    """Overheads and growth of `trials` trials after one that warms the lane."""
    run_one(pool, config, folder / "warm")
    before = footprint()
    overheads_s = [run_one(pool, config, folder / f"trial{number}") for number in range(trials)]
    after = footprint()
    return {
        "ranks": config.world_size,
        "trials": trials,
        "median_s": round(statistics.median(overheads_s), 3),
        "min_s": round(min(overheads_s), 3),
        "max_s": round(max(overheads_s), 3),
        "target_s": TARGET_S[config.world_size],
        "resident_growth": format_bytes(after[0] - before[0]),
        "file_handle_growth": after[1] - before[1],
        "process_growth": after[2] - before[2],
    }


def cold(config: TrialConfig, folder: Path) -> float:
    """Seconds from starting a cold process to its first training step."""
    folder.mkdir()
    files = AttemptFiles(folder)
    write_atomic(files.config, config.model_dump_json())
    started_s = time.time()
    subprocess.run(trial_command(folder), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return round(launch_overhead_s(files, started_s) or float("nan"), 3)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", choices=("local", "ray"), default="local")
    parser.add_argument("--trials", type=int, default=20)
    arguments = parser.parse_args()
    results: dict[str, object] = {"machine": platform.machine(), "cpus": psutil.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = {ranks: short_trial(folder / "cache", ranks) for ranks in (1, 2)}
        pool: TrialPool = LocalPool(devices=2) if arguments.pool == "local" else RayPool(address=None)
        try:
            rows = [measure(pool, config, folder / f"{ranks}", arguments.trials) for ranks, config in configs.items()]
        finally:
            pool.close()
        results |= {"pool": arguments.pool, "warm": rows, "cold_one_rank_s": cold(configs[1], folder / "cold")}
    json.dump(results, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
