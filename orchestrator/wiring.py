"""The only module that names concrete backends: it builds what a sweep is run with."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.errors import BrimfulError, StateError, UsageError
from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Measurement
from orchestrator.contract.record import TrialRecord
from orchestrator.placement.forecast import Forecaster, cached_tracer, sweep_forecaster
from orchestrator.placement.gate import ForecastGate, without_hopeless
from orchestrator.placement.inspected import InspectedNode
from orchestrator.placement.jobs import ClusterJobs
from orchestrator.placement.local_devices import cpu_slots, gpus
from orchestrator.placement.node_facts import node_facts
from orchestrator.placement.tracing import Untraceable
from orchestrator.predict import flops
from orchestrator.search.guided import Expected
from orchestrator.search.ranking import is_per_device
from orchestrator.space.candidates import Space
from orchestrator.spec.sweep import Sampler, SearchSection, SweepSpec, TrackingSection
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.ports import NODE_TIMEOUT_S, RunLog, Strategy, TrialPool
from orchestrator.sweep.state import Efficiency

if TYPE_CHECKING:
    from orchestrator.backends.mlflow_server import UiCommand

POOLS = ("ray", "local")
DEFAULT_POOL = "ray"
SYNC_DEADLINE_S = 600.0


def threads_per_rank() -> int:
    """This machine's cores for each GPU; 1 without GPUs, where a device is a core."""
    devices = len(gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
    return max(1, len(os.sched_getaffinity(0)) // devices) if devices else 1


def build_pool(name: str, address: str | None, node_timeout_s: float = NODE_TIMEOUT_S) -> TrialPool:
    """The pool `ray` or `local`. Raises UsageError for any other word, ClusterUnreachableError without a cluster.

    `node_timeout_s`: how long nodes are waited for that the next trial needs while nothing runs.
    """
    if name == "local":
        if address is not None:
            raise UsageError("--address joins a Ray cluster; leave it out, or choose --pool ray")
        from orchestrator.backends.local_pool import LocalPool

        return LocalPool(threads_per_device=threads_per_rank())
    if name == "ray":
        from orchestrator.backends.ray_pool import RayPool

        return RayPool(address, threads_per_device=threads_per_rank(), node_timeout_s=node_timeout_s)
    raise UsageError(f"--pool {name}: there is no such pool; choose {' or '.join(POOLS)}")


def inspected_nodes(address: str | None) -> list[InspectedNode]:
    """The nodes of the Ray cluster at `address`, or without one this machine. Raises ClusterUnreachableError."""
    if address is not None:
        from orchestrator.backends.ray_inspect import inspected_nodes

        return inspected_nodes(address)
    facts = node_facts()
    return [InspectedNode(name=facts.host, devices=len(facts.devices) or facts.cores, facts=facts)]


def build_jobs(url: str, headers: Mapping[str, str], verify: str | bool, patience_s: float | None) -> ClusterJobs:
    """The jobs of the cluster whose Ray dashboard serves `url`. A dashboard that answered before is waited for
    `patience_s` (None: two minutes). Raises ClusterUnreachableError."""
    from orchestrator.backends.ray_jobs import AWAY_DEADLINE_S, JobOptions, RayJobs

    return RayJobs(url, JobOptions(headers, verify, AWAY_DEADLINE_S if patience_s is None else patience_s))


def build_strategy(
    spec: SweepSpec,
    space: Space,
    folder: Path,
    records: Sequence[TrialRecord],
    forecaster: Forecaster | None,
    say: Callable[[str], None],
) -> Strategy:
    """The sampler that the spec names, taught with the trials so far and, where it can use them, with predictions."""
    from orchestrator.backends.optuna_study import OptunaStrategy

    is_guided = forecaster is not None and _sampler_of(spec) is Sampler.GUIDED
    per_device = is_per_device(spec.objective)
    expected = _expected(space, forecaster, per_device) if is_guided and forecaster is not None else None
    loss_within = spec.limits.eval_loss_within
    return OptunaStrategy(space, spec.search, spec.objective, folder, records, expected, loss_within, say)


def _sampler_of(spec: SweepSpec) -> Sampler:
    return (spec.search or SearchSection()).sampler


def _expected(space: Space, forecaster: Forecaster, per_device: bool) -> dict[str, Expected] | None:
    """None where no speed is known of the device."""
    found = {}
    for candidate in space.candidates:
        forecast = forecaster.forecast(candidate.config, replays=False)
        if forecast.time is None:
            return None
        capacity_bytes = forecast.verdict.capacity_bytes
        share = forecast.needed_bytes / capacity_bytes if capacity_bytes else 0.0
        speed = forecast.tokens_per_second / (candidate.config.world_size if per_device else 1)
        found[candidate.id] = Expected(speed, share)
    return found


def uses_predictions(spec: SweepSpec, facts: Facts) -> bool:
    """Whether anything in the sweep would use them."""
    return _sampler_of(spec) is Sampler.GUIDED or _rejects(spec, facts)


def _rejects(spec: SweepSpec, facts: Facts) -> bool:
    is_bounded = spec.limits.device_memory is not None or facts.device_memory_bytes is not None
    return is_bounded and spec.limits.reject_probability < 1


def build_gate(spec: SweepSpec, facts: Facts, forecaster: Forecaster | None) -> ForecastGate | None:
    """The gate that keeps trials from being launched that are predicted not to fit.

    None without predictions, where nothing bounds the trials, and where the spec never rejects.
    """
    if forecaster is None or not _rejects(spec, facts):
        return None
    return ForecastGate(forecaster, spec.limits.reject_probability)


def leave_out_hopeless(spec: SweepSpec, facts: Facts, space: Space, forecaster: Forecaster | None) -> Space:
    """`space` without what the gate would surely reject."""
    if forecaster is None or not _rejects(spec, facts):
        return space
    return without_hopeless(space, forecaster, spec.limits.reject_probability)


def build_forecaster(
    spec: SweepSpec,
    facts: Facts,
    space: Space,
    cache: Path,
    say: Callable[[str], None],
    devices_on_node: int | None = None,
) -> Forecaster | None:
    """What predicts the trials of `space`, their model traced; None where it cannot be traced, which is said.

    `devices_on_node`: what the largest node has, where the cluster is known.
    """

    def progress(done: int, total: int) -> None:
        say(f"Tracing the model for predictions: {done} of {total} structures done.")

    tracer = cached_tracer(cache, progress=progress)
    forecaster = sweep_forecaster(spec, facts, threads_per_rank(), tracer, devices_on_node)
    try:
        forecaster.prepare(candidate.config for candidate in space.candidates)
    except Untraceable as error:
        say(f"There are no predictions: {error}")
        return None
    return forecaster


def lanes(device: str, world_size: int) -> int:
    """How many trials of `world_size` ranks the devices of this machine hold at once; 1 where they hold none."""
    devices = gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if device == "cuda" else cpu_slots(threads_per_rank())
    return max(1, len(devices) // world_size)


def efficiency_of(
    facts: Facts, remark: Callable[[str], None]
) -> Callable[[TrialConfig, Measurement], Efficiency | None]:
    """MFU and HFU of a measurement against the peak in `facts`.

    A share above 1 shows that the peak is wrong: it goes to `remark` and the trial gets neither number.
    """

    def efficiency(config: TrialConfig, measurement: Measurement) -> Efficiency | None:
        peak = facts.peak_flops_per_s.get(config.knobs.precision)
        if peak is None:
            return None
        work = flops.measured_work(facts.model, config.knobs, measurement)
        try:
            return Efficiency(
                mfu=flops.mfu(work, measurement.measured_s, peak, config.world_size),
                hfu=flops.hfu(work, measurement.measured_s, peak, config.world_size),
            )
        except StateError as error:
            remark(f"{error} (from {facts.peak_source}); the trial is shown without MFU and HFU")
            return None

    return efficiency


class Tracking(RunLog, Protocol):
    """The run log where people read results."""

    def attach(self, file: Path, folder: str | None = None) -> None:
        """Keep a copy of `file` with the sweep, under `folder`."""

    def hurry(self) -> None:
        """Make `close` short: somebody waits for the end."""


def require_tracking(tracking: TrackingSection, warn: Callable[[str], None]) -> None:
    """Raise UsageError or TrackingRefusedError when results could never go where the spec says."""
    if tracking.enabled:
        from orchestrator.backends.mlflow_server import preflight

        preflight(tracking, warn)


def build_tracking(spec: SweepSpec, ledger: Ledger, warn: Callable[[str], None]) -> Tracking | None:
    """The MLflow log of the sweep; None when the spec does without."""
    if not spec.tracking.enabled:
        return None
    from orchestrator.backends.mlflow_log import MlflowLog

    return MlflowLog(ledger, spec.tracking, warn, ledger.read_trials())


def sync_tracking(spec: SweepSpec, ledger: Ledger) -> str:
    """Bring MLflow up to date with the records, and return its URI. Raises BrimfulError when something is left."""
    from orchestrator.backends.mlflow_log import MlflowLog, store_uri

    left: list[str] = []
    log = MlflowLog(ledger, spec.tracking, left.append, ledger.read_trials(), close_s=SYNC_DEADLINE_S)
    log.sweep_changed(ledger.read_sweep())
    log.close()
    if left:
        raise BrimfulError(left[-1])
    return store_uri(spec.tracking, ledger.home)


def check_tracking(uri: str | None, home: Path) -> str:
    """Where results go, in words. Raises UsageError or TrackingRefusedError when they cannot."""
    from orchestrator.backends.mlflow_log import store_uri
    from orchestrator.backends.mlflow_server import preflight

    remarks: list[str] = []
    tracking = TrackingSection(uri=uri)
    preflight(tracking, remarks.append)
    return "; ".join([f"MLflow at {store_uri(tracking, home)}", *remarks])


def tracking_server(home: Path, port: int) -> "UiCommand":
    """How to serve the home's own MLflow store on loopback. Raises UsageError when there is none."""
    from orchestrator.backends.mlflow_log import store_uri
    from orchestrator.backends.mlflow_server import ui_command

    tracking = TrackingSection()
    if not Path(store_uri(tracking, home).removeprefix("sqlite:///")).exists():
        raise UsageError(f"there is no MLflow store in {home}; a sweep makes it, unless it runs with --no-tracking")
    return ui_command(tracking, home, port)
