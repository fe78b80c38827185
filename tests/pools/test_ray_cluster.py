"""A joined cluster of two nodes, and what happens when parts of it go away."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.backends import ray_connect
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.errors import ClusterUnreachableError, UnplaceableError
from orchestrator.contract.outcome import Infra, LostNode, Ok
from orchestrator.placement.ports import free_port
from pools.conformance import (
    STUB,
    Home,
    begun,
    config,
    gather,
    processes_of,
    reach,
    run,
    templates,
    until,
)
from pools.rig import RayRig

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def rig(ray_token: None, tests_importable: None) -> Iterator[RayRig]:
    """Two nodes of one CPU each."""
    rig = RayRig()
    try:
        rig.head(cpus=1)
        rig.node(cpus=1)
        yield rig
    finally:
        rig.close()


@pytest.fixture
def pool(rig: RayRig) -> Iterator[RayPool]:
    with closing(RayPool(rig.address, template_module=STUB)) as pool:
        yield pool


def test_a_trial_spans_two_nodes(pool: RayPool, home: Home) -> None:
    pool.check(2, None)
    pool.launch(launch := home.attempt(of=config(2)))
    (ended,) = gather(pool, 1)
    assert (ended.token, type(ended.outcome)) == (launch.token, Ok)
    assert ended.node is not None
    assert ended.node.endswith("+ 1")
    assert len(ended.nodes) == len(set(ended.nodes)) == 2


def test_templates_stay_warm_when_the_world_size_changes(pool: RayPool, home: Home) -> None:
    assert isinstance(run(pool, home.attempt(of=config(2))), Ok)
    before = templates()
    for world_size in (1, 2, 1, 2):
        assert isinstance(run(pool, home.attempt(of=config(world_size))), Ok)
    assert templates() == before


def test_refusals_name_what_the_cluster_has(pool: RayPool) -> None:
    with pytest.raises(UnplaceableError, match=r"needs 2 CPU slots on one node, the largest node has 1"):
        pool.check(2, 1)
    with pytest.raises(UnplaceableError, match=r"needs 8 CPU slots, the cluster has 2 CPU slots on 2 nodes"):
        pool.check(8, None)
    pool.check(2, 2)


def test_devices_of_other_jobs_are_seen(rig: RayRig, pool: RayPool, home: Home) -> None:
    assert [node.free_devices for node in pool.cluster().nodes] == [1, 1]
    other = subprocess.Popen([sys.executable, "-c", _OTHER_JOB, rig.address], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        until(lambda: sum(node.free_devices for node in pool.cluster().nodes) == 1)
        assert any("other Ray jobs hold 1 of 1" in words for node in pool.cluster().nodes for words in node.occupants)
        assert pool.has_room(1)
        assert not pool.has_room(2)
        pool.check(2, None)
    finally:
        other.kill()
        other.communicate()
    until(lambda: pool.has_room(2))


_OTHER_JOB = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
@ray.remote(num_cpus=1)
class Holder:
    def ready(self): return True
holder = Holder.remote()
ray.get(holder.ready.remote())
print("holding", flush=True)
time.sleep(600)
"""


def test_a_killed_worker_is_infra_and_the_lane_is_replaced(rig: RayRig, pool: RayPool, home: Home) -> None:
    launch = home.attempt({"0": "hang", "1": "hang"}, config(2))
    pool.launch(launch)
    reach(pool, lambda: begun(launch, [0, 1]))
    (seat, *_) = [process for process in rig.processes() if "Seat" in " ".join(process.cmdline())]
    seat.kill()
    (ended,) = gather(pool, 1)
    assert isinstance(ended.outcome, Infra)
    assert "worker" in ended.outcome.cause
    until(lambda: processes_of(launch) == [], deadline_s=15.0)
    assert isinstance(run(pool, home.attempt(of=config(2))), Ok)


def test_a_folder_that_a_node_does_not_see_is_named(pool: RayPool, home: Home) -> None:
    launch = home.attempt()
    (launch.directory / "config.json").unlink()
    outcome = run(pool, launch)
    assert isinstance(outcome, Infra)
    assert str(launch.directory) in outcome.cause
    assert "home folder" in outcome.cause


def test_an_unreachable_address_is_refused_within_seconds(ray_token: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connect, "PROBE_DEADLINE_S", 3.0)
    with pytest.raises(ClusterUnreachableError, match=r"cannot be reached \(Connection refused\); check the address"):
        RayPool(f"127.0.0.1:{free_port()}")
    with pytest.raises(ClusterUnreachableError, match="write it as host:port"):
        RayPool("ray://somewhere:10001")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ClusterUnreachableError, match="does not answer as a Ray cluster"),
    ):
        RayPool(f"127.0.0.1:{silent.getsockname()[1]}")


def test_a_wrong_token_is_refused_with_the_mend(rig: RayRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("wrong")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(wrong))
    with pytest.raises(ClusterUnreachableError, match=r"refuses the token.*RAY_AUTH_TOKEN_PATH") as refused:
        RayPool(rig.address)
    assert Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text() not in str(refused.value).split()


def test_a_lost_node_is_told_and_the_others_go_on(rig: RayRig, pool: RayPool, home: Home) -> None:
    lost = rig.node(cpus=1)
    until(lambda: pool.cluster().devices == 3)
    launches = [home.attempt({"0": "sleep:600"}) for _ in range(3)]
    for launch in launches:
        pool.launch(launch)
    reach(pool, lambda: all(begun(launch) for launch in launches))
    rig.kill_node(lost)
    (ended,) = gather(pool, 1)
    assert isinstance(ended.outcome, LostNode)
    assert ended.outcome.node == ended.node
    assert pool.cluster().devices == 2
    assert not pool.has_room(3)
    assert pool.wait(1.0) == []
    others = [launch for launch in launches if launch.token != ended.token]
    for launch in others:
        pool.cancel(launch.token)
    gather(pool, 2)
    assert isinstance(run(pool, home.attempt()), Ok)
    until(lambda: all(processes_of(launch) == [] for launch in launches), deadline_s=20.0)
