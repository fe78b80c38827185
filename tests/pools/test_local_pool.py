import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.backends.local_pool import LocalPool
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import Infra, Ok, OomHost
from orchestrator.contract.units import MIB
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


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 300 MiB below the one that the tests run in."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    parent = Path(f"/sys/fs/cgroup/memory{own}")
    if own is None or not os.access(parent, os.W_OK):
        pytest.skip("needs a writable cgroup-v1 memory controller")
    group = parent / uuid.uuid4().hex
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(300 * MIB))
    yield group
    until(lambda: (group / "cgroup.procs").read_text() == "")
    group.rmdir()


def test_a_rank_that_the_kernel_ends_for_memory_is_out_of_host_memory(home: Home, cgroup: Path) -> None:
    launch = home.attempt({"0": "hog"})
    command = [sys.executable, "-c", _DRIVER, STUB, launch.token, str(launch.directory)]
    join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
    subprocess.run([sys.executable, "-c", join, str(cgroup / "cgroup.procs"), *command], check=True, timeout=120)
    outcome = AttemptFiles(launch.directory).read_outcome()
    assert isinstance(outcome, OomHost)
    assert (outcome.rank, outcome.phase) == (0, "backward")
    assert "oom_kill rose by" in outcome.evidence


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
