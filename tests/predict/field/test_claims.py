"""The stand on a public claim follows from bills, and is worded from their figures."""

from collections.abc import Mapping

import pytest

from benchmarks.claims import claims
from benchmarks.claims_stands import Amount, Fit, Priced, Share
from field.pricing import GIB, plain, price
from orchestrator.contract.profile import Point, Profile

Profiles = Mapping[str, Profile]


@pytest.fixture(scope="module")
def rows(profiles: Profiles) -> tuple[Priced, Priced]:
    """One short row of a small model, and as many long ones as no T4 holds."""
    return tuple(
        Priced(label, price(profiles["small_wide_vocabulary"], plain(point), 16 * GIB), "t4")
        for label, point in (("short", Point(1, 64)), ("long", Point(16, 2048)))
    )  # type: ignore[return-value]


@pytest.mark.structures("small_wide_vocabulary")
def test_a_claim_holds_where_all_figures_are_near(rows: tuple[Priced, Priced]) -> None:
    needed = float(rows[0].verdict.needed_bytes)
    stand = Amount((0.9 * needed, needed), "in all").stand(rows[:1])
    assert stand.verdict == "Holds:"
    assert stand.reason == f"short: {needed / 1e9:.1f} GB in all."


@pytest.mark.structures("small_wide_vocabulary")
def test_a_claim_that_holds_for_some_says_for_which_and_what_is_in_the_way(rows: tuple[Priced, Priced]) -> None:
    stand = Fit(None).stand(rows)
    assert stand.verdict == "Holds only if"
    for_it, against = stand.reason.split(" But not with ")
    assert for_it.startswith("short:")
    assert against.startswith("long:")
    assert "does not fit" in against
    assert "(logits" in against


@pytest.mark.structures("small_wide_vocabulary")
def test_a_claim_that_nothing_agrees_with_names_what_comes_near(rows: tuple[Priced, Priced]) -> None:
    states_bytes = rows[0].terms()["context"]
    stand = Amount((states_bytes, states_bytes), "in all").stand(rows)
    assert stand.verdict == "Does not hold, because"
    assert stand.reason.endswith(f"What comes near is context alone: {states_bytes / 1e9:.1f} GB.")


@pytest.mark.structures("small_wide_vocabulary")
def test_shares_are_of_the_full_run_beside_them(rows: tuple[Priced, Priced]) -> None:
    share = rows[0].verdict.needed_bytes / rows[1].verdict.needed_bytes
    stand = Share((share, share)).stand([rows[1], rows[0]])
    assert stand.verdict == "Holds:"
    assert f"{100 * share:.0f} % of long" in stand.reason


def test_every_claim_has_configurations_and_a_key_of_its_own() -> None:
    found = claims()
    assert len({claim.key for claim in found}) == len(found) == 8
    assert all(claim.configurations for claim in found)
