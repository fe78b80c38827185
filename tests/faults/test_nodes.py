"""Nodes that are taken away, that are bad, and devices on which somebody left something."""

import asyncio
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray
from fakes import FakeRunLog, FakeStrategy, candidate, new_ledger, spec
from pools.conformance import STUB, Home, begun, gather, processes_of, reach, run, until
from pools.rig import RayRig
from ray.core.generated import autoscaler_pb2

from faults import leaks
from orchestrator.backends.ray_pool import RayPool
from orchestrator.backends.ray_seat import Seat
from orchestrator.contract.outcome import Infra, Ok, Preempted
from orchestrator.contract.rank import RankRequest
from orchestrator.contract.record import SweepState
from orchestrator.contract.units import GIB
from orchestrator.placement import dirt
from orchestrator.placement.hosts import HostReply, RankEnded, RankFailed
from orchestrator.placement.quarantine import excluded_nodes
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Launch

Figure = Callable[[str, str], None]


@pytest.fixture
def home(tmp_path: Path, tests_importable: None) -> Home:
    return Home(tmp_path)


@pytest.fixture(scope="module")
def rig(ray_token: None, tests_importable: None) -> Iterator[RayRig]:
    """A head with one CPU, to which tests add nodes that they lose again."""
    rig = RayRig()
    try:
        rig.head(cpus=1)
        yield rig
    finally:
        rig.close()


@pytest.fixture
def pool(rig: RayRig) -> Iterator[RayPool]:
    with closing(RayPool(rig.address, template_module=STUB)) as pool:
        yield pool
    leaks.assert_ray_clean(rig.address)


def two_trials(pool: RayPool, home: Home, nodes: int = 2) -> list[Launch]:
    """A trial on each of two nodes, both in their forward pass."""
    until(lambda: pool.cluster().devices == nodes)
    launches = [home.attempt({"0": "sleep:600"}) for _ in range(2)]
    for launch in launches:
        pool.launch(launch)
    reach(pool, lambda: all(begun(launch) for launch in launches))
    return launches


@pytest.mark.ray
@pytest.mark.fault("C13")
def test_a_node_that_is_told_to_end_preempts_its_trials_alone(
    rig: RayRig, pool: RayPool, home: Home, figure: Figure
) -> None:
    node = rig.node(cpus=1)
    launches = two_trials(pool, home)
    there, other = apart(rig, node, launches)
    began_s = time.monotonic()
    rig.raylet(node).send_signal(signal.SIGTERM)
    (ended,) = gather(pool, 1)
    figure("SIGTERM to preempted", f"{time.monotonic() - began_s:.1f} s")
    assert ended.token == there.token
    assert isinstance(ended.outcome, Preempted), ended.outcome
    assert ended.outcome.node == ended.node
    assert "received SIGTERM" in ended.outcome.evidence
    assert pool.wait(0.5) == []
    assert processes_of(other)
    pool.cancel(other.token)
    gather(pool, 1)
    until(lambda: processes_of(there) == [], deadline_s=20.0)


@pytest.mark.ray
@pytest.mark.fault("C13")
def test_a_node_that_ray_drains_gets_no_trial_and_its_own_are_preempted_before_its_time(
    rig: RayRig, pool: RayPool, home: Home, figure: Figure
) -> None:
    node = rig.node(cpus=1)
    launches = two_trials(pool, home)
    there, other = apart(rig, node, launches)
    key = next(key for key, port in _ports().items() if str(port) in " ".join(rig.raylet(node).cmdline()))
    began_s = time.time()
    _drain(key, deadline_s=began_s + 6.0)
    (ended,) = gather(pool, 1)
    took_s = time.time() - began_s
    figure("left before the node's time, of 6 s", f"{6.0 - took_s:.1f} s")
    assert ended.token == there.token
    assert isinstance(ended.outcome, Preempted), ended.outcome
    assert "is about to be taken away" in ended.outcome.evidence
    assert pool.cluster().devices == 1
    assert not pool.has_room(1)
    pool.cancel(other.token)
    gather(pool, 1)
    assert isinstance(run(pool, home.attempt()), Ok)
    assert processes_of(there) == []
    rig.kill_node(node)
    until(lambda: not _lives(key))


def apart(rig: RayRig, node: str, launches: list[Launch]) -> tuple[Launch, Launch]:
    """The trial that runs on `node`, and the other one."""
    below = {process.pid for process in rig.raylet(node).children(recursive=True)}
    (there,) = [launch for launch in launches if below.intersection(processes_of(launch))]
    (other,) = [launch for launch in launches if launch is not there]
    return there, other


def _ports() -> dict[str, int]:
    return {node["NodeID"]: node["NodeManagerPort"] for node in ray.nodes() if node["Alive"]}


def _lives(key: str) -> bool:
    return any(node["NodeID"] == key and node["Alive"] for node in ray.nodes())


