"""How long does a space of ten million points take to plan, and is its best by prediction found?

    python -m benchmarks.big_space [--spec SPEC] [--home FOLDER] [--device NVIDIA-NAME] [--check 2000]

Runs `brimful plan SPEC --json` from the command line, twice if traces have to be made first: they are a cost of the
model, not of the space. Then the same path part by part in this process, as for a device of the table (its name as
PyTorch tells it), so that speed and the allocator are predicted too. Last, as many more points as `--check` says are
drawn from all of them at random and predicted: is one of them predicted better than the best that was listed? Nothing
is measured on a device here.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator import wiring
from orchestrator.cli.planning import forecasts_of
from orchestrator.contract.config import Precision
from orchestrator.contract.facts import Facts
from orchestrator.placement.forecast import Forecaster
from orchestrator.placement.preflight import preflight
from orchestrator.placement.promising import merit, with_promising
from orchestrator.space.candidates import Candidate, Space, build_space
from orchestrator.spec.hardware import lookup
from orchestrator.spec.load import load_spec

SPEC = Path(__file__).parent / "big_space.yaml"
DEVICE = "NVIDIA A100-SXM4-80GB"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Plan a space of ten million points.")
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--home", type=Path, help="keeps traces; unset: a temporary folder, so all are made anew")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--check", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="brimful-big-space-") as folder:
        home = arguments.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        first_s = _plan_s(arguments.spec, home)
        print(f"{first_s:7.2f} s  brimful plan, with traces that were missing")
        print(f"{_plan_s(arguments.spec, home):7.2f} s  brimful plan, with cached traces")
        _parts(arguments.spec, home, arguments.device, arguments.check)


def _plan_s(spec: Path, home: Path) -> float:
    command = [sys.executable, "-m", "orchestrator.cli", "plan", str(spec), "--json"]
    started_s = time.perf_counter()
    environment = {**os.environ, "BRIMFUL_HOME": str(home)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started_s


@contextmanager
def _timed(part: str) -> Iterator[None]:
    started_s, began_s = time.perf_counter(), time.process_time()
    yield
    taken_s, computed_s = time.perf_counter() - started_s, time.process_time() - began_s
    print(f"{taken_s:7.2f} s  {part} ({computed_s:.2f} s of this process' own computing)", flush=True)


def _parts(path: Path, home: Path, device: str, check: int) -> None:
    spec = load_spec(path).spec
    cache = home / "cache"
    with _timed("preflight of model and data, kept by the home"):
        facts = on_device(preflight(spec, str(path), cache, 1), device)
    with _timed("candidates drawn"):
        space = build_space(spec, facts)
    with _timed("profiles read or traced"):
        forecaster = wiring.build_forecaster(spec, facts, space, cache, lambda text: None)
    assert forecaster is not None, "the model of this spec can be traced"
    drawn = len(space.candidates)
    with _timed("drawn candidates predicted, the best of all sought"):
        space = with_promising(space, forecaster)
    with _timed("the others predicted, the best ones with the allocator"):
        forecasts = forecasts_of(space.candidates, forecaster)
    print(f"{space.raw_points:,} points; {drawn:,} candidates drawn, {len(space.candidates):,} listed")
    best = max(space.candidates, key=lambda each: merit(forecasts[each.id]))
    best_merit = merit(forecaster.forecast(best.config, replays=False))
    print(f"best by prediction: {best.label}, {forecasts[best.id].tokens_per_second:,.0f} tokens/s predicted")
    others = [other for other in _drawn(space, forecaster, check) if other.id != best.id]
    better = [other for other in others if merit(forecaster.forecast(other.config, replays=False)) > best_merit + 1e-6]
    print(f"of {len(others):,} others drawn from all points, {len(better)} are predicted better")


def _drawn(space: Space, forecaster: Forecaster, count: int) -> Iterator[Candidate]:
    draw = random.Random(1)
    for _ in range(count):
        chosen = {dimension.name: draw.choice(dimension.choices) for dimension in space.dimensions}
        candidate = space.resolve(chosen)
        if isinstance(candidate, Candidate) and forecaster.is_traced(candidate.config):
            yield candidate


def on_device(facts: Facts, name: str) -> Facts:
    """`facts` as a preflight on one device of the table would find them."""
    device = lookup(name)
    assert device is not None, f"{name} is not in the table"
    return facts.model_copy(
        update={
            "device": "cuda",
            "device_name": name,
            "device_memory_bytes": device.usable_memory_bytes,
            "peak_flops_per_s": {precision: device.peak_flops_per_s[precision] for precision in Precision},
            "peak_source": device.source,
        }
    )


if __name__ == "__main__":
    main()
