"""The ways in which tests write, change and load the small valid spec."""

from pathlib import Path

import pytest
from spec_texts import VALID, Faults, Load

from orchestrator.contract.errors import SpecError
from orchestrator.spec.load import LoadedSpec, load_spec


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """A valid spec beside its data."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    path = tmp_path / "spec.yaml"
    path.write_text(VALID)
    return path


@pytest.fixture
def load(spec_file: Path) -> Load:
    """Loads the valid spec with a piece of its text replaced."""

    def change(old: str = "", new: str = "", overrides: tuple[str, ...] = (), remote: bool = False) -> LoadedSpec:
        text = spec_file.read_text()
        assert old in text
        spec_file.write_text(text.replace(old, new, 1) if old else text + new)
        return load_spec(spec_file, overrides, allow_remote_code=remote)

    return change


@pytest.fixture
def faults(load: Load, spec_file: Path) -> Faults:
    """The lines of the error that a changed spec gives, with the file's folder left out."""

    def change(old: str = "", new: str = "", overrides: tuple[str, ...] = ()) -> list[str]:
        with pytest.raises(SpecError) as caught:
            load(old, new, overrides)
        return str(caught.value).replace(f"{spec_file.parent}/", "").split("\n")

    return change
