"""Predicts published runs: traces their structures, prices them, and times them on their card."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.published_rows import PublishedRun
from benchmarks.published_scores import Prediction
from orchestrator.contract.profile import Point, Profile
from orchestrator.placement.tracing import Untraceable, request_key, trace_all
from orchestrator.predict.constants import CUDA_CLOCK
from orchestrator.predict.machine import device_links, processor
from orchestrator.predict.overhead import default_overhead
from orchestrator.predict.terms import total
from orchestrator.predict.time import step_time
from orchestrator.predict.verdict import FRAGMENTATION, Spread, Verdict, judge, probability_fits
from orchestrator.spec.hardware import BETWEEN_NODES

TRACES_AT_ONCE = 2
_MOST_MISCOUNT = 0.01
"""Of trained weights: a row that prints another number ran another configuration than the one that was traced."""


class Unpriced(Exception):
    """No prediction can be made of a run that was understood; the message says why."""


def predict_all(runs: Sequence[PublishedRun], cache: Path) -> list[Prediction | Unpriced]:
    """One prediction a run, in their order. Progress goes to standard error."""

    def tell(done: int, total: int) -> None:
        print(f"traced {done} of {total} new structures", file=sys.stderr, flush=True)

    requests = [request for run in runs for request in (run.request, run.clock_request)]
    profiles = trace_all(requests, cache, processes=TRACES_AT_ONCE, progress=tell)
    predictions: list[Prediction | Unpriced] = []
    for number, run in enumerate(runs, start=1):
        profile, computed = profiles[request_key(run.request)], profiles[request_key(run.clock_request)]
        try:
            predictions.append(_predict(run, profile, computed))
        except Unpriced as reason:
            predictions.append(reason)
        except ValueError as refusal:
            predictions.append(Unpriced(f"cannot be priced: {refusal}"))
        if number % 100 == 0 or number == len(runs):
            print(f"priced {number} of {len(runs)} rows", file=sys.stderr, flush=True)
    return predictions


def _predict(run: PublishedRun, profile: Profile | Untraceable, computed: Profile | Untraceable) -> Prediction:
    """`computed`: for the clock."""
    for each in (profile, computed):
        if isinstance(each, Untraceable):
            raise Unpriced(f"cannot be traced: {each}")
    assert isinstance(profile, Profile)
    assert isinstance(computed, Profile)
    _check_count(run, profile)
    if run.splits_layers:
        return _predict_split(run, _judge(run, profile, run.job.point, replays=False))
    verdict = _judge(run, profile, run.job.point, replays=False)
    if run.measured.reserved_bytes is not None or _is_close(verdict):
        verdict = _judge(run, profile, run.job.point, replays=True)
    lowest = verdict
    if run.shortest_tokens != run.job.point.sequence_tokens:
        lowest = _judge(run, profile, replace(run.job.point, sequence_tokens=run.shortest_tokens), replays=True)
    return Prediction(
        allocated_bytes=verdict.bill.steady_allocated_bytes,
        reserved_bytes=(lowest.reserved_bytes[0], verdict.reserved_bytes[1]),
        needed_bytes=verdict.needed_bytes,
        fits_probability=verdict.probability_fits,
        tokens_per_s=_tokens_per_s(run, computed),
        phase=verdict.bill.binding_phase.value,
        term=verdict.bill.binding_term,
    )


_WHOLE_TERMS = ("logits", "temporaries", "workspace")
"""Of the last layers' device alone; all else is divided with the layers."""
_SPLIT_SPREAD = Spread(0.0, 0.1)


def _predict_split(run: PublishedRun, verdict: Verdict) -> Prediction:
    """Of the device with the last layers, which makes the logits too; layers are taken to be of equal size."""
    needed_bytes = FRAGMENTATION * max(
        sum(size if name in _WHOLE_TERMS else size / run.devices for name, size in terms.items())
        for terms in verdict.bill.phases.values()
    )
    needed_bytes += total(verdict.bill.device_overhead)
    fits = None
    if run.card.capacity_bytes is not None:
        fits = probability_fits(needed_bytes, run.card.capacity_bytes, _SPLIT_SPREAD)
    phase, term = verdict.bill.binding_phase.value, verdict.bill.binding_term
    return Prediction(needed_bytes, (needed_bytes, needed_bytes), needed_bytes, fits, None, phase, term)


_CLOSE = 0.2
"""Within this share of the card's capacity the allocator is replayed; further away it cannot change the outcome."""


def _is_close(verdict: Verdict) -> bool:
    capacity_bytes = verdict.capacity_bytes
    return capacity_bytes is not None and abs(verdict.needed_bytes / capacity_bytes - 1) < _CLOSE


def _check_count(run: PublishedRun, profile: Profile) -> None:
    if run.trained_numel is None:
        return
    rank = run.job.point.lora_rank
    trained = sum(parameter.numel(rank) for parameter in profile.parameters if parameter.is_trained)
    if abs(trained - run.trained_numel) > _MOST_MISCOUNT * run.trained_numel:
        raise Unpriced("the row's trained weights are not those of its configuration")


def _judge(run: PublishedRun, profile: Profile, point: Point, *, replays: bool) -> Verdict:
    job = replace(run.job, point=point)
    overhead, capacity_bytes = default_overhead("cuda"), run.card.capacity_bytes
    return judge(profile, job, overhead, capacity_bytes, replays=replays, lengths_vary=run.lengths_vary)


def _tokens_per_s(run: PublishedRun, profile: Profile) -> float | None:
    """Of one device."""
    device = run.card.device
    if device is None:
        return None
    # published runs over several nodes ran in DGX and its like
    links = device_links(device, BETWEEN_NODES["infiniband-8x200g"])
    job = replace(run.job, point=replace(run.job.point, sequence_tokens=run.mean_tokens))
    step = step_time(profile, job, processor(device), links, CUDA_CLOCK)
    return step.tokens_per_second / run.job.world_size
