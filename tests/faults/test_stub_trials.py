"""Faults of trial processes whose ranks train nothing: what the pool sees of them is the same."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from fakes import FakeStrategy, candidate, new_ledger, spec
from pools.conformance import STUB, Home, begun, config, gather, processes_of, reach, run, until

from faults import leaks
from orchestrator.backends.local_pool import LocalPool
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Cancelled, Crashed, Infra, Ok, Outcome, Phase
from orchestrator.contract.record import TrialRecord
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Launch
from orchestrator.trial.ranklog import HEAD_BYTES, TAIL_BYTES, CappedLog

Figure = Callable[[str, str], None]


@pytest.fixture
def home(tmp_path: Path, tests_importable: None) -> Home:
    return Home(tmp_path)


@pytest.fixture
def pool(tests_importable: None) -> Iterator[LocalPool]:
    with closing(LocalPool(devices=2, template_module=STUB)) as pool:
        yield pool


class ScriptedPool(LocalPool):
    """Ranks do as `behaviours` says of their trial and attempt (`0000/attempt-1`), the others end well."""

    behaviours: dict[str, str] = {}

    def launch(self, launch: Launch) -> None:
        name = f"{launch.directory.parent.name}/{launch.directory.name}"
        (launch.directory / "behave.json").write_text(json.dumps({"0": self.behaviours.get(name, "ok")}))
        super().launch(launch)


def sweep(home: Path, behaviours: dict[str, str], trials: int = 3) -> list[TrialRecord]:
    """The trials of a sweep whose ranks do so."""
    of = spec()
    ledger = new_ledger(home, of)
    with closing(ScriptedPool(devices=2, template_module=STUB)) as pool, ledger.lock():
        pool.behaviours = behaviours
        run_sweep(of, ledger, Services(pool, FakeStrategy(candidate(size) for size in range(1, trials + 1))))
    leaks.assert_home_clean(home)
    return ledger.read_trials()


def ends(record: TrialRecord) -> list[str]:
    """How the attempts of a trial ended."""
    return [attempt.outcome.kind for attempt in record.attempts if attempt.outcome is not None]


@pytest.mark.fault("B2")
def test_a_plain_kill_is_tried_once_more_and_is_no_out_of_memory(
    tests_importable: None, tmp_path: Path, figure: Figure
) -> None:
    """docs/decisions/0017: once is an accident, twice is somebody's will."""
    kill = "signal:SIGKILL"
    behaviours = {"0000/attempt-1": kill, "0001/attempt-1": kill, "0001/attempt-2": kill}
    once, twice, other = sweep(tmp_path, behaviours)
    assert ends(once) == ["crashed", "ok"]
    assert ends(twice) == ["crashed", "crashed"]
    assert isinstance(twice.outcome, Crashed)
    assert twice.outcome.signal == "SIGKILL"
    assert ends(other) == ["ok"]
    figure("launches of a trial that is killed each time", "2")


@pytest.mark.fault("B2")
def test_another_signal_is_not_tried_again(tests_importable: None, tmp_path: Path) -> None:
    crashed, *others = sweep(tmp_path, {"0000/attempt-1": "signal:SIGSEGV"})
    assert ends(crashed) == ["crashed"]
    assert [ends(other) for other in others] == [["ok"], ["ok"]]


@pytest.mark.fault("B11")
def test_what_would_act_on_a_terminal_is_no_part_of_an_outcome() -> None:
    noise = "\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07\x07 \x9b1mand\rblue\r\nend\x00"
    crash = Crashed(phase=Phase.INIT, rank=0, error=noise, evidence=noise)
    assert crash.error == crash.evidence == "red 1mand\nblue\nend"
    assert Infra(cause=noise).cause == crash.error


@pytest.mark.fault("B5")
@pytest.mark.parametrize("speed", ["NaN", "-1", "0", "Infinity", "1e400", "1e30"])
def test_a_result_that_cannot_be_is_a_damaged_one(pool: LocalPool, home: Home, speed: str) -> None:
    outcome = run(pool, home.attempt({"0": f"garbage:{speed}"}))
    assert isinstance(outcome, Crashed)
    assert "damaged result" in outcome.error


