"""What the pages say exists, exists."""

import re
from pathlib import Path

import pytest
import typer

from orchestrator.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for line in re.findall(r"^(?:\$ )?brimful ([a-z]+)|`brimful ([a-z]+)", page.read_text(), re.MULTILINE):
        assert (line[0] or line[1]) in verbs


def test_every_case_names_tests_that_exist() -> None:
    rows = [
        line for line in (ROOT / "docs" / "field-cases.md").read_text().splitlines() if re.match(r"\| [A-Z]\d", line)
    ]
    assert len(rows) == 41
    for row in rows:
        named = row.split("|")[3]
        files = re.findall(r"tests/[\w/]+\.py", named)
        assert files, row
        texts = "".join((ROOT / file).read_text() for file in files)
        texts += "".join(path.read_text() for path in (ROOT / "tests" / "trial").glob("test_*.py"))
        for word in re.findall(r"\b\w+_\w+_\w+\b", re.sub(r"`[^`]*`", "", named)):
            assert re.search(rf"def test_\w*{word}", texts), word
