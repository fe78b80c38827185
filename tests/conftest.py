"""Fixtures of tests with real pools. This folder is on the import path: tests import `fakes` by that name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pools.rig import token_environment


@pytest.fixture(scope="session")
def ray_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One token for every cluster of this process: Ray reads it once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in token_environment(tmp_path_factory.mktemp("token")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def tests_importable() -> Iterator[None]:
    """Processes that are started below can import the modules of `tests`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield
