"""Traces of the structures that the selected cases name, all together and kept between runs by their content."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from field.structures import STRUCTURES
from orchestrator.contract.profile import Profile
from orchestrator.placement.tracing import Untraceable, request_key, trace_all


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "structures(*names): what a field case traces")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("structures") is not None:
            # the first of them waits for all traces, about a minute of two cores
            item.add_marker(pytest.mark.timeout(_TRACES_S))


_TRACES_S = 1200


@pytest.fixture(scope="session")
def profiles(request: pytest.FixtureRequest) -> Mapping[str, Profile]:
    """By the names of `structures.py`; only those that a selected test names in its `structures` mark."""
    marks = [mark for item in request.session.items for mark in item.iter_markers("structures")]
    names = sorted({name for mark in marks for name in mark.args})
    cache = Path(request.config.cache.mkdir("traces")) if request.config.cache else Path(".pytest_cache/d/traces")
    found = trace_all([STRUCTURES[name] for name in names], cache, processes=2)
    traced = {name: found[request_key(STRUCTURES[name])] for name in names}
    failures = {name: str(result) for name, result in traced.items() if isinstance(result, Untraceable)}
    assert not failures
    return {name: result for name, result in traced.items() if isinstance(result, Profile)}
