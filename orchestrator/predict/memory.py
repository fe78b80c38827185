"""The memory bill: bytes by phase and term that a job needs on a device and on its host, before it runs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from orchestrator.contract.config import Frozen
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Place, Profile
from orchestrator.predict.engine import engine_terms
from orchestrator.predict.fsdp import fsdp_window
from orchestrator.predict.gradients import GradientTimeline, gradient_timeline
from orchestrator.predict.job import Job
from orchestrator.predict.live import zero3_window
from orchestrator.predict.memo import remembered
from orchestrator.predict.overhead import Overhead
from orchestrator.predict.reentrant import is_reentrant, keeps_inputs, with_kept_inputs
from orchestrator.predict.stream import Stream, stream_at
from orchestrator.predict.terms import EngineTerms, Terms, add, total
from orchestrator.predict.weights import weights_of
from orchestrator.predict.zero import bucket_bytes

_PLACE_TERMS = {
    Place.INPUT: "activations",
    Place.ACTIVATION: "activations",
    Place.LOGITS: "logits",
    Place.TEMPORARY: "temporaries",
}


class Bill(Frozen):
    """What one rank's device holds at the highest moment of each phase, and what a node's host holds, by term.

    `phases` count what PyTorch's allocator is asked for, each tensor rounded as the allocator rounds it
    (`max_memory_allocated`). `peak_device_bytes` adds what the device holds outside of the allocator.
    """

    phases: dict[Phase, Terms]
    device_overhead: Terms
    host: Terms
    """Of one node with all its ranks, at its highest moment."""
    host_phase: Phase
    """When that is: load, init, or optimizer_step for what stays while training."""
    disk_bytes: int = Field(default=0, ge=0)
    excludes: tuple[str, ...] = ()
    """What the figures leave out, for the reader."""

    @property
    def binding_phase(self) -> Phase:
        """The phase with the highest peak; of equal ones the latest, since a run repeats it."""
        return max(reversed(self.phases), key=lambda phase: total(self.phases[phase]))

    @property
    def binding_term(self) -> str:
        """The largest term of the binding phase."""
        terms = self.phases[self.binding_phase]
        return max(terms, key=lambda name: terms[name])

    @property
    def peak_allocated_bytes(self) -> int:
        """The highest of all phases."""
        return total(self.phases[self.binding_phase])

    @property
    def steady_allocated_bytes(self) -> int:
        """The highest of the phases that every step repeats."""
        return max(total(self.phases[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP))

    @property
    def peak_device_bytes(self) -> int:
        """Allocated, with context and communicators; an allocator's cache is not in it."""
        return self.peak_allocated_bytes + total(self.device_overhead)

    @property
    def peak_host_bytes(self) -> int:
        """Of one node with all its ranks."""
        return total(self.host)


def bill(profile: Profile, job: Job, overhead: Overhead) -> Bill:
    """The bill of `job`, whose model has the structure of `profile`. `overhead`: what the process itself takes."""
    return _bill(profile, job, overhead)


@remembered(identities=1, size=4096)
def _bill(profile: Profile, job: Job, overhead: Overhead) -> Bill:
    terms = engine_terms(profile.parameters, job, profile.request.dtype)
    if profile.request.device == "cpu":
        terms = _on_one_memory(terms, job)
    stream = stream_at(profile, job.point)
    if keeps_inputs(profile, job):
        stream = with_kept_inputs(profile, stream)
    fixed = {"buffers": profile.buffers_bytes, "workspace": overhead.workspace_bytes}
    forward, backward = _micro_step(profile, job, stream, add(terms.resident, fixed))
    host_phase, host = _host(terms, overhead, job)
    phases = {
        Phase.LOAD: add(terms.load, {"buffers": profile.buffers_bytes}),
        Phase.INIT: add(terms.init, {"buffers": profile.buffers_bytes}),
        Phase.FORWARD: forward,
        Phase.BACKWARD: backward,
        Phase.OPTIMIZER_STEP: add(terms.resident, fixed, terms.step),
    }
    return Bill(
        phases=phases,
        device_overhead=overhead.device_terms(job),
        host=host,
        host_phase=host_phase,
        disk_bytes=terms.disk_bytes,
        excludes=("evaluation and generation", "saving of checkpoints", "other processes on the device"),
    )


