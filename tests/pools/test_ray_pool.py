import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from orchestrator.backends.ray_pool import RayPool
from pools.conformance import STUB, Home, PoolConformance, begun, processes_of, templates, until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def pool(ray_token: None, tests_importable: None) -> Iterator[RayPool]:
    pool = RayPool(cpus=2, template_module=STUB)
    yield pool
    pool.close()


class TestPrivateCluster(PoolConformance):
    """The last test of the suite closes the pool that all share: a cluster takes seconds to start."""


def test_killing_the_driver_ends_its_private_cluster(home: Home) -> None:
    launch = home.attempt({"0": "grandchildren"})
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, STUB, launch.token, str(launch.directory)])
    try:
        until(lambda: begun(launch))
        started = psutil.Process(driver.pid).children(recursive=True)
        # Ray's own agents notice only after a minute that their raylet is gone
        cluster = [process for process in started if process.name() in ("raylet", "gcs_server")]
        assert len(cluster) == 2
    finally:
        driver.kill()
        driver.wait()
    until(lambda: not any(_is_alive(process) for process in cluster), deadline_s=30.0)
    until(lambda: processes_of(launch) == [] and templates() == [], deadline_s=30.0)


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


_DRIVER = """
import sys
from pathlib import Path
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.sweep.ports import Launch
pool = RayPool(cpus=1, template_module=sys.argv[1])
directory = Path(sys.argv[3])
pool.launch(Launch(sys.argv[2], directory, AttemptFiles(directory).read_config()))
pool.wait(600)
"""
