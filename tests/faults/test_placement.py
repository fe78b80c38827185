"""A cluster that is too small, or becomes so: refused at once with what exists, waited for, and given up in time."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from fakes import FakeRunLog, FakeStrategy, candidate, new_ledger, spec
from pools.conformance import STUB, Home, begun, config, gather, processes_of, reach, until
from pools.rig import RayRig
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray._raylet import GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, GCS_AUTOSCALER_STATE_NAMESPACE
from ray.core.generated import autoscaler_pb2
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from faults import leaks
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.config import Layout
from orchestrator.contract.errors import ClusterUnreachableError, UnplaceableError
from orchestrator.contract.outcome import Crashed
from orchestrator.contract.record import SweepRecord, SweepState
from orchestrator.placement.layouts import refused_layouts
from orchestrator.spec.sweep import BudgetSection
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Launch

pytestmark = pytest.mark.ray
Figure = Callable[[str, str], None]
NODE_TIMEOUT_S = 3.0
SPEC = """\
version: 1
name: too-large
model: {config: {model_type: llama, vocab_size: 320, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128}}
data: {path: rows.txt, sequence_length: 64}
train: {global_batch: 8, learning_rate: 1e-3}
resources: {devices_per_trial: 8}
tracking: {enabled: false}
"""


@pytest.fixture(scope="module")
def rig(ray_token: None, tests_importable: None) -> Iterator[RayRig]:
    """A head without devices."""
    rig = RayRig()
    try:
        rig.head(cpus=0)
        yield rig
        leaks.assert_ray_clean(rig.address)
    finally:
        rig.close()


@pytest.fixture(scope="module")
def three(rig: RayRig) -> list[str]:
    """Three nodes of one slot each; the tests of what is lost end them one by one."""
    return [rig.node(cpus=1) for _ in range(3)]


def one_left(rig: RayRig, nodes: list[str]) -> str:
    """The only node that is left."""
    while len(nodes) > 1:
        rig.kill_node(nodes.pop())
    return nodes.pop() if nodes else rig.node(cpus=1)


@pytest.fixture
def home(tmp_path: Path, tests_importable: None) -> Home:
    return Home(tmp_path)


class ScriptedPool(RayPool):
    """Its first trial goes on until its node is lost; the others end well. `on_launch` is called with each."""

    on_launch: Callable[[Launch], None] = staticmethod(lambda launch: None)
    launched = 0

    def launch(self, launch: Launch) -> None:
        behaviour = "sleep:600" if self.launched == 0 else "ok"
        (launch.directory / "behave.json").write_text(json.dumps({"0": behaviour}))
        self.launched += 1
        super().launch(launch)
        self.on_launch(launch)


class Onlooker(FakeRunLog):
    """Calls `on_wait` when the sweep says that it waits for nodes."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait
        self.said: list[str] = []

    def sweep_changed(self, sweep: SweepRecord) -> None:
        super().sweep_changed(sweep)
        if sweep.waits_for:
            self.said.append(sweep.waits_for)
            self._on_wait()


def sweep_that_loses_its_node(
    rig: RayRig, node: str, home: Path, node_timeout_s: float, on_wait: Callable[[], None]
) -> tuple[Ledger, Onlooker, SweepRecord | ClusterUnreachableError]:
    """Two trials over one node, which is killed under the first."""
    of = spec("lonely", BudgetSection(trials=2))
    ledger, log = new_ledger(home, of), Onlooker(on_wait)
    pool = ScriptedPool(rig.address, template_module=STUB, node_timeout_s=node_timeout_s)

    def kill_when_begun(launch: Launch) -> None:
        def strike() -> None:
            while not begun(launch):
                time.sleep(0.05)
            rig.kill_node(node)

        if pool.launched == 1:
            threading.Thread(target=strike, daemon=True).start()

    pool.on_launch = kill_when_begun  # type: ignore[method-assign]
    with closing(pool), ledger.lock():
        while pool.cluster().devices != 1:
            time.sleep(0.05)
        strategy = FakeStrategy([candidate(1), candidate(2)])
        try:
            return ledger, log, run_sweep(of, ledger, Services(pool, strategy, (log,)))
        except ClusterUnreachableError as error:
            return ledger, log, error


@pytest.mark.fault("B8")
def test_one_rank_s_end_ends_those_on_all_nodes(rig: RayRig, three: list[str], home: Home, figure: Figure) -> None:
    with closing(RayPool(rig.address, template_module=STUB)) as pool:
        launch = home.attempt({"0": "hang", "1": "hang", "2": "sleep:600"}, config(3).model_copy(update={"nodes": 3}))
        while not pool.has_room(3, nodes=3):
            time.sleep(0.05)
        pool.launch(launch)
        reach(pool, lambda: begun(launch, [0, 1, 2]))
        (victim, *_) = [process for process in map(psutil.Process, processes_of(launch)) if _is_rank(process, 2)]
        began_s = time.monotonic()
        victim.kill()
        (ended,) = gather(pool, 1)
        figure("rank killed to all ranks gone", f"{time.monotonic() - began_s:.1f} s")
        assert processes_of(launch) == []
        assert isinstance(ended.outcome, Crashed)
        assert (ended.outcome.rank, ended.outcome.signal) == (2, "SIGKILL")
        assert len(set(ended.nodes)) == 3


