"""What is to be expected of trials before they run: their bill, the odds that they fit, and their speed.

Every figure is predicted. On CPU what a limit limits is address space, of which a rank takes more than its tensors: how
much is assumed at first and fitted to the trials that have run (`learn`), as are the bill's error on any device and the
clock's constants.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.config import Layout, TrialConfig
from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Measurement, OomDevice
from orchestrator.contract.profile import Profile, TraceRequest
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import MIB
from orchestrator.placement.platform import Platform, sweep_platform
from orchestrator.placement.rows import Rows, prepared_rows
from orchestrator.placement.tracing import Untraceable, request_key, trace_all
from orchestrator.predict.calibrate import (
    MemoryCalibration,
    MemoryObservation,
    MemoryPrior,
    TimeObservation,
    calibrate,
    calibrate_memory,
)
from orchestrator.predict.job import Job
from orchestrator.predict.terms import total
from orchestrator.predict.time import StepTime, step_time
from orchestrator.predict.trials import job_of, trace_request
from orchestrator.predict.verdict import LIKELY, Spread, Verdict, default_spread, judge, probability_fits
from orchestrator.predict.work import step_work
from orchestrator.spec.sweep import SweepSpec

_SURE = 1e-3
"""Beyond these odds, either way, a replay of the allocator would not change the verdict."""
_BASE_SPREAD_BYTES = {"cuda": 1.0, "cpu": 40.0 * MIB}
"""Of what a process takes beside the bill's peak, in what is measured: nothing in PyTorch's own count on CUDA; on CPU
address space that differs by about so much between trials of the quickstart."""
_NOISE = {"cuda": 0.02, "cpu": 0.06}
"""Log error of one measured peak: address space varies by 6 % from run to run."""
_HOST_SPREAD = Spread(0.0, 0.15)
"""Log error of a predicted host peak. Assumed: libraries and pinned buffers differ more than a device does; for six
hosts that were reported as killed, the predicted needs are 6 to 94 % above their sizes (docs/field-cases.md, A10)."""

_REFIT_GROWTH = 1.2
"""The clock is fitted anew when there are so many times the trials of its last fit."""

Tracer = Callable[[Iterable[TraceRequest]], Mapping[str, Profile | Untraceable]]
"""Profiles by `request_key`, or why there is none."""


def cached_tracer(
    cache: Path, processes: int = 2, progress: Callable[[int, int], None] = lambda done, total: None
) -> Tracer:
    """Traces kept under `cache`. `progress` is told how many of the new ones are done."""
    return lambda requests: trace_all(requests, cache, processes, progress)


def sweep_forecaster(
    spec: SweepSpec, facts: Facts, threads_per_rank: int, trace: Tracer, devices_on_node: int | None = None
) -> "Forecaster":
    """Predicts the trials of `spec` on the device and the rows that its preflight found.

    `devices_on_node`: see `orchestrator.placement.platform.sweep_platform`.
    """

    def platform_of(layout: Layout) -> Platform:
        return sweep_platform(spec, facts, threads_per_rank, layout, devices_on_node)

    first = platform_of(spec.resources.layouts[0])
    return Forecaster(first, prepared_rows(facts.data), trace, platform_of=functools.cache(platform_of))


@dataclass(frozen=True)
class Forecast:
    """A trial that has not run. `needed_bytes` and `probability_fits` hold what earlier trials of the sweep taught."""

    verdict: Verdict
    needed_bytes: int
    """Of one device, or of address space on CPU."""
    probability_fits: float | None
    """None without a limit."""
    time: StepTime | None
    """None where the device's rates are not known."""
    host_limit_bytes: int | None = None
    host_probability_fits: float = 1.0
    """That the node's host has room; part of `probability_fits`."""

    @property
    def is_likely(self) -> bool:
        """Whether it fits more likely than not, or nothing bounds it."""
        return self.probability_fits is None or self.probability_fits >= LIKELY

    @property
    def tokens_per_second(self) -> float:
        """0 where no speed is predicted."""
        return self.time.tokens_per_second if self.time is not None else 0.0


