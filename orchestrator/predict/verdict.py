"""Whether a job fits: its bill, what the allocator makes of it, and how sure that is."""

import math
from dataclasses import dataclass
from statistics import NormalDist

from orchestrator.contract.config import Frozen
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Profile, Quantization
from orchestrator.predict.allocator import replay, reserved_interval, smallest_capacity_bytes
from orchestrator.predict.job import Job
from orchestrator.predict.memory import Bill, bill
from orchestrator.predict.overhead import Overhead
from orchestrator.predict.reserve import after_other_lengths, allocator_workloads, gather_workload
from orchestrator.predict.terms import total

FRAGMENTATION = 1.03
"""Smallest capacity over peak allocated, where no replay was asked for: 1.01 to 1.09 in replays of 54 structures of
1B to 8B models, median 1.03."""
LIKELY = 0.5
"""Odds from which a job counts as one that fits."""


@dataclass(frozen=True)
class Spread:
    """Of log(measured need / predicted need)."""

    mean: float = 0.0
    deviation: float = 0.05


class Verdict(Frozen):
    """A bill beside a capacity."""

    bill: Bill
    reserved_bytes: tuple[int, int]
    """Peak that the allocator reserves: with just enough memory, and with ample memory. On CPU nothing is cached."""
    smallest_capacity_bytes: int
    """The least that the allocator must be allowed for the job to run."""
    needed_bytes: int
    """The same on the whole device, with context and communicators."""
    capacity_bytes: int | None
    probability_fits: float | None
    """None without a capacity."""

    @property
    def fits(self) -> bool | None:
        """Whether it is more likely to fit than not; None without a capacity."""
        return None if self.probability_fits is None else self.probability_fits >= LIKELY


def judge(
    profile: Profile,
    job: Job,
    overhead: Overhead,
    capacity_bytes: int | None = None,
    spread: Spread | None = None,
    replays: bool = True,
    lengths_vary: bool = False,
) -> Verdict:
    """The verdict on `job`. `capacity_bytes`: what the device has for this process, context included.

    `lengths_vary`: batches differ in length, which widens the reserved interval: cached blocks do not match.
    Without `replays` the allocator's share is taken from FRAGMENTATION, which costs milliseconds less.
    """
    made = bill(profile, job, overhead)
    beside_bytes = total(made.device_overhead)
    if profile.request.device == "cpu":
        reserved, smallest = (made.peak_allocated_bytes, made.peak_allocated_bytes), made.peak_allocated_bytes
    elif replays:
        within = None if capacity_bytes is None else max(capacity_bytes - beside_bytes, 0)
        reserved, smallest = _replayed(profile, job, overhead, made, within, lengths_vary)
    else:
        smallest = round(made.peak_allocated_bytes * FRAGMENTATION)
        reserved = (smallest, smallest)
    needed_bytes = smallest + beside_bytes
    probability = None
    if capacity_bytes is not None:
        probability = probability_fits(needed_bytes, capacity_bytes, spread or default_spread(profile, job))
    return Verdict(
        bill=made,
        reserved_bytes=reserved,
        smallest_capacity_bytes=smallest,
        needed_bytes=needed_bytes,
        capacity_bytes=capacity_bytes,
        probability_fits=probability,
    )


def probability_fits(needed_bytes: float, capacity_bytes: float, spread: Spread) -> float:
    """That the real need is at most the capacity, its logarithm being normal around the prediction."""
    if capacity_bytes <= 0:
        return 0.0
    margin = math.log(capacity_bytes / max(needed_bytes, 1)) - spread.mean
    return NormalDist().cdf(margin / spread.deviation)


def default_spread(profile: Profile, job: Job) -> Spread:
    """Before a sweep has measured anything: from residuals of published runs, by what they ran."""
    if profile.request.device == "cpu":
        return Spread(0.0, 0.08)
    if job.world_size > 1 and (job.engine == "fsdp" or job.zero_stage == 3):
        return Spread(0.0, 0.08)
    if profile.request.quantization is not Quantization.NONE:
        return Spread(0.0, 0.06)
    return Spread(0.0, 0.04)


def _replayed(
    profile: Profile, job: Job, overhead: Overhead, made: Bill, capacity_bytes: int | None, lengths_vary: bool
) -> tuple[tuple[int, int], int]:
    """Reserved interval and smallest capacity; the phases that come once are not replayed, but bound them."""
    passes, *later = allocator_workloads(profile, job, overhead)
    gathers = gather_workload(profile, job)
    gathered_bytes = replay(gathers).peak_reserved_bytes if gathers else 0
    at_ease = None if capacity_bytes is None else max(capacity_bytes - gathered_bytes, 1)
    low, high = (own + gathered_bytes for own in reserved_interval(passes, at_ease))
    alone = smallest_capacity_bytes(passes)
    smallest = alone + gathered_bytes
    if gathers:
        # both pools seldom peak together: the bill's highest moment, cut up as the passes' own pool is
        cut_up = alone / max(passes.peak_allocated_bytes, 1)
        highest = max(total(made.phases[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD))
        smallest = min(smallest, round(highest * cut_up))
    for workload in later:
        # what was gathered is free by then, and released when it is needed
        own_low, own_high = reserved_interval(workload, at_ease)
        low, high = max(low, own_low), max(high, own_high + gathered_bytes)
        smallest = max(smallest, smallest_capacity_bytes(workload))
    if lengths_vary:
        varied = replay(after_other_lengths(passes, profile, job), at_ease)
        high = max(high, varied.peak_reserved_bytes + gathered_bytes)
    least = made.peak_allocated_bytes
    low, high, smallest = max(low, least), max(high, least), max(smallest, least)
    return (low, max(low, high)), smallest
