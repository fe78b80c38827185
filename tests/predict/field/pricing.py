"""How the cases are priced: shorthands for jobs, devices and overheads."""

import re
from dataclasses import replace

from orchestrator.contract.profile import Point, Profile
from orchestrator.contract.units import GIB, MIB
from orchestrator.predict.job import Job
from orchestrator.predict.overhead import CUDA, Overhead
from orchestrator.predict.verdict import Verdict, judge
from orchestrator.spec.hardware import BY_KEY

GB = 10**9


def usable_bytes(key: str) -> int:
    """What a process can take of the card."""
    usable = BY_KEY[key].usable_memory_bytes
    assert usable is not None
    return usable


def zero(stage: int, ranks: int, point: Point, **changes: object) -> Job:
    """DeepSpeed with its own defaults, eight ranks on a node."""
    job = Job(point, world_size=ranks, ranks_on_node=min(ranks, 8), zero_stage=stage)  # type: ignore[arg-type]
    return replace(job, **changes)  # type: ignore[arg-type]


def plain(point: Point, **changes: object) -> Job:
    """A plain loop that updates the weights themselves."""
    return replace(Job(point, engine="torch", master_dtype=None), **changes)  # type: ignore[arg-type]


def auto_buckets(hidden: int) -> dict[str, int]:
    """What "auto" becomes in transformers' DeepSpeed integration (integrations/deepspeed.py:232-241), in elements."""
    return {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


def device_overhead(context_bytes: int) -> Overhead:
    """A context of the size that a source states."""
    return replace(CUDA, context_bytes=context_bytes)


def price(profile: Profile, job: Job, capacity_bytes: int | None = None, overhead: Overhead = CUDA) -> Verdict:
    """The verdict with a replay of the allocator."""
    return judge(profile, job, overhead, capacity_bytes)


def deep(profile: Profile, layers: int) -> Profile:
    """The weights of `layers` layers from a trace of two: what depends on weights alone is exact, the stream is not."""
    second = [parameter for parameter in profile.parameters if parameter.layer == 1]
    copies = [
        parameter.model_copy(update={"layer": layer, "name": re.sub(r"\.1\.", f".{layer}.", parameter.name, count=1)})
        for layer in range(2, layers)
        for parameter in second
    ]
    return replace(profile, parameters=(*profile.parameters, *copies))


def numel(profile: Profile, rank: int = 0) -> int:
    """Elements of all weights."""
    return sum(parameter.numel(rank) for parameter in profile.parameters)


def relative_error(predicted: float, stated: float) -> float:
    return predicted / stated - 1


__all__ = ["GB", "GIB", "MIB"]
