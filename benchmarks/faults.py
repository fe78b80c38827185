"""Does Brimful keep its promises when things break?

    python -m benchmarks.faults [--quick] [--keyword WORDS] [--output PAGE]

Runs the fault tests (tests/faults) in a process of their own, all of them or with --quick those that plain pytest runs
there, and writes what they found to the page (docs/measurements/faults.md): for each fault of the list whether a test
of it passes, and the figures that the tests state. The ids are explained by the tests' names. Exits with 1 when a test
fails or, without --quick, when a fault of the list has no test that passes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.two_nodes import machine
from orchestrator.report.markdown import markdown_table
from orchestrator.report.tables import Table

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "faults"
PAGE = ROOT / "docs" / "measurements" / "faults.md"
RECORD_VARIABLE = "BRIMFUL_FAULTS_RECORD"
"""See tests/faults/conftest.py."""
AREAS = {
    "A": "driver, submission, signals",
    "B": "trial processes",
    "C": "cluster",
    "D": "MLflow",
    "E": "stores and ledger",
    "F": "disk and files",
    "I": "security",
    "J": "time and determinism",
}
RANGES = "A1-A6 A8-A10 A12 B1-B11 B14-B16 C1 C2 C4-C13 C15-C17 D1-D8 D10-D14 E2 E4 E6-E14 F1-F7 F9 I1-I14 I17-I23 J2-J6"
"""The faults that the project's reliability plan asks for."""


@dataclass(frozen=True)
class Result:
    """One test: its node id, the faults it injects, how it ended (`passed`, `failed`, `skipped`, `xfailed`), why where
    it did not pass, its seconds, and the figures it states."""

    test: str
    faults: tuple[str, ...]
    outcome: str
    reason: str
    seconds: float
    figures: dict[str, str]
    is_slow: bool

    @property
    def title(self) -> str:
        """The test's name in words."""
        name = self.test.rpartition("::")[2]
        words, bracket, parameters = name.partition("[")
        return words.removeprefix("test_").replace("_", " ") + (f" ({parameters[:-1]})" if bracket else "")


def wanted() -> list[str]:
    """Ids of all faults of the list, in order."""
    ids = []
    for word in RANGES.split():
        first, _, last = word.partition("-")
        area, start = first[0], int(first[1:])
        ids += [f"{area}{number}" for number in range(start, int(last[1:] if last else start) + 1)]
    return ids


def read_results(record: Path) -> list[Result]:
    """What the tests left in `record`; a test that failed when it was set up or torn down has failed."""
    lines: dict[str, dict] = {}
    for text in record.read_text().splitlines():
        line = json.loads(text)
        before = lines.get(line["test"])
        if before is not None and before["outcome"] == "failed":
            continue
        lines[line["test"]] = line if before is None or line["outcome"] != "passed" else before
    return [
        Result(
            test=test,
            faults=tuple(line["faults"]),
            outcome=line["outcome"],
            reason=line.get("reason", ""),
            seconds=line["seconds"],
            figures=line["figures"],
            is_slow=line["is_slow"],
        )
        for test, line in lines.items()
    ]


def standing(results: Sequence[Result]) -> str:
    """What all tests of one fault say together: `green`, `FAILED`, `expected to fail`, `skipped`, `not run`."""
    outcomes = {result.outcome for result in results}
    if not outcomes:
        return "not run"
    if "failed" in outcomes:
        return "FAILED"
    if "passed" in outcomes:
        return "green, in part" if outcomes & {"xfailed", "skipped"} else "green"
    return "expected to fail" if "xfailed" in outcomes else "skipped"


def by_fault(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The tests of each fault of the list, and of any other that a test names."""
    found: dict[str, list[Result]] = {fault: [] for fault in wanted()}
    for result in results:
        for fault in result.faults:
            found.setdefault(fault, []).append(result)
    return found


def page(results: Sequence[Result], command: str, seconds: float) -> str:
    """The measurement as a Markdown page."""
    faults = by_fault(results)
    green = [fault for fault in wanted() if standing(faults[fault]).startswith("green")]
    counts = ", ".join(
        f"{sum(r.outcome == kind for r in results)} {kind}" for kind in sorted({r.outcome for r in results})
    )
    intro = (
        f"`{command}`: {machine()}.",
        f"{len(results)} tests in {seconds / 60:.0f} min: {counts}. Of the {len(wanted())} faults of the list "
        f"{len(green)} have a test that passes. Figures are those of this run, on a shared machine; tests bound them "
        "generously and never by these values.",
    )
    parts = ["# When things break", *(textwrap.fill(text, width=120, break_on_hyphens=False) for text in intro)]
    areas: defaultdict[str, list[str]] = defaultdict(list)
    for fault in faults:
        match = re.fullmatch(r"([A-Z])\d+", fault)
        areas[match.group(1) if match else "other"].append(fault)
    for area, ids in areas.items():
        parts += [f"## {area}: {AREAS.get(area, 'more')}", markdown_table(_table(ids, faults))]
    return "\n\n".join(parts) + "\n"


def _table(ids: Sequence[str], faults: dict[str, list[Result]]) -> Table:
    columns = ("fault", "stands", "shown by", "figures")
    rows = tuple(row for fault in ids for row in _rows(fault, faults[fault]))
    return Table("faults", columns, rows, frozenset(columns))


def _rows(fault: str, results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    if not results:
        yield fault, "not run", "", ""
    for result in results:
        figures = "; ".join(f"{name}: {value}" for name, value in result.figures.items())
        why = f" ({result.reason})" if result.reason and result.outcome != "passed" else ""
        yield fault, standing([result]), f"{result.title}, {result.seconds:.1f} s{why}", figures


def run_tests(record: Path, quick: bool, keyword: str | None) -> int:
    """Run the tests; returns pytest's exit code."""
    marks = "not slow" if quick else ""
    words = ["-m", marks, "-q", *(["-k", keyword] if keyword else [])]
    command = [sys.executable, "-m", "pytest", str(TESTS), "-p", "no:cacheprovider", "--timeout", "1200", *words]
    environment = {**os.environ, RECORD_VARIABLE: str(record)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what plain pytest runs in tests/faults")
    parser.add_argument("--keyword", help="only tests whose names match, as pytest's -k; the page is then not whole")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "results.jsonl"
        record.touch()
        started_s = time.monotonic()
        code = run_tests(record, arguments.quick, arguments.keyword)
        results = read_results(record)
    command = "python -m benchmarks.faults" + (" --quick" if arguments.quick else "")
    arguments.output.write_text(page(results, command, time.monotonic() - started_s))
    faults = by_fault(results)
    for fault in wanted():
        print(f"{fault}: {standing(faults[fault])}")
    missing = [fault for fault in wanted() if not standing(faults[fault]).startswith("green")]
    if code or (missing and not arguments.quick):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