def _on_one_memory(terms: EngineTerms, job: Job) -> EngineTerms:
    """On CPU ranks the device is the host: what is offloaded stays in the same process."""
    moved = {name: size // job.ranks_on_node for name, size in terms.host.items()}
    building = {name: size // job.ranks_on_node for name, size in terms.host_init.items()}
    return replace(
        terms,
        resident=add(terms.resident, moved),
        init=add(terms.init, moved, building),
        host={},
        host_init={},
    )


def _host(terms: EngineTerms, overhead: Overhead, job: Job) -> tuple[Phase, Terms]:
    """When a node's host holds most, and what."""
    process = {"process": overhead.process_bytes * job.ranks_on_node}
    loading = add(process, terms.host_load)
    running = add(process, terms.host)
    building = add(running, terms.host_init)
    moments = ((Phase.OPTIMIZER_STEP, running), (Phase.INIT, building), (Phase.LOAD, loading))
    return max(moments, key=lambda moment: total(moment[1]))


def _micro_step(profile: Profile, job: Job, stream: Stream, resident: Terms) -> tuple[Terms, Terms]:
    """Terms at the highest moment of the forward and of the backward pass."""
    gathered = _gathered(profile, job, stream)
    moments = [
        _highest(job, profile, stream, resident, gathered, timeline)
        for timeline in _timelines(profile, job, stream.gradient_order)
    ]
    forward, backward = zip(*moments, strict=True)
    return max(forward, key=total), max(backward, key=total)


def _timelines(profile: Profile, job: Job, order: Sequence[int]) -> list[GradientTimeline]:
    """Of the only micro-step; or, when gradients accumulate, of the first and of the last."""
    kinds = [(False, True)] if job.gradient_accumulation == 1 else [(False, False), (True, True)]
    return [
        gradient_timeline(profile.parameters, job, profile.request.dtype, order, accumulates, is_last)
        for accumulates, is_last in kinds
    ]


def _highest(
    job: Job,
    profile: Profile,
    stream: Stream,
    resident: Terms,
    gathered: NDArray[np.int64],
    timeline: GradientTimeline,
) -> tuple[Terms, Terms]:
    gradients = gradients_over_time(stream, timeline)
    whole = gathered + gradients + stream.whole_live_bytes
    forward = int(np.argmax(whole[: stream.backward_start])) if stream.backward_start else 0
    backward = stream.backward_start + int(np.argmax(whole[stream.backward_start :]))

    def terms_at(moment: int) -> Terms:
        parts: Terms = {}
        for place, live in stream.live_bytes.items():
            name = _PLACE_TERMS[place]
            parts[name] = parts.get(name, 0) + int(live[moment])
        parts["gathered_weights"] = int(gathered[moment])
        return add(resident, parts, _split_buckets(profile, job, int(gradients[moment])))

    backward_terms = terms_at(backward)
    closing = add(resident, _split_buckets(profile, job, timeline.closing_peak_bytes))
    return terms_at(forward), max((backward_terms, closing), key=total)


def gradients_over_time(stream: Stream, timeline: GradientTimeline) -> NDArray[np.int64]:
    """Gradients and their buckets at each moment of the stream, those that are still being made included."""
    rows = len(stream.mark_moments)
    by_mark = np.full(rows, timeline.opening_bytes, dtype=np.int64)
    if len(stream.gradient_marks):
        counts = np.searchsorted(stream.gradient_marks, np.arange(rows), side="right")
        known = counts > 0
        by_mark[known] = timeline.live_bytes[counts[known] - 1]
    over_time = stream.over_time(by_mark)
    over_time[: stream.mark_moments[0] if rows else 0] = timeline.opening_bytes
    over_time += stream.pending_bytes
    over_time[stream.mark_moments[stream.gradient_marks]] = timeline.peak_bytes
    return over_time


def _split_buckets(profile: Profile, job: Job, size_bytes: int) -> Terms:
    """What a backward pass of stages 1 and 2 holds: its buckets, and gradients beside them."""
    if job.engine != "deepspeed" or job.zero_stage not in (1, 2):
        return {"gradients": size_bytes}
    buckets_bytes = min(size_bytes, bucket_bytes(job, profile.request.dtype))
    return {"reduce_buckets": buckets_bytes, "gradients": size_bytes - buckets_bytes}


def _gathered(profile: Profile, job: Job, stream: Stream) -> NDArray[np.int64]:
    """Weights that are gathered beside the shards, at each moment."""
    weights = weights_of(profile.parameters, job, profile.request.dtype)
    if job.engine == "fsdp":
        ahead = not is_reentrant(profile.request)
        window = fsdp_window(weights, profile.modules, profile.marks, job, profile.request.dtype, gathers_ahead=ahead)
        return stream.over_time(window)
    if job.engine != "deepspeed" or job.zero_stage != 3:
        return np.zeros(stream.moments, dtype=np.int64)
    gathers = zero3_window(weights, profile.modules, profile.marks, job)
    over_time = stream.over_time(gathers.live_bytes)
    over_time[stream.mark_moments] = gathers.peak_bytes
    return over_time
