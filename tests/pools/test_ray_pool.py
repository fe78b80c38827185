from collections.abc import Iterator

import pytest

from orchestrator.backends.ray_pool import RayPool
from pools.conformance import STUB, PoolConformance, home

__all__ = ["home"]

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def pool(ray_token: None, tests_importable: None) -> Iterator[RayPool]:
    pool = RayPool(cpus=2, template_module=STUB)
    yield pool
    pool.close()


class TestPrivateCluster(PoolConformance):
    """The last test of the suite closes the pool that all share: a cluster takes seconds to start."""
