import pytest
from brimful_command import Workplace


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """One workplace for all tests, so that the preflight of the model runs once."""
    folder = tmp_path_factory.mktemp("brimful")
    lines = (f"line {number} of a text about {'many ' * (number % 7)}things\n" for number in range(60))
    (folder / "rows.txt").write_text("".join(lines))
    return Workplace(folder)


@pytest.fixture(scope="session")
def endless(place: Workplace, tests_importable: None) -> Workplace:
    """The same workplace, with trials that go on until they are cancelled."""
    return Workplace(place.folder, behaviour="sleep:600")


@pytest.fixture(scope="session")
def starved(place: Workplace, tests_importable: None) -> Workplace:
    """The same workplace, with trials that run out of memory at once."""
    return Workplace(place.folder, behaviour="oom")


@pytest.fixture(scope="session")
def finished(place: Workplace) -> str:
    """The name of a sweep that ran to its end without Ray and MLflow."""
    run = place.run("run", place.spec("whole"), "--pool", "local", "--no-tracking", "--json")
    assert run.returncode == 0, run.stderr
    return "whole"
