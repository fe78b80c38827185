import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.backends.local_pool import LocalPool
from orchestrator.contract.outcome import Infra, Ok
from pools.conformance import STUB, Home, PoolConformance, begun, config, gather, run, templates, until


@pytest.fixture
def pool(home: Home) -> Iterator[LocalPool]:
    pool = LocalPool(devices=2, template_module=STUB)
    yield pool
    pool.close()


class TestLocalPool(PoolConformance):
    pass


def test_ports_of_four_groups_at_once_never_collide(home: Home) -> None:
    pool = LocalPool(devices=8, template_module=STUB)
    try:
        for _ in range(3):
            for _ in range(4):
                pool.launch(home.attempt(of=config(2)))
            assert all(isinstance(end.outcome, Ok) for end in gather(pool, 4))
    finally:
        pool.close()


def test_a_template_that_cannot_start_says_why(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_STUB_FAILS", "1")
    pool = LocalPool(devices=1, template_module=STUB)
    try:
        outcome = run(pool, home.attempt())
    finally:
        pool.close()
    assert isinstance(outcome, Infra)
    assert "ImportError: no module named stub" in outcome.evidence


def test_killing_the_driver_ends_its_templates(home: Home) -> None:
    launch = home.attempt({"0": "grandchildren"})
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, STUB, launch.token, str(launch.directory)])
    try:
        until(lambda: begun(launch))
        assert templates()
    finally:
        driver.kill()
        driver.wait()
    until(lambda: templates() == [], deadline_s=15.0)
    assert not any(_holds(process, launch.directory) for process in psutil.process_iter())


_DRIVER = """
import sys
from pathlib import Path
from orchestrator.backends.local_pool import LocalPool
from orchestrator.sweep.ports import Launch
from orchestrator.contract.handoff import AttemptFiles
pool = LocalPool(devices=1, template_module=sys.argv[1])
directory = Path(sys.argv[3])
pool.launch(Launch(sys.argv[2], directory, AttemptFiles(directory).read_config()))
pool.wait(600)
pool.close()
"""


def _holds(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(file.path.startswith(f"{folder}{os.sep}") for file in process.open_files())
    except psutil.Error:
        return False
