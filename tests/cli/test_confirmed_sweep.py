"""The best are measured again before a winner is declared: a real sweep, stopped on the way and resumed."""

import json
import signal
import threading

import pytest
from brimful_command import Workplace, await_true, end

pytestmark = pytest.mark.trains
LOCAL = ("--pool", "local", "--no-tracking")


def test_a_confirmed_winner_from_the_command_line_to_the_export(place: Workplace) -> None:
    spec = place.spec("confirmed", top=2)
    process = place.start("run", spec, *LOCAL)
    heard: list[str] = []
    assert process.stderr is not None
    listener = threading.Thread(target=lambda: heard.extend(process.stderr or ()))
    listener.start()
    await_true(lambda: any("Confirming the best: run 1 of 2 of trial" in line for line in heard), process)
    process.send_signal(signal.SIGSTOP)  # so that the run does not end before the status is read
    status = place.json("status", "confirmed")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=place.deadline_s) == 130
    listener.join()
    assert isinstance(status, dict)
    assert (status["done"], status["confirming"]) == (4, 1)

    before = place.json("trials", "confirmed")
    exit_code, stdout, stderr = end(place.start("resume", "confirmed"))
    assert exit_code == 0, stderr
    assert "Confirmed: measured 2 times again after the search, which had found" in stdout

    rows, best = place.json("trials", "confirmed"), place.json("best", "confirmed")
    assert isinstance(before, list)
    assert isinstance(rows, list)
    assert isinstance(best, dict)
    searched = {row["trial"]: row["search_tokens_per_second"] for row in before}
    assert {row["trial"]: row["search_tokens_per_second"] for row in rows} == searched, "nothing is searched again"
    runs = [row["confirmation_runs"] for row in rows]
    assert set(runs) <= {0, 2}
    assert "".join([*heard, stderr]).count("confirming trial") == sum(runs) >= 4, "nothing is measured twice"
    assert best["confirmation_runs"] == 2
    assert best["tokens_per_second_low"] < best["tokens_per_second"] < best["tokens_per_second_high"]

    folder = place.folder / "home" / "sweeps" / "confirmed"
    measured = json.loads((folder / "export" / "measured.json").read_text())
    assert measured["reported"]["tokens_per_second"] == best["tokens_per_second"]
    speeds = [
        json.loads(file.read_text())["measurement"]["tokens_per_second"]
        for file in (folder / "trials" / f"{best['trial']:04d}").glob("attempt-*/outcome.json")
        if json.loads(file.read_text())["kind"] == "ok"
    ]
    assert len(speeds) == 3
    assert sum(speeds) - best["search_tokens_per_second"] == pytest.approx(2 * best["tokens_per_second"])
