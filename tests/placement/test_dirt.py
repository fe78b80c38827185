"""Whether a GPU counts as clean, told by what NVML says of it."""

from orchestrator.contract.units import GIB, MIB
from orchestrator.placement.dirt import CLEAN_DEADLINE_S, LOOK_AGAIN_S, CleanWait, DirtWatch
from orchestrator.placement.local_devices import LocalDevice


class Card:
    """One GPU of 24 GiB whose state the test sets."""

    def __init__(self, used_bytes: int = 0) -> None:
        self.used_bytes = used_bytes
        self.occupants: tuple[str, ...] = ()
        self.looks = 0

    def look(self, visible: str | None) -> list[LocalDevice]:
        assert visible == "GPU-1"
        self.looks += 1
        return [LocalDevice(0, "GPU-1", self.occupants, self.used_bytes, 24 * GIB)]


def test_processes_of_others_and_memory_without_a_process_are_dirt() -> None:
    card = Card()
    watch = DirtWatch("GPU-1", card.look)
    assert watch.dirt() == ()
    card.used_bytes = 10 * GIB
    assert watch.dirt() == ("GPU 0: 10.00 GiB are in use though no process is seen",)
    card.occupants = ("GPU 0: process 7 (python) holds 10.00 GiB",)
    assert watch.dirt() == card.occupants


def test_what_a_desktop_holds_for_good_is_none_but_a_large_share_is() -> None:
    desktop = Card(2 * GIB)
    assert DirtWatch("GPU-1", desktop.look).dirt() == ()
    full_from_the_start = Card(10 * GIB)
    assert DirtWatch("GPU-1", full_from_the_start.look).dirt() != ()
    desktop.used_bytes += 400 * MIB
    assert DirtWatch("GPU-1", desktop.look).dirt() == ()


def test_a_cpu_slot_is_never_looked_at() -> None:
    card = Card(10 * GIB)
    assert DirtWatch(None, card.look).dirt() == ()
    assert card.looks == 0


def test_memory_is_waited_for_until_it_is_back() -> None:
    card, now_s = Card(), [0.0]
    watch = DirtWatch("GPU-1", card.look)
    card.used_bytes = 10 * GIB
    wait = CleanWait(watch, lambda: now_s[0])
    assert not wait.is_over
    card.used_bytes = 0
    assert not wait.is_over, "it is not looked at again at once"
    now_s[0] += LOOK_AGAIN_S
    assert wait.is_over
    assert wait.dirt == ()


def test_memory_that_stays_away_is_given_up_with_what_is_seen() -> None:
    card, now_s = Card(), [0.0]
    watch = DirtWatch("GPU-1", card.look)
    card.used_bytes = 10 * GIB
    wait = CleanWait(watch, lambda: now_s[0])
    now_s[0] += CLEAN_DEADLINE_S + 1
    assert wait.is_over
    assert "10.00 GiB" in wait.dirt[0]
