"""Of a space too large to list, the candidates that are predicted fastest are listed, with those around them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from predict.profiles import decoder
from space.space_facts import facts, spec

from orchestrator.contract.profile import Profile, TraceRequest
from orchestrator.contract.units import GIB
from orchestrator.placement.forecast import Forecaster
from orchestrator.placement.platform import table_platform
from orchestrator.placement.promising import merit, with_promising
from orchestrator.placement.rows import uniform_rows
from orchestrator.placement.tracing import Untraceable, request_key
from orchestrator.space.candidates import Candidate, Space, build_space
from orchestrator.spec.hardware import BETWEEN_NODES, lookup

SEARCH = {
    "zero_stage": (3,),
    "micro_batch": (1, 2, 4, 8),
    "reduce_bucket_size": tuple(range(500, 20_500, 500)),
    "overlap_comm": (False, True),
    "stage3_max_live_parameters": (0, 50_000, 1_000_000),
    "stage3_prefetch_bucket_size": (0, 1_000, 5_000, 30_000),
    "stage3_param_persistence_threshold": (0, 200, 5_000),
}


@cache
def large() -> Space:
    """Eleven thousand points of a small decoder, of which ten slow ones were drawn."""
    space = build_space(spec(SEARCH, devices=2, fixed={"method": "full"}), facts(on_cuda=True))
    assert space.is_sampled
    slow = [each for each in space.candidates if each.config.knobs.overlap_comm is False]
    return replace(space, candidates=tuple(slow[:10]))


def forecaster(memory_bytes: int) -> Forecaster:
    profile = decoder(hidden=64, layers=2, intermediate=128, vocabulary=512)
    device = lookup("NVIDIA A100-SXM4-80GB")
    assert device is not None
    platform = table_platform(device, 2, memory_bytes, BETWEEN_NODES["infiniband-hdr"])

    def trace(requests: Iterable[TraceRequest]) -> dict[str, Profile | Untraceable]:
        return {request_key(request): profile for request in requests}

    predicts = Forecaster(platform, uniform_rows(128), trace)
    predicts.prepare(candidate.config for candidate in large().candidates)
    return predicts


def test_the_best_of_all_points_is_listed_though_it_was_not_drawn() -> None:
    predicts = forecaster(80 * GIB)
    space = with_promising(large(), predicts)
    assert len(space.candidates) < 1000

    def merits(candidates: Iterable[Candidate]) -> list[float]:
        return [merit(predicts.forecast(each.config, replays=False)) for each in candidates]

    fastest = {"reduce_bucket_size": 20_000, "overlap_comm": True}
    every = [
        large().resolve({**fastest, "zero_stage": 3, "micro_batch": batch, **stage_3})
        for batch in SEARCH["micro_batch"]
        for stage_3 in (
            {"stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": small}
            for ahead in SEARCH["stage3_prefetch_bucket_size"]
            for small in SEARCH["stage3_param_persistence_threshold"]
        )
    ]
    assert max(merits(space.candidates)) >= max(merits(each for each in every if isinstance(each, Candidate)))
    assert max(merits(space.candidates)) > max(merits(large().candidates))


def test_around_the_best_all_that_differ_in_one_or_two_knobs_are_listed() -> None:
    predicts = forecaster(80 * GIB)
    space = with_promising(large(), predicts)
    best = max(space.candidates, key=lambda each: merit(predicts.forecast(each.config, replays=False)))
    chosen = space.choices_of(best)
    assert chosen is not None
    listed = {candidate.id for candidate in space.candidates}
    for name, choices in space.choices.items():
        for choice in choices:
            for other in space.choices["micro_batch"]:
                near = space.resolve({**chosen, name: choice, "micro_batch": other})
                assert isinstance(near, Candidate)
                assert near.id in listed
    assert [each.id for each in with_promising(large(), forecaster(80 * GIB)).candidates] == [
        each.id for each in space.candidates
    ], "a resumed sweep lists the same"


def test_a_space_that_is_listed_whole_stays_as_it_is() -> None:
    small = build_space(spec({"zero_stage": (0, 2)}), facts(on_cuda=True))
    assert with_promising(small, forecaster(80 * GIB)) is small
