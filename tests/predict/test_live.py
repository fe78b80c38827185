"""The window of gathered weights on small sequences of modules, by hand. Real engines: test_engines_real."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchestrator.contract.profile import Mark, Module, Parameter, Point, StepPhase
from orchestrator.predict.fsdp import fsdp_window
from orchestrator.predict.job import Job
from orchestrator.predict.live import GatherWindow, largest_gather_bytes, zero3_window
from orchestrator.predict.weights import weights_of

SETTINGS: dict[str, Any] = {
    "point": Point(1, 16),
    "world_size": 2,
    "zero_stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}


def marks(forward: Sequence[int], backward: Sequence[int]) -> NDArray[np.int32]:
    rows = [(0, int(Mark.PHASE), int(StepPhase.FORWARD))]
    for module in forward:
        rows += [(0, int(Mark.BEFORE_FORWARD), module), (0, int(Mark.AFTER_FORWARD), module)]
    rows.append((0, int(Mark.PHASE), int(StepPhase.BACKWARD)))
    for module in backward:
        rows += [(0, int(Mark.BEFORE_BACKWARD), module), (0, int(Mark.AFTER_BACKWARD), module)]
    return np.array(rows, dtype=np.int32)


def weights(sizes: Sequence[int], layers: Sequence[int] | None = None) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(name=str(number), numel_fixed=numel, bytes_per_element=2, is_trained=True, layer=layer)
        for number, (numel, layer) in enumerate(zip(sizes, layers or [-1] * len(sizes), strict=True))
    )


def window(sizes: Sequence[int], order: NDArray[np.int32], **settings: Any) -> GatherWindow:
    """One module for each weight."""
    job = Job(**{**SETTINGS, **settings})
    modules = [Module(name=str(number), parameters=(number,)) for number in range(len(sizes))]
    return zero3_window(weights_of(weights(sizes), job, "bf16"), modules, order, job)


def test_without_prefetch_and_reuse_one_module_is_gathered_at_a_time() -> None:
    found = window([100, 51], marks([0, 1], [1, 0]))
    # an odd weight is padded to the ranks
    assert found.live_bytes.tolist() == [0, 200, 0, 104, 0, 0, 104, 0, 200, 0]
    assert found.gathered_bytes == 2 * (200 + 104)


def test_prefetch_takes_one_weight_more_than_its_bucket_allows_and_keeps_a_flat_buffer() -> None:
    found = window([10, 100, 100], marks([0, 1, 2], [2, 1, 0]), stage3_prefetch_bucket_size=101)
    # the first module gathers itself (20) and, together, both others (400); their first use copies them
    # beside the flat buffer; the queue then wraps to the backward pass and takes the first weight again (20)
    assert found.live_bytes.tolist()[1:5] == [420, 400, 820, 820]
    # the use of the last weight of a gather frees its flat buffer
    assert found.live_bytes[5] == 420


def test_weights_that_are_used_again_soon_stay() -> None:
    order = marks([0, 1], [1, 0])
    near, far = (window([100, 100], order, stage3_max_reuse_distance=distance) for distance in (1_000, 100))
    assert near.live_bytes[4] == 400
    assert far.live_bytes[4] == 200


def test_a_limit_of_live_weights_stops_the_prefetch_but_not_the_fetch() -> None:
    order = marks([0, 1, 2], [2, 1, 0])
    wide = window([100] * 3, order, stage3_prefetch_bucket_size=1_000)
    tight = window([100] * 3, order, stage3_prefetch_bucket_size=1_000, stage3_max_live_parameters=0)
    assert tight.live_bytes.max() == 200
    assert wide.live_bytes.max() > tight.live_bytes.max()


def test_small_weights_are_no_part_of_the_window() -> None:
    found = window([100, 10], marks([0, 1], [1, 0]), stage3_param_persistence_threshold=10)
    assert found.live_bytes.max() == 200


def test_one_rank_gathers_nothing_unless_weights_lie_on_the_host() -> None:
    order = marks([0], [0])
    assert window([100], order, world_size=1).live_bytes.max() == 0
    assert window([100], order, world_size=1, offload_param="cpu").live_bytes.max() == 200


def test_freed_weights_stay_taken_while_the_host_runs_ahead() -> None:
    found = window([100, 100, 100], marks([0, 1, 2], [2, 1, 0]))
    assert found.live_bytes.max() == 200
    assert found.held_bytes(0).tolist() == found.live_bytes.tolist()
    assert found.held_bytes(2).max() == 400


def test_frozen_weights_of_a_recomputed_layer_leave_with_the_module_that_asked_for_it() -> None:
    job = Job(**{**SETTINGS, "stage3_max_reuse_distance": 10_000})
    frozen = [parameter.model_copy(update={"is_trained": False}) for parameter in weights([100, 100])]
    modules = [Module(name="first", parameters=(0,)), Module(name="second", parameters=(1,))]
    forward, backward = marks([0, 1], []).tolist(), marks([], [0]).tolist()[2:]
    recomputed = [
        (0, int(Mark.BEFORE_BACKWARD), 1),
        *[row for row in marks([0, 1], []).tolist() if row[1] in (Mark.BEFORE_FORWARD, Mark.AFTER_FORWARD)],
        (0, int(Mark.AFTER_BACKWARD), 1),
    ]
    order = np.array([*forward, *recomputed, *backward], dtype=np.int32)
    found = zero3_window(weights_of(frozen, job, "bf16"), modules, order, job)
    after_owner = len(forward) + len(recomputed) - 1
    # the first weight is needed next, and is gathered once more nevertheless
    assert found.live_bytes[after_owner - 1] == 200
    assert found.live_bytes[after_owner] == 0
    assert found.live_bytes[after_owner + 1] == 200


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    prefetch=st.integers(0, 500),
    reuse=st.integers(0, 1_000),
    live=st.integers(0, 2_000),
    ranks=st.integers(2, 5),
)
def test_no_setting_makes_the_window_smaller_than_one_gather_or_larger_than_twice_all(
    sizes: list[int], prefetch: int, reuse: int, live: int, ranks: int
) -> None:
    job = Job(
        **{
            **SETTINGS,
            "world_size": ranks,
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_max_reuse_distance": reuse,
            "stage3_max_live_parameters": live,
        }
    )
    held = weights_of(weights(sizes), job, "bf16")
    modules = [Module(name=str(number), parameters=(number,)) for number in range(len(sizes))]
    forward = list(range(len(sizes)))
    found = zero3_window(held, modules, marks(forward, forward[::-1]), job)
    assert found.peak_bytes.max() >= largest_gather_bytes(held, job)
    assert found.peak_bytes.max() <= 2 * sum(weight.padded_bytes(ranks) for weight in held)
    assert (found.peak_bytes >= found.live_bytes).all()
    assert (found.live_bytes >= 0).all()


def test_fsdp_holds_the_root_the_unit_and_in_the_backward_pass_the_next_one() -> None:
    job = Job(point=Point(1, 16), world_size=2, engine="fsdp", master_dtype=None)
    held = weights_of(weights([50, 10, 20, 30], [-1, 0, 1, 2]), job, "bf16")
    modules = [Module(name=str(number), parameters=(number,)) for number in range(4)]
    live = fsdp_window(held, modules, marks([0, 1, 2, 3], [3, 2, 1]), job, "bf16")
    forward_and_backward = [size for size in live.tolist() if size]
    assert max(forward_and_backward[:8]) == 100 + 60
    assert max(forward_and_backward) == 100 + 60 + 40
    assert live.dtype == np.int64
    assert pytest.approx(live[-1]) == 100 + 20
