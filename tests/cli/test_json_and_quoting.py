"""One JSON document whatever goes wrong, and printed commands that a shell reads as they are meant."""

import json
import shlex
from pathlib import Path

import pytest
from brimful_command import Workplace

from orchestrator.cli.ending import home_option


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["trials"], "NAME"),
        (["nonsense"], "nonsense"),
        (["best", "whole", "--hom", "."], "--hom"),
        (["logs", "whole", "one"], "TRIAL"),
        (["logs", "whole", "--rank", "-1"], "--rank"),
        (["logs", "no-such"], "no-such"),
    ],
)
def test_a_wrong_command_line_is_one_document(place: Workplace, arguments: list[str], fault: str) -> None:
    run = place.run(*arguments, "--json")
    document = json.loads(run.stdout)
    assert (run.returncode, document["exit_code"]) == (2, 2)
    assert fault in document["error"]
    assert document["error"] in run.stderr


@pytest.mark.trains
def test_a_log_as_a_document(place: Workplace, finished: str) -> None:
    document = place.json("logs", finished, "0")
    assert isinstance(document, dict)
    assert (document["trial"], document["attempt"], document["rank"]) == (0, 1, 0)
    assert document["text"] == place.run("logs", finished, "0").stdout
    assert place.run("logs", finished, "0", "--json", "--follow").returncode == 2


@pytest.mark.trains
def test_a_report_file_keeps_its_format_beside_the_document(place: Workplace, finished: str, tmp_path: Path) -> None:
    document = place.json("report", finished, "-o", tmp_path / "r.md")
    assert isinstance(document, dict)
    assert document["sweep"]["name"] == finished
    assert (tmp_path / "r.md").read_text().startswith("# Sweep whole")


@pytest.mark.trains
def test_printed_commands_survive_a_space_in_the_path(place: Workplace, finished: str, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    last = place.run("export", finished, "-o", folder).stdout.splitlines()[-1]
    assert shlex.split(last)[-2:] == ["bash", str(folder / "launch.sh")]
    assert shlex.split(home_option(tmp_path / "a home")) == ["--home", str(tmp_path / "a home")]


def test_a_home_that_cannot_be_made_is_named(place: Workplace, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    run = place.run("run", place.spec("homeless"), "--pool", "local", "--no-tracking", "--home", home)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == f"{home} cannot be made (File exists); choose another folder with --home"
