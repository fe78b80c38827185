"""The template's promises: nothing of a rank outlives it, and nothing grows from rank to rank."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.contract.handoff import AttemptFiles
from orchestrator.trial.ranklog import HEAD_BYTES, TAIL_BYTES, CappedLog
from trial.rig import FULL, TemplateClient, trial_config, write_trial


@pytest.fixture
def bare(path_to_tests: None) -> Iterator[TemplateClient]:
    """A template without training libraries, which starts at once."""
    client = TemplateClient("trial.bare_template")
    yield client
    client.close()


def rank_that(directory: Path, behaviour: str) -> AttemptFiles:
    """The folder of a rank that does what `bare_template` calls `behaviour`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "fault").write_text(behaviour)
    return AttemptFiles(directory)


def is_alive(pid: int) -> bool:
    """Whether `pid` is a process that has not ended; one that is only not yet reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def grandchild_of(files: AttemptFiles, pid: int) -> int:
    """The process that the rank `pid` leaves, as soon as it exists."""
    note = files.directory / "grandchild"
    while not (note.exists() and note.read_text()):
        assert is_alive(pid), "the rank ended before its time"
        time.sleep(0.02)
    return int(note.read_text())


def wait_for_end(pids: list[int], deadline_s: float = 20) -> None:
    end_s = time.monotonic() + deadline_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < end_s, f"of {pids} some live on"
        time.sleep(0.02)


def test_a_grandchild_in_its_own_session_ends_with_its_rank(bare: TemplateClient, tmp_path: Path) -> None:
    exited, _ = bare.run(rank_that(tmp_path, "leave_grandchild"))
    assert (exited.status, exited.leftovers) == (0, 1)
    assert not is_alive(int((tmp_path / "grandchild").read_text()))


def test_forks_without_a_mark_in_their_environment_end_too(bare: TemplateClient, tmp_path: Path) -> None:
    exited, _ = bare.run(rank_that(tmp_path, "leave_forks"))
    assert exited.leftovers == 2


def test_the_exit_code_of_a_rank_is_told(bare: TemplateClient, tmp_path: Path) -> None:
    exited, _ = bare.run(rank_that(tmp_path, "exit_with_three"))
    assert (exited.status, exited.leftovers) == (3, 0)


def test_a_killed_rank_leaves_its_neighbour_alone(bare: TemplateClient, tmp_path: Path) -> None:
    held = [rank_that(tmp_path / name, "sleep_for_ever") for name in ("first", "second")]
    started = [bare.start(files) for files in held]
    strays = [grandchild_of(files, rank.pid) for files, rank in zip(held, started, strict=True)]
    bare.kill("nobody")
    bare.kill(started[0].token)
    exited = bare.exited()
    assert (exited.token, exited.status, exited.leftovers) == (started[0].token, -signal.SIGKILL, 1)
    assert [is_alive(pid) for pid in (started[0].pid, strays[0])] == [False, False]
    assert [is_alive(pid) for pid in (started[1].pid, strays[1])] == [True, True]
    bare.kill(started[1].token)
    assert bare.exited().token == started[1].token
    assert not is_alive(strays[1])


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_with_the_template(path_to_tests: None, tmp_path: Path, number: signal.Signals | None) -> None:
    client = TemplateClient("trial.bare_template")
    files = rank_that(tmp_path, "sleep_for_ever")
    started = client.start(files)
    stray = grandchild_of(files, started.pid)
    if number is not None:
        os.kill(client.process.pid, number)
    client.close()
    wait_for_end([started.pid, stray])
    assert not is_alive(started.pid)
    assert not is_alive(stray)


def test_a_flood_of_output_is_capped_with_both_ends_kept(bare: TemplateClient, tmp_path: Path) -> None:
    files = rank_that(tmp_path, "flood_log")
    bare.run(files)
    content = files.rank_log(0).read_bytes()
    assert content.startswith(b"first line\n")
    assert content.endswith(b"last line\n")
    assert b"bytes left out ...]" in content
    assert len(content) < HEAD_BYTES + TAIL_BYTES + 100


def test_a_log_below_the_cap_is_whole(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "log")
    pieces = [bytes([65 + number % 26]) * 700_001 for number in range(14)]
    for piece in pieces:
        log.write(piece)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"".join(pieces)


def footprint(pid: int) -> tuple[int, int]:
    """Open files and resident kilobytes of the template."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next(line for line in status if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident.split()[1])


@pytest.mark.trains
def test_trial_after_trial_costs_the_template_nothing(template: TemplateClient, data: Path, tmp_path: Path) -> None:
    config = trial_config(data, FULL)
    template.run(write_trial(tmp_path / "first", config))
    files_before, resident_before = footprint(template.process.pid)
    for number in range(5):
        exited, _ = template.run(write_trial(tmp_path / str(number), config))
        assert (exited.status, exited.leftovers) == (0, 0)
    files_after, resident_after = footprint(template.process.pid)
    assert files_after == files_before
    assert resident_after - resident_before < 4096