def _drain(key: str, deadline_s: float) -> None:
    """What a cloud's preemption notice makes an autoscaler do (`ray drain-node`)."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = ray._private.worker.global_worker.gcs_client
    is_accepted, refusal = client.drain_node(key, reason, "the spot price rose", int(deadline_s * 1000))
    assert is_accepted, refusal


@pytest.mark.ray
@pytest.mark.fault("C17")
def test_a_node_whose_device_is_broken_is_left_and_no_trial_is_lost(
    rig: RayRig, home: Home, tmp_path: Path, figure: Figure
) -> None:
    node = rig.node(cpus=1, environment={"DS_STUB_BEHAVES": "broken_device"})
    of, log = spec(), FakeRunLog()
    ledger = new_ledger(tmp_path / "home", of)
    with closing(RayPool(rig.address, template_module=STUB)) as pool, ledger.lock():
        until(lambda: pool.cluster().devices == 2)
        strategy = FakeStrategy([candidate(micro_batch) for micro_batch in range(1, 9)])
        sweep = run_sweep(of, ledger, Services(pool=pool, strategy=strategy, logs=(log,)))
    trials = ledger.read_trials()
    assert sweep.state is SweepState.FINISHED
    assert [type(trial.outcome) for trial in trials] == [Ok] * 8
    failed = [attempt for trial in trials for attempt in trial.attempts if isinstance(attempt.outcome, Infra)]
    figure("attempts lost on the bad node, of 8 trials", str(len(failed)))
    figure("trials lost", "0")
    assert 1 <= len(failed) <= 2
    assert len({attempt.node for attempt in failed}) == 1
    (bad,) = excluded_nodes(trials)
    assert bad.node == failed[0].node
    assert len(bad.evidence) == 2
    assert "uncorrectable ECC" in bad.evidence[0]
    rig.kill_node(node)
    leaks.assert_home_clean(tmp_path / "home")
    leaks.assert_ray_clean(rig.address)


class FakeNvml(types.ModuleType):
    """One card of 24 GiB as NVML tells of it; `used_bytes` is what is in use."""

    used_bytes = 0
    NVMLError_LibraryNotFound = NVMLError_DriverNotLoaded = OSError

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[object]:
        return []

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=self.used_bytes, total=24 * GIB)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return nvml


class OneSeat:
    """A seat of a GPU in this process, driven as Ray drives it."""

    def __init__(self) -> None:
        self._seat = Seat("bad-node", STUB, 1, gpus=(1, 1.0))

    def begin(self, launch: Launch) -> None:
        request = RankRequest(
            token=launch.token,
            directory=str(launch.directory),
            rank=0,
            world_size=1,
            local_rank=0,
            master_addr="127.0.0.1",
            master_port=0,
        )
        asyncio.run(self._seat.submit(request.model_dump_json()))

    def said(self, launch: Launch, wait_s: float = 20.0) -> list[HostReply]:
        """All replies so far, the first of them waited for."""
        return asyncio.run(self._seat.said(launch.token, 0, wait_s))

    def end(self, launch: Launch) -> HostReply:
        """The reply that ends the rank."""
        ends: list[HostReply] = []

        def has_ended() -> bool:
            ends[:] = [reply for reply in self.said(launch, 0.1) if isinstance(reply, RankEnded | RankFailed)]
            return bool(ends)

        until(has_ended)
        return ends[0]

    def close(self) -> None:
        asyncio.run(self._seat.close())


@pytest.fixture
def seat(card: FakeNvml, tests_importable: None) -> Iterator[OneSeat]:
    with closing(OneSeat()) as seat:
        yield seat


@pytest.mark.fault("B10")
def test_a_device_is_not_used_again_before_its_memory_is_back(
    card: FakeNvml, seat: OneSeat, home: Home, figure: Figure
) -> None:
    launch = home.attempt({"0": "children"})
    seat.begin(launch)
    end = seat.end(launch)
    assert isinstance(end, RankEnded)
    assert processes_of(launch) == []

    card.used_bytes = 10 * GIB
    following = home.attempt()
    seat.begin(following)
    assert seat.said(following, 1.5 * dirt.LOOK_AGAIN_S) == []
    card.used_bytes = 0
    freed_s = time.monotonic()
    assert isinstance(seat.end(following), RankEnded)
    figure("memory back to the next rank's end", f"{time.monotonic() - freed_s:.1f} s")


@pytest.mark.fault("B10")
def test_a_device_that_stays_dirty_is_named(
    card: FakeNvml, seat: OneSeat, home: Home, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    figure("waited for at most", f"{dirt.CLEAN_DEADLINE_S:.0f} s")
    monkeypatch.setattr(dirt, "CLEAN_DEADLINE_S", 0.6)
    card.used_bytes = 10 * GIB
    launch = home.attempt()
    seat.begin(launch)
    end = seat.end(launch)
    assert isinstance(end, RankFailed)
    assert end.cause == "device"
    assert end.evidence.startswith("dirty_gpu: the device on node bad-node")
    assert "10.00 GiB" in end.evidence
    card.used_bytes = 0
    following = home.attempt()
    seat.begin(following)
    assert isinstance(seat.end(following), RankEnded)
