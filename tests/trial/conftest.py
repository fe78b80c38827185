import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trial.rig import TemplateClient, write_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 rows of 8 to 64 tokens."""
    return write_data(tmp_path_factory.mktemp("data"), [8 + (7 * number) % 57 for number in range(40)])


@pytest.fixture(scope="session")
def path_to_tests() -> Iterator[None]:
    """Processes that are started below can import the modules of `tests`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}")
        yield


@pytest.fixture(scope="session")
def template(path_to_tests: None) -> Iterator[TemplateClient]:
    """One warm template for all tests."""
    client = TemplateClient()
    yield client
    assert client.close() == 0
