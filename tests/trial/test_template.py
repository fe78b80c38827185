"""The warm template's promises: nothing of a rank outlives it, and nothing grows from rank to rank."""

import os
from pathlib import Path

import pytest

from orchestrator.contract.outcome import Ok
from orchestrator.trial.ranklog import HEAD_BYTES, TAIL_BYTES, CappedLog
from trial.rig import FULL, TemplateClient, trial_config, write_trial

pytestmark = pytest.mark.trains


def is_alive(pid: int) -> bool:
    """Whether `pid` is a process that has not ended; one that is only not yet reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_grandchild_in_its_own_session_ends_with_its_rank(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    exited, outcome = template.run(write_trial(tmp_path, trial_config(data, FULL), fault="leave_grandchild"))
    assert isinstance(outcome, Ok)
    assert (exited.status, exited.leftovers) == (0, 1)
    assert not is_alive(int((tmp_path / "grandchild").read_text()))


def test_forks_without_a_mark_in_their_environment_end_too(
    template: TemplateClient, data: Path, tmp_path: Path
) -> None:
    exited, _ = template.run(write_trial(tmp_path, trial_config(data, FULL), fault="leave_forks"))
    assert exited.leftovers == 2


def wait_for(path: Path, pid: int) -> None:
    while not (path.exists() and path.read_text()):
        assert is_alive(pid), "the rank ended before its time"


def test_a_killed_rank_leaves_its_neighbour_alone(template: TemplateClient, data: Path, tmp_path: Path) -> None:
    config = trial_config(data, FULL)
    held = [write_trial(tmp_path / name, config, fault="sleep_for_ever") for name in ("first", "second")]
    started = [template.start(files) for files in held]
    for files, rank in zip(held, started, strict=True):
        wait_for(files.directory / "grandchild", rank.pid)
    strays = [int((files.directory / "grandchild").read_text()) for files in held]
    template.kill(started[0].token)
    exited = template.exited()
    assert (exited.token, exited.status, exited.leftovers) == (started[0].token, -9, 1)
    assert [is_alive(pid) for pid in (started[0].pid, strays[0], started[1].pid, strays[1])] == [
        False,
        False,
        True,
        True,
    ]
    template.kill(started[1].token)
    assert template.exited().token == started[1].token
    assert not is_alive(strays[1])


def test_an_unknown_token_is_no_error(template: TemplateClient, data: Path, tmp_path: Path) -> None:
    template.kill("nobody")
    exited, _ = template.run(write_trial(tmp_path, trial_config(data, FULL)))
    assert exited.status == 0


def test_everything_ends_when_the_owner_is_gone(data: Path, tmp_path: Path, tests_on_path: None) -> None:
    client = TemplateClient()
    files = write_trial(tmp_path, trial_config(data, FULL), fault="sleep_for_ever")
    started = client.start(files)
    wait_for(tmp_path / "grandchild", started.pid)
    assert client.close() == 0
    assert not is_alive(started.pid)
    assert not is_alive(int((tmp_path / "grandchild").read_text()))


def footprint(pid: int) -> tuple[int, int]:
    """Open files and resident kilobytes of the template."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next(line for line in status if line.startswith("VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(resident.split()[1])


def test_trial_after_trial_costs_the_template_nothing(template: TemplateClient, data: Path, tmp_path: Path) -> None:
    config = trial_config(data, FULL)
    template.run(write_trial(tmp_path / "first", config))
    files_before, resident_before = footprint(template.process.pid)
    for number in range(5):
        exited, _ = template.run(write_trial(tmp_path / str(number), config))
        assert exited.leftovers == 0
    files_after, resident_after = footprint(template.process.pid)
    assert files_after == files_before
    assert resident_after - resident_before < 4096


def test_a_flood_of_output_is_capped_with_both_ends_kept(template: TemplateClient, data: Path, tmp_path: Path) -> None:
    files = write_trial(tmp_path, trial_config(data, FULL), fault="flood_log")
    template.run(files)
    content = files.rank_log(0).read_bytes()
    assert content.startswith(b"first line\n")
    assert b"last line\n" in content[-TAIL_BYTES:]
    assert b"bytes left out ...]" in content
    assert len(content) < HEAD_BYTES + TAIL_BYTES + 100


def test_a_log_below_the_cap_is_whole(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "log")
    pieces = [bytes([65 + number % 26]) * 700_001 for number in range(14)]
    for piece in pieces:
        log.write(piece)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"".join(pieces)
