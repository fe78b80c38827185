"""A finished sweep as a landscape: every trial with its knobs, its outcome, and what was predicted of it beforehand.

    python -m benchmarks.record_landscape SWEEP_FOLDER [--reruns SWEEP_FOLDER ...] [--output FOLDER]
        [--cache .brimful/cache]

SWEEP_FOLDER is HOME/sweeps/NAME. The table (NAME.csv, NAME.json, NAME without `landscape-`) goes to FOLDER
(benchmarks/landscapes). Predictions are those of Brimful's own bill and clock that has learned nothing from the sweep.
`--reruns` are sweeps of some of the same configurations: how much the two differ is what the noise of the table is
made from. A re-run never changes a row: mending the best alone would make it worse than its neighbours.
"""

import argparse
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.landscapes.table import write_landscape
from orchestrator.contract.config import Knobs
from orchestrator.contract.errors import BrimfulError, UsageError
from orchestrator.contract.facts import Facts
from orchestrator.contract.handoff import read_model
from orchestrator.contract.outcome import Measurement, Ok, OomDevice, OomHost, OverLimit, Rejected
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import GIB
from orchestrator.placement.forecast import Forecaster, cached_tracer, sweep_forecaster
from orchestrator.spec.sweep import SweepSpec
from orchestrator.sweep.ledger import Ledger

FOLDER = Path(__file__).parent / "landscapes"
PREFIX = "landscape-"
PACKAGES = ("torch", "deepspeed", "transformers", "peft")
MOST_SHIFT = 0.1
"""Of a session's median log tokens/s."""
_NUMBERS = ("lora_rank", "reduce_bucket_size", "allgather_bucket_size", "micro_batch", "zero_stage")


def ledger_at(folder: Path) -> Ledger:
    """The sweep whose folder is HOME/sweeps/NAME."""
    folder = folder.resolve()
    return Ledger(folder.parent.parent, folder.name)


def knobs_of(spec: Mapping[str, Any], records: Sequence[TrialRecord]) -> list[str]:
    """Knobs of which the spec's search section gives several choices, in the order of their declaration; where it names
    none, those that differ between trials."""
    searched = (spec.get("search") or {}).get("knobs") or {}
    if searched:
        return [name for name in Knobs.model_fields if isinstance(each := searched.get(name), list) and len(each) > 1]
    return [name for name in Knobs.model_fields if len({getattr(record.config.knobs, name) for record in records}) > 1]


def knob_value(record: TrialRecord, name: str) -> str | int:
    """As the table has it: 0 and `none` for a knob without an effect."""
    value = record.config.knobs.model_dump(mode="json")[name]
    if value is None:
        return 0 if name in _NUMBERS else "none"
    return value if isinstance(value, int) else str(value)


def row_of(record: TrialRecord, knobs: Sequence[str], forecaster: Forecaster) -> dict[str, Any]:
    """One line of the table. What is not known is None."""
    outcome, measured = record.outcome, record.measurement
    assert outcome is not None, f"trial {record.trial} has not ended"
    forecast = forecaster.forecast(record.config, replays=False)
    failed = {OomDevice: "gpu", OverLimit: "gpu", OomHost: "host"}.get(type(outcome), "")
    return {
        **{name: knob_value(record, name) for name in knobs},
        "feasible": int(isinstance(outcome, Ok)),
        "oom_kind": failed,
        "tokens_per_s": measured and round(measured.tokens_per_second, 2),
        "peak_gib": measured and round(measured.peak_memory_bytes / GIB, 6),
        "host_gib": measured and round(_resident_bytes(measured) / GIB, 6),
        "prior_tokens_per_s": round(forecast.tokens_per_second, 2),
        "prior_peak_gib": round(forecast.needed_bytes / GIB, 6),
        "prior_host_gib": round(forecast.verdict.bill.peak_host_bytes / GIB, 6),
        "prior_probability_fits": forecast.probability_fits and round(forecast.probability_fits, 4),
        "outcome": outcome.kind,
        "phase": outcome.phase.value if isinstance(outcome, OomDevice | OomHost) else None,
        "tokens_per_s_low": measured and round(measured.tokens_per_second_low, 2),
        "tokens_per_s_high": measured and round(measured.tokens_per_second_high, 2),
        "measured_steps": measured and measured.measured_steps,
        "peak_bytes": measured and measured.peak_memory_bytes,
        "needed_bytes": outcome.needed_bytes if isinstance(outcome, OomDevice) else None,
    }


def _resident_bytes(measured: Measurement) -> int:
    return sum(rank.peak_resident_bytes for rank in measured.ranks)