@pytest.mark.fault("C5")
def test_more_devices_than_exist_are_refused_at_once_with_what_exists(
    rig: RayRig, three: list[str], tmp_path: Path, figure: Figure
) -> None:
    (tmp_path / "rows.txt").write_text("some rows\n" * 20)
    (tmp_path / "spec.yaml").write_text(SPEC)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "orchestrator.cli", "run", "spec.yaml", "--address", rig.address]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    figure("refused after", f"{time.monotonic() - began_s:.1f} s")
    assert run.returncode == UnplaceableError.exit_code
    assert "a trial needs 8 CPU slots, the cluster has 3 CPU slots on 3 nodes (" in run.stderr
    assert "lower resources.devices_per_trial" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.glob(".brimful/sweeps/*/sweep.json")) == []
    with closing(RayPool(rig.address, template_module=STUB)) as pool:
        # what fits of a search over sizes still runs
        refused = refused_layouts([Layout(1), Layout(2, 1), Layout(2, 2), Layout(8)], pool.check)
    assert set(refused) == {Layout(2, 1), Layout(8)}
    assert refused[Layout(2, 1)].startswith("a trial needs 2 CPU slots on one node, the largest node has 1")


@pytest.mark.fault("C4")
def test_the_last_node_is_waited_for_without_a_busy_loop_and_given_up(
    rig: RayRig, three: list[str], tmp_path: Path, figure: Figure
) -> None:
    process = psutil.Process()
    begun_at: list[float] = []

    def note() -> None:
        begun_at[:] = begun_at or [time.monotonic(), sum(process.cpu_times()[:2])]

    ledger, log, end = sweep_that_loses_its_node(rig, one_left(rig, three), tmp_path, NODE_TIMEOUT_S, note)
    waited_s = time.monotonic() - begun_at[0]
    share = (sum(process.cpu_times()[:2]) - begun_at[1]) / waited_s
    figure("waited before giving up", f"{waited_s:.1f} s of {NODE_TIMEOUT_S:.0f} s")
    figure("CPU of the driver while it waits", f"{share:.0%}")
    assert isinstance(end, ClusterUnreachableError)
    assert end.exit_code == 5
    assert "--node-timeout" in str(end)
    assert "has 0 CPU slots" in str(end)
    assert "resume" in str(end)
    assert share < 0.5
    (said,) = set(log.said)
    assert said.startswith("waiting for nodes, at most 3.0s (--node-timeout): a trial needs 1 CPU slot")
    record = ledger.read_sweep()
    assert (record.state, record.exit_code) == (SweepState.INTERRUPTED, 5)
    (first,) = ledger.read_trials()
    assert [attempt.outcome.kind for attempt in first.attempts if attempt.outcome] == ["lost_node"]


@pytest.mark.slow
@pytest.mark.fault("C4")
def test_a_node_that_comes_while_the_sweep_waits_is_used(
    rig: RayRig, three: list[str], tmp_path: Path, figure: Figure
) -> None:
    came: list[tuple[str, float]] = []

    def bring() -> None:
        if not came:
            came.append((rig.node(cpus=1), time.time()))

    ledger, log, end = sweep_that_loses_its_node(rig, one_left(rig, three), tmp_path, 120.0, bring)
    assert isinstance(end, SweepRecord)
    assert (end.state, end.waits_for) == (SweepState.FINISHED, "")
    first, second = ledger.read_trials()
    assert [attempt.outcome.kind for attempt in first.attempts if attempt.outcome] == ["lost_node", "ok"]
    figure("node there to trial running", f"{first.attempts[1].dispatched_s - came[0][1]:.1f} s")
    assert second.outcome is not None
    assert second.outcome.kind == "ok"
    assert second.attempts[0].nodes == (second.attempts[0].node,)
    assert log.said


def _is_rank(process: psutil.Process, rank: int) -> bool:
    """Whether `process` writes the log of this rank."""
    return any(file.path.endswith(f"rank{rank}.log") for file in process.open_files())


@contextmanager
def autoscaler_may_add(nodes: int, cpus: int) -> Iterator[None]:
    """Let the cluster's configuration say so, as an autoscaler does."""
    group = autoscaler_pb2.NodeGroupConfig(name="pool", resources={"CPU": cpus}, max_count=nodes)
    config = autoscaler_pb2.ClusterConfig(node_group_configs=[group])
    where = {"namespace": GCS_AUTOSCALER_STATE_NAMESPACE}
    _internal_kv_put(GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, config.SerializeToString(), **where)
    yield
    _internal_kv_del(GCS_AUTOSCALER_CLUSTER_CONFIG_KEY, **where)


@pytest.mark.fault("C5")
def test_what_an_autoscaler_may_bring_is_asked_for_waited_for_and_used(
    rig: RayRig, three: list[str], figure: Figure
) -> None:
    one_left(rig, three)
    with closing(RayPool(rig.address, template_module=STUB)) as pool, autoscaler_may_add(nodes=4, cpus=2):
        until(lambda: pool.cluster().devices >= 1)
        with pytest.raises(UnplaceableError, match=r"and its autoscaler may add .* on . nodes"):
            pool.check(32, None)
        pool.check(2, 1)
        assert pool.has_room(1)
        assert not pool.has_room(2, nodes=1)
        assert "the next trial needs 2 devices on 1 node, and the autoscaler was asked for them" in pool.waits_for()
        assert json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)) == [{"CPU": 2.0}]
        began_s = time.monotonic()
        rig.node(cpus=2)
        until(lambda: pool.has_room(2, nodes=1))
        figure("node started to room for its trial", f"{time.monotonic() - began_s:.1f} s")
        assert pool.waits_for() == ""
