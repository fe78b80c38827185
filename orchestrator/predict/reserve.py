"""A job's requests to the caching allocator, for a replay: what stays, and one micro-step's stream beside it."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract.profile import Mark, Place, Profile
from orchestrator.predict.allocator import Workload
from orchestrator.predict.engine import engine_terms
from orchestrator.predict.gradients import gradient_timeline
from orchestrator.predict.job import Job
from orchestrator.predict.live import zero3_window
from orchestrator.predict.overhead import Overhead
from orchestrator.predict.terms import Terms
from orchestrator.predict.weights import Weight, weights_of

_WEIGHT_TERMS = ("frozen_weights", "trained_weights")


def allocator_workload(profile: Profile, job: Job, overhead: Overhead) -> Workload:
    """What the default stream's pool is asked for, in its order.

    Gradients that the engine copies into buckets die when they are whole; what the engine keeps of them stands among
    the residents. Gathered weights have a pool of their own (`gather_workload`).
    """
    terms = engine_terms(profile.parameters, job, profile.request.dtype)
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    keeps_gradients = job.engine == "torch" or (job.engine == "deepspeed" and job.zero_stage == 0)
    residents = [*_weight_sizes(weights, terms.resident, job), profile.buffers_bytes, overhead.workspace_bytes]
    residents += [size for name, size in terms.resident.items() if name not in _WEIGHT_TERMS]
    events = profile.events
    if not keeps_gradients:
        timeline = gradient_timeline(profile.parameters, job, profile.request.dtype, _gradient_order(profile))
        residents += [int(timeline.live_bytes.max(initial=timeline.opening_bytes))]
        events = _with_deaths(profile)
    sizes = profile.storage_bytes(job.point)
    temporaries = list(_update_sizes(weights, terms.step, job))
    births = np.arange(len(sizes), len(sizes) + len(temporaries), dtype=np.int32) + 1
    return Workload(
        events=np.concatenate([events, births, -births]).astype(np.int32),
        sizes_bytes=np.concatenate([sizes, np.array(temporaries, dtype=np.int64)]),
        resident_bytes=[size for size in residents if size],
        expandable_segments=job.expandable_segments,
    )


def gather_workload(profile: Profile, job: Job) -> Workload | None:
    """What the gathers of ZeRO-3 ask of their stream's pool; None where nothing is gathered."""
    if job.engine != "deepspeed" or job.zero_stage != 3 or job.world_size == 1:
        return None
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    window = zero3_window(weights, profile.modules, profile.marks, job)
    return Workload(window.events, window.sizes_bytes, expandable_segments=job.expandable_segments)


def _weight_sizes(weights: tuple[Weight, ...], resident: Terms, job: Job) -> list[int]:
    """Single weights where they are whole and apart; else each kind as one block."""
    if job.engine == "torch" or (job.engine == "deepspeed" and job.zero_stage == 0):
        return [weight.bytes + weight.scales_bytes for weight in weights]
    return [resident[name] for name in _WEIGHT_TERMS if name in resident]


def _update_sizes(weights: tuple[Weight, ...], step: Terms, job: Job) -> Iterator[int]:
    """Temporaries of the optimizer step: one for each weight where the update walks over whole weights."""
    total_bytes = step.get("optimizer_temporaries", 0)
    trained = [weight.bytes for weight in weights if weight.is_trained]
    if total_bytes and trained and job.engine == "torch" and job.optimizer_loop == "foreach":
        yield from (round(size * total_bytes / sum(trained)) for size in trained)
    elif total_bytes:
        yield total_bytes


def _gradient_order(profile: Profile) -> list[int]:
    return [payload for _, mark, payload in profile.marks.tolist() if mark == Mark.GRADIENT]


def _with_deaths(profile: Profile) -> NDArray[np.int32]:
    """The events, each gradient dying at its mark: at every one the oldest that is not yet matched."""
    is_gradient = profile.storage_place == Place.GRADIENT
    at = [position for position, mark, _ in profile.marks.tolist() if mark == Mark.GRADIENT]
    events: list[int] = []
    waiting: list[int] = []
    marks = iter([*at, len(profile.events) + 1])
    next_mark = next(marks)
    for position, event in enumerate(profile.events.tolist()):
        while next_mark <= position:
            if waiting:
                events.append(-waiting.pop(0))
            next_mark = next(marks)
        if not is_gradient[abs(event) - 1]:
            events.append(event)
        elif event > 0:
            events.append(event)
            waiting.append(event)
    events += [-storage for storage in waiting]
    return np.array(events, dtype=np.int32)