def noise_of(records: Sequence[TrialRecord], reruns: Sequence[Sequence[TrialRecord]]) -> dict[str, Any]:
    """How far runs of one configuration lie apart.

    `noise`: standard deviation of one run's log tokens/s, from re-runs once each session's median shift is taken away.
    Sessions that are shifted by more than MOST_SHIFT found the machine in another state, so their speeds are left out;
    without any other it is the median half width of the 95 % intervals over 1.96, a lower bound: what differs from run
    to run comes on top. Peaks and outcomes count from all sessions.
    """
    first = {record.candidate: record for record in records}
    pairs = [[(first[again.candidate], again) for again in each if again.candidate in first] for each in reruns]
    measured = [[(once, again) for once, again in each if once.measurement and again.measurement] for each in pairs]
    ratios = [np.array([log(_speed(again) / _speed(once)) for once, again in each]) for each in measured if each]
    beside = [
        float(each) for found in ratios if abs(np.median(found)) < MOST_SHIFT for each in found - np.median(found)
    ]
    known: dict[str, Any] = _interval_noise(records)
    if beside:
        known = {"noise": round(float(np.std(beside)) / sqrt(2), 4), "noise_from": f"{len(beside)} re-runs"}
    if not ratios:
        return known
    peaks = [log(_peak(again) / _peak(once)) for each in measured for once, again in each]
    same = [
        once.outcome.kind == again.outcome.kind
        for each in pairs
        for once, again in each
        if once.outcome and again.outcome
    ]
    return known | {
        "rerun_shifts": [round(float(np.median(found)), 4) for found in ratios],
        "rerun_deviations": [round(float(np.std(found)) / sqrt(2), 4) for found in ratios],
        "rerun_peak_deviation": round(float(np.std(peaks)) / sqrt(2), 4),
        "rerun_outcomes_same": f"{sum(same)} of {len(same)}",
    }


def _interval_noise(records: Sequence[TrialRecord]) -> dict[str, Any]:
    measured = [record.measurement for record in records if record.measurement]
    halves = [log(each.tokens_per_second_high / each.tokens_per_second) for each in measured]
    noise = float(np.median(halves)) / 1.96 if halves else 0.0
    return {"noise": round(noise, 4), "noise_from": "95 % intervals of single runs: a lower bound"}


def _speed(record: TrialRecord) -> float:
    return record.measurement.tokens_per_second if record.measurement else float("nan")


def _peak(record: TrialRecord) -> float:
    return float(record.measurement.peak_memory_bytes) if record.measurement else float("nan")


def facts_of(ledger: Ledger, spec: SweepSpec, facts: Facts, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """What NAME.json says of machine, versions and date."""
    created = time.gmtime(ledger.read_sweep().created_s)
    limit_bytes = records[0].config.limits.device_memory_bytes or facts.device_memory_bytes
    host_bytes = spec.limits.host_memory or psutil.virtual_memory().total
    return {
        "name": ledger.name.removeprefix(PREFIX),
        "kind": "measured",
        "model": f"{facts.model.model_type} of {facts.model.total_parameters:,} weights",
        "hardware": f"{spec.resources.devices_per_trial} x {facts.device_name}",
        "machine": f"{platform.machine()}, {psutil.cpu_count()} CPU cores, "
        f"{psutil.virtual_memory().total / GIB:.0f} GiB, {platform.system()}",
        "precision": records[0].config.knobs.precision.value,
        "seq": records[0].config.data.sequence_length,
        "global_sequences": records[0].config.train.global_batch,
        "mem_limit_gib": round((limit_bytes or 0) / GIB, 6),
        "host_limit_gib": round(host_bytes / GIB, 3),
        "n_gpus": records[0].config.world_size,
        "params": float(facts.model.total_parameters),
        "date": time.strftime("%Y-%m-%d", created),
        "versions": facts.versions | {name: version(name) for name in PACKAGES if name not in facts.versions},
        "trials": len(records),
        "outcomes": {kind: sum(r.outcome.kind == kind for r in records if r.outcome) for kind in _kinds(records)},
    }


def _kinds(records: Sequence[TrialRecord]) -> list[str]:
    return sorted({record.outcome.kind for record in records if record.outcome})


def landscape_of(folder: Path, reruns: Sequence[Path], cache: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts and rows of the sweep at `folder`. Trials that were not launched, or have not ended, have no row.

    Raises BrimfulError when there is no such sweep, or its model cannot be traced."""
    ledger = ledger_at(folder)
    sweep = ledger.read_sweep()
    spec = SweepSpec.model_validate(sweep.spec)
    facts = read_model(ledger.facts_file, Facts)
    records = [each for each in ledger.read_trials() if each.outcome and not isinstance(each.outcome, Rejected)]
    if not records:
        raise UsageError(f"{folder}: no trial of this sweep has run")
    forecaster = sweep_forecaster(spec, facts, records[0].config.threads_per_rank, cached_tracer(cache))
    knobs = knobs_of(sweep.spec, records)
    rows = [row_of(record, knobs, forecaster) for record in records]
    again = [ledger_at(each).read_trials() for each in reruns]
    return facts_of(ledger, spec, facts, records) | noise_of(records, again) | {"knobs": knobs}, rows


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="SWEEP_FOLDER", type=Path)
    parser.add_argument("--reruns", type=Path, nargs="*", default=[], metavar="SWEEP_FOLDER")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--cache", type=Path, default=Path(".brimful/cache"), help="folder of traces")
    chosen = parser.parse_args(arguments)
    try:
        about, rows = landscape_of(chosen.sweep, chosen.reruns, chosen.cache)
    except BrimfulError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    path = write_landscape(chosen.output, about, rows)
    print(f"{path}: {len(rows)} trials, {about['outcomes']}, noise {about['noise']:.1%} ({about['noise_from']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
