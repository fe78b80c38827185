from pathlib import Path

import pytest

from pools.conformance import Home


@pytest.fixture
def home(tmp_path: Path, tests_importable: None) -> Home:
    """A folder for attempts; the stub template can be imported."""
    return Home(tmp_path)
