"""Estimators of model states, and what they leave out (field cases A12, A13)."""

from collections.abc import Mapping

import pytest

from field.model_states import zero2_model_states_only, zero3_model_states_only
from field.pricing import GIB, price, zero
from orchestrator.contract.profile import Point, Profile

MILLION = 10**6
BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}


@pytest.mark.parametrize(
    ("parameters", "largest", "ranks", "offloads", "printed"),
    [
        (6805, 131, 4, (True, True), (171.13, 0.49)),
        (6805, 131, 4, (True, False), (152.11, 3.66)),
        (6805, 131, 4, (False, False), (2.93, 29.01)),
        (2849, 65, 1, (True, True), (71.66, 0.25)),
        (2849, 65, 1, (True, False), (63.70, 5.55)),
        # the thread has four devices, the printed table is that of one
        (2849, 65, 1, (False, False), (0.37, 48.02)),
    ],
)
def test_a12_deepspeed_prints_model_states_of_stage_3(
    parameters: int, largest: int, ranks: int, offloads: tuple[bool, bool], printed: tuple[float, float]
) -> None:
    found = zero3_model_states_only(parameters * MILLION, largest * MILLION, ranks, *offloads)
    # the counts are printed in millions, so that products with 18 are known to 0.02 GiB only
    assert [size / GIB for size in found] == pytest.approx(printed, abs=0.05)


@pytest.mark.parametrize(("offloads", "printed"), [(True, (127.48, 5.31)), (False, (127.48, 15.93))])
def test_a12_deepspeed_printed_model_states_of_stage_2(offloads: bool, printed: tuple[float, float]) -> None:
    assert [size / GIB for size in zero2_model_states_only(2851 * MILLION, 8, offloads)] == pytest.approx(
        printed, abs=0.05
    )


def everything_offloaded(profile: Profile) -> dict[int, int]:
    """Needs of a 7B model under stage 3 with all offloaded, by devices."""
    return {ranks: price(profile, zero(3, ranks, Point(1, 512), **BOTH)).needed_bytes for ranks in (1, 2, 4)}


@pytest.mark.structures("qwen15_7b_full")
def test_a13_a_bill_of_stage_3_with_everything_offloaded_does_not_vanish(profiles: Mapping[str, Profile]) -> None:
    states = zero3_model_states_only(7721 * MILLION, 622 * MILLION, 4, True, True)[1]
    assert states < 2.5 * GIB
    # seen with 6.8B: 14.3 GiB after the engine was built, 20.8 GiB in the second step
    assert min(everything_offloaded(profiles["qwen15_7b_full"]).values()) > 5 * GIB


@pytest.mark.structures("qwen15_7b_full")
@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="predicted 15 % apart; what kept both devices at 13 GB is not known"
)
def test_a13_four_devices_need_as_much_as_two(profiles: Mapping[str, Profile]) -> None:
    # seen with GPT-J: about 13 GB on two devices and on four
    needs = everything_offloaded(profiles["qwen15_7b_full"])
    assert needs[4] == pytest.approx(needs[2], rel=0.15)
