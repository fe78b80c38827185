"""The page of the fault tests, from a record of them."""

import json
from pathlib import Path

from benchmarks.faults import Result, by_fault, page, read_results, standing, wanted


def result(outcome: str = "passed", *faults: str, **more: object) -> Result:
    fields = {"test": "t.py::test_it_holds[a]", "reason": "", "seconds": 1.0, "figures": {}, "is_slow": False}
    return Result(outcome=outcome, faults=faults or ("A1",), **{**fields, **more})  # type: ignore[arg-type]


def test_the_list_is_the_plans() -> None:
    ids = wanted()
    assert len(ids) == len(set(ids)) == 97
    assert {"A1", "A12", "B16", "C7", "C17", "D14", "E6", "F9", "I23", "J6"} <= set(ids)
    assert not {"A7", "A11", "B12", "C3", "C14", "D9", "E1", "E3", "E5", "F8", "I15", "J1"} & set(ids)


def test_one_failure_of_a_fault_is_a_failure_and_one_skip_makes_it_partial() -> None:
    assert standing([result(), result("failed")]) == "FAILED"
    assert standing([result(), result("skipped")]) == "green, in part"
    assert standing([result("xfailed")]) == "expected to fail"
    assert standing([]) == "not run"


def test_a_test_that_fails_when_it_is_torn_down_has_failed(tmp_path: Path) -> None:
    line = {"test": "t::a", "faults": ["C1"], "outcome": "passed", "seconds": 2.0, "figures": {}, "is_slow": False}
    record = tmp_path / "record"
    record.write_text("".join(json.dumps({**line, "outcome": each}) + "\n" for each in ("passed", "failed")))
    (read,) = read_results(record)
    assert read.outcome == "failed"


def test_the_page_tells_figures_reasons_and_what_was_not_run() -> None:
    text = page(
        [result("passed", "A1", "A2", figures={"gone within": "3.2 s"}), result("xfailed", "C7", reason="alpha")],
        "python -m benchmarks.faults",
        60.0,
    )
    assert "Of the 97 faults of the list 2 have a test that passes" in text
    assert "| A1 | green | it holds (a), 1.0 s | gone within: 3.2 s |" in text
    assert "| C7 | expected to fail | it holds (a), 1.0 s (alpha) |" in text
    assert "| J6 | not run |" in text
    assert set(by_fault([])) == set(wanted())