class Forecaster:
    """Predicts trials of one sweep on one kind of device. Profiles are traced by `trace` when they are first needed.

    `platform_of` knows the platform of each layout; None: `platform` is that of all.
    """

    def __init__(
        self,
        platform: Platform,
        rows: Rows,
        trace: Tracer,
        adjust: Callable[[TraceRequest], TraceRequest] = lambda request: request,
        adjust_job: Callable[[Job], Job] = lambda job: job,
        platform_of: Callable[[Layout], Platform] | None = None,
    ) -> None:
        self._platform_of = platform_of
        self.platform = platform
        self._rows = rows
        self._trace = trace
        self._adjust = adjust
        self._adjust_job = adjust_job
        self._keys: dict[str, str] = {}
        self._profiles: dict[str, Profile | Untraceable] = {}
        self._observations: list[MemoryObservation] = []
        self._calibration: MemoryCalibration | None = None
        self._constants = platform.constants
        self._steps: list[TimeObservation] = []
        self._steps_fitted = 0

    def prepare(self, configs: Iterable[TrialConfig]) -> None:
        """Trace at once what all of `configs` need. Raises Untraceable, with the first reason, when one cannot be."""
        requests = {self._key(request): request for request in map(self._request, configs)}
        missing = [request for key, request in requests.items() if key not in self._profiles]
        if missing:
            self._profiles.update(self._trace(missing))
        for key in requests:
            self._profile(key)

    def is_traced(self, config: TrialConfig) -> bool:
        """Whether `prepare` has made a profile for `config`."""
        return isinstance(self._profiles.get(self._key(self._request(config))), Profile)

    def forecast(self, config: TrialConfig, replays: bool | None = None) -> Forecast:
        """The forecast of a trial. Raises Untraceable.

        `replays`: whether the allocator is replayed; None: only where the odds are not clear without it.
        """
        key = self._key(self._request(config))
        if key not in self._profiles:
            self.prepare([config])
        profile = self._profile(key)
        job, platform = self._job(config, self._rows.longest_tokens), self._platform(config)
        capacity_bytes = platform.capacity_for(job)
        spread = self._spread(key, profile, job)
        verdict = judge(profile, job, platform.overhead, capacity_bytes, spread, replays=bool(replays))
        if replays is None and self._is_open(verdict):
            verdict = judge(profile, job, platform.overhead, capacity_bytes, spread)
        needed_bytes = self._corrected_bytes(key, verdict)
        odds = None if capacity_bytes is None else probability_fits(needed_bytes, capacity_bytes, spread)
        host_limit_bytes, host_odds = platform.host_limit_bytes, 1.0
        if host_limit_bytes is not None:
            host_odds = probability_fits(verdict.bill.peak_host_bytes, host_limit_bytes, _HOST_SPREAD)
            odds = host_odds if odds is None else odds * host_odds
        return Forecast(verdict, needed_bytes, odds, self._time(config, profile), host_limit_bytes, host_odds)

    def learn(self, record: TrialRecord) -> None:
        """Take a trial that has ended into account, for what it says about memory and about speed."""
        key = self._key(self._request(record.config))
        profile = self._profiles.get(key)
        if not isinstance(profile, Profile):
            return
        if record.measurement is not None:
            self._learn_speed(record.config, profile, record.measurement)
        measured = _measured_bytes(record, self.platform.device)
        if measured is None:
            return
        predicted = self.forecast(record.config, replays=False).verdict.bill.peak_allocated_bytes
        size_bytes, is_lower_bound = measured
        self._observations.append(MemoryObservation(key, predicted, size_bytes, is_lower_bound))
        self._calibration = calibrate_memory(self._observations, self._prior(key, record.config))

    def _learn_speed(self, config: TrialConfig, profile: Profile, measurement: Measurement) -> None:
        platform = self._platform(config)
        if platform.processor is None or platform.links is None:
            return
        work = step_work(profile, self._usual_job(config))
        step_s = statistics.median(measurement.step_s)
        self._steps.append(TimeObservation(work, platform.processor, platform.links, step_s))
        # each of many trials changes little, and a fit takes longer with each
        if len(self._steps) >= _REFIT_GROWTH * self._steps_fitted:
            self._constants = calibrate(self._steps, platform.constants).constants
            self._steps_fitted = len(self._steps)

    def parameters(self, config: TrialConfig) -> tuple[int, int]:
        """Weights of the traced model, adapters included, and how many of them are trained. Raises Untraceable."""
        profile = self.profile(config)
        rank = config.knobs.lora_rank or 0
        sizes = [(parameter.numel(rank), parameter.is_trained) for parameter in profile.parameters]
        return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)

    def profile(self, config: TrialConfig) -> Profile:
        """The trace that the forecast of `config` is made from. Raises Untraceable."""
        self.prepare([config])
        return self._profile(self._key(self._request(config)))

    def _request(self, config: TrialConfig) -> TraceRequest:
        is_padded = self._rows.is_padded(config.knobs.micro_batch)
        return self._adjust(trace_request(config, self.platform.device, is_padded))

    def _key(self, request: TraceRequest) -> str:
        """`request_key`, which reads files, once for each request."""
        text = request.model_dump_json()
        if text not in self._keys:
            self._keys[text] = request_key(request)
        return self._keys[text]

    def _profile(self, key: str) -> Profile:
        found = self._profiles[key]
        if isinstance(found, Untraceable):
            raise found
        return found

    def _platform(self, config: TrialConfig) -> Platform:
        return self.platform if self._platform_of is None else self._platform_of(config.layout)

    def _job(self, config: TrialConfig, row_tokens: int) -> Job:
        return self._adjust_job(job_of(config, self.platform.device, row_tokens, self._platform(config).ranks_on_node))

    def _time(self, config: TrialConfig, profile: Profile) -> StepTime | None:
        platform = self._platform(config)
        if platform.processor is None or platform.links is None:
            return None
        job, padding = self._usual_job(config), self._rows.padding_fraction(config.knobs.micro_batch)
        return step_time(profile, job, platform.processor, platform.links, self._constants, padding)

    def _usual_job(self, config: TrialConfig) -> Job:
        """Over batches as wide as they are on the average."""
        return self._job(config, max(1, round(self._rows.width_tokens(config.knobs.micro_batch))))

    def _is_open(self, verdict: Verdict) -> bool:
        odds = verdict.probability_fits
        return self.platform.device == "cuda" and odds is not None and _SURE < odds < 1 - _SURE

    def _spread(self, key: str, profile: Profile, job: Job) -> Spread:
        if self._calibration is None:
            return default_spread(profile, job)
        return Spread(0.0, self._calibration.log_spread(key))

    def _corrected_bytes(self, key: str, verdict: Verdict) -> int:
        """On CPU the process' own space is fitted too; on CUDA only the bill's error shows in what is measured."""
        if self._calibration is None:
            return verdict.needed_bytes
        if self.platform.device == "cpu":
            return round(self._calibration.corrected_bytes(key, verdict.bill.peak_allocated_bytes))
        return round(self._calibration.corrected_bytes(key, verdict.needed_bytes))

    def _prior(self, key: str, config: TrialConfig) -> MemoryPrior:
        device, job = self.platform.device, self._job(config, self._rows.longest_tokens)
        spread = default_spread(self._profile(key), job)
        return MemoryPrior(
            spread=spread.deviation,
            base_bytes=total(self.platform.overhead.device_terms(job)) if device == "cpu" else 0.0,
            base_spread_bytes=_BASE_SPREAD_BYTES[device],
            noise=_NOISE[device],
        )


def _measured_bytes(record: TrialRecord, device: str) -> tuple[int, bool] | None:
    """What the bill's peak is compared with, and whether the trial needed at least so much rather than just so much."""
    measurement, outcome = record.measurement, record.outcome
    if measurement is not None and device == "cpu":
        return measurement.peak_memory_bytes, False
    if measurement is not None:
        peaks = [rank.peak_allocated_bytes for rank in measurement.ranks if rank.peak_allocated_bytes is not None]
        return (max(peaks), False) if peaks else None
    if not isinstance(outcome, OomDevice) or outcome.allocated_bytes is None or outcome.requested_bytes is None:
        return None
    return outcome.allocated_bytes + outcome.requested_bytes, True