def test_the_leak_check_sees_ranks_and_not_their_templates(pool: LocalPool, home: Home) -> None:
    assert isinstance(run(pool, home.attempt(of=config(2))), Ok)
    until(lambda: leaks.ranks() == [])
    launch = home.attempt({"0": "hang", "1": "hang"}, config(2))
    pool.launch(launch)
    reach(pool, lambda: begun(launch, [0, 1]))
    assert len(leaks.ranks()) >= 2
    pool.cancel(launch.token)
    gather(pool, 1)


@pytest.mark.fault("B15")
def test_a_rank_that_ignores_sigterm_is_killed(pool: LocalPool, home: Home, figure: Figure) -> None:
    launch = home.attempt({"0": "stubborn"})
    pool.launch(launch)
    reach(pool, lambda: begun(launch))
    cancelled_s = time.monotonic()
    pool.cancel(launch.token)
    (ended,) = gather(pool, 1)
    figure("cancelled to gone, SIGTERM ignored", f"{time.monotonic() - cancelled_s:.1f} s")
    assert ended.outcome == Cancelled()
    assert processes_of(launch) == []


@pytest.mark.fault("B16")
def test_a_hundred_trials_in_a_row_leave_nothing(pool: LocalPool, home: Home, figure: Figure) -> None:
    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))

    for _ in range(3):
        assert isinstance(run(pool, home.attempt(of=config(2))), Ok)
    before = footprint()
    outcomes: list[Outcome] = [run(pool, home.attempt(of=config(2))) for _ in range(100)]
    assert [outcome for outcome in outcomes if not isinstance(outcome, Ok)] == []
    until(lambda: footprint()[0] <= before[0] + 5 and footprint()[1] <= before[1])
    figure("file descriptors before and after", f"{before[0]}, {footprint()[0]}")


def flood(path: Path, pieces: int, piece: bytes) -> int:
    """Write `pieces` times `piece` to a capped log; returns the bytes that this process grew by."""
    before = psutil.Process().memory_info().rss
    log = CappedLog(path)
    for _ in range(pieces):
        log.write(piece)
    log.close()
    return psutil.Process().memory_info().rss - before


@pytest.mark.fault("B11")
@pytest.mark.parametrize(
    ("pieces", "piece"),
    [(500, b"x" * 99 + b"\n"), (1, b"y" * 50 * 10**6), (8000, b"\x1b[31mred\x1b[0m\r" * 500)],
    ids=["small lines", "one line of 50 MB", "escapes"],
)
def test_a_log_is_capped_with_head_and_tail(tmp_path: Path, pieces: int, piece: bytes, figure: Figure) -> None:
    grown_bytes = flood(tmp_path / "log", pieces, piece)
    written = (tmp_path / "log").read_bytes()
    total = pieces * len(piece)
    assert len(written) <= HEAD_BYTES + TAIL_BYTES + 100
    if total <= HEAD_BYTES + TAIL_BYTES:
        assert len(written) == total
    else:
        assert f"[... {total - HEAD_BYTES - TAIL_BYTES} bytes left out ...]".encode() in written
        figure(
            "log of", f"{total / 1e6:.0f} MB kept as {len(written) / 1e6:.1f} MB, memory +{grown_bytes / 1e6:.0f} MB"
        )
    assert grown_bytes < 200e6


@pytest.mark.slow
@pytest.mark.fault("B11")
def test_half_a_gigabyte_of_a_ranks_words_is_ten_megabytes(tests_importable: None, home: Home, figure: Figure) -> None:
    """Through the real keeper; neither it nor the driver holds more than the log's tail."""
    launch = home.attempt()
    (launch.directory / "fault").write_text("flood_half_a_gigabyte")
    highest_bytes = 0
    with closing(LocalPool(devices=1, template_module="trial.bare_template")) as pool:
        before_bytes = psutil.Process().memory_info().rss
        pool.launch(launch)
        while not (ended := pool.wait(0.05)):
            held = [_resident_bytes(each) for each in psutil.Process().children(recursive=True)]
            highest_bytes = max(highest_bytes, *held)
    grown_bytes = psutil.Process().memory_info().rss - before_bytes
    log = AttemptFiles(launch.directory).rank_log(0)
    assert isinstance(ended[0].outcome, Crashed)
    assert ended[0].outcome.evidence.endswith("last line\n")
    assert log.stat().st_size <= HEAD_BYTES + TAIL_BYTES + 100
    assert grown_bytes < 50e6
    assert highest_bytes < 150e6
    figure("500 MB of log", f"kept as {log.stat().st_size / 1e6:.1f} MB, driver +{grown_bytes / 1e6:.0f} MB")


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
