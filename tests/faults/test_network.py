"""Networks between Ray nodes that fail: lost calls, blackouts, partitions; no rank trains."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from pools.conformance import until
from pools.rig import FAST_HEALTH_CHECKS, RayRig

from faults import leaks
from faults.small_sweep import ends, run_small
from orchestrator.contract.record import SweepState
from orchestrator.sweep.ledger import Ledger

pytestmark = pytest.mark.ray
Figure = Callable[[str, str], None]

LOST_CALLS = '{"*": {"num_failures": -1, "req_failure_prob": 5, "resp_failure_prob": 5, "in_flight_failure_prob": 2}}'
"""Of every call of Ray's own, in percent: the request is lost, the answer is lost, the connection breaks."""


@contextmanager
def rig_of(rig: RayRig, *cpus: int) -> Iterator[list[psutil.Process]]:
    """A head without slots and nodes of so many; yields the raylets of the nodes."""
    try:
        rig.head(cpus=0)
        yield [rig.raylet(rig.node(cpus=each)) for each in cpus]
    finally:
        rig.close()


@pytest.mark.slow
@pytest.mark.fault("C9")
def test_calls_that_are_lost_lose_no_trial_and_double_none(
    ray_token: None, tests_importable: None, tmp_path: Path, figure: Figure
) -> None:
    took_s = {}
    for name, environment in (("sound", {}), ("lossy", {"RAY_testing_rpc_failure": LOST_CALLS})):
        rig = RayRig(environment, health_checks={})
        with rig_of(rig, 1, 1):
            began_s = time.monotonic()
            sweep, ledger = run_small(rig.address, tmp_path / name, 20, {"*": "sleep:0.5"})
            took_s[name] = time.monotonic() - began_s
        records = ledger.read_trials()
        assert sweep.state is SweepState.FINISHED
        assert len(records) == len({record.candidate for record in records}) == 20
        for record in records:
            # what Ray does not repeat by itself ends an attempt as one of the surroundings
            *failed, last = ends(record)
            assert last == "ok"
            assert set(failed) <= {"infra", "lost_node"}
        leaks.assert_home_clean(tmp_path / name)
        figure(f"20 trials, {name} network", f"{took_s[name]:.1f} s")
        figure(f"attempts, {name} network", str(sum(len(record.attempts) for record in records)))
    figure("slower by", f"{took_s['lossy'] / took_s['sound']:.1f} times")


@dataclass
class Blackouts:
    """Stops processes for a while, again and again; `turn` is called often."""

    stopped: Sequence[psutil.Process]
    for_s: float
    every_s: float
    count: int
    done: int = 0
    _is_dark: bool = False
    _next_s: float = field(default_factory=lambda: time.monotonic() + 1.0)

    @property
    def is_over(self) -> bool:
        return self.done >= self.count

    def turn(self) -> None:
        if self.is_over or time.monotonic() < self._next_s:
            return
        for process in self.stopped:
            process.resume() if self._is_dark else process.suspend()
        self._next_s = time.monotonic() + (self.every_s - self.for_s if self._is_dark else self.for_s)
        self.done += self._is_dark
        self._is_dark = not self._is_dark


@pytest.mark.fault("C10")
@pytest.mark.parametrize(
    ("health_checks", "for_s", "every_s", "count"),
    [
        pytest.param(FAST_HEALTH_CHECKS, 1.0, 2.0, 2, id="scaled"),
        pytest.param({}, 5.0, 30.0, 4, id="ray_defaults", marks=pytest.mark.slow),
    ],
)
def test_a_short_blackout_of_all_nodes_costs_nothing(
    ray_token: None,
    tests_importable: None,
    tmp_path: Path,
    figure: Figure,
    health_checks: dict[str, str],
    for_s: float,
    every_s: float,
    count: int,
) -> None:
    rig = RayRig(health_checks=health_checks)
    with rig_of(rig, 2) as raylets:
        blackouts = Blackouts(raylets, for_s, every_s, count)
        trial_s = count * every_s
        plan = {"0000/attempt-1": f"sleep:{trial_s}", "0001/attempt-1": f"sleep:{trial_s}"}
        sweep, ledger = run_small(rig.address, tmp_path, 3, plan, blackouts.turn)
        assert blackouts.is_over
    assert sweep.state is SweepState.FINISHED
    assert [ends(record) for record in ledger.read_trials()] == [["ok"]] * 3
    figure(f"runs repeated after {count} blackouts of {for_s:.0f} s", "0")
    leaks.assert_home_clean(tmp_path)


class Link:
    """A network namespace and the one link to it, which can be cut."""

    def __init__(self) -> None:
        self.name = f"bf{os.getpid() % 100000}"
        self.host_ip, self.inner_ip = "10.77.13.1", "10.77.13.2"
        self.prefix = ("ip", "netns", "exec", self.name)

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", f"{self.name}h", "type", "veth", "peer", "name", f"{self.name}n", "netns", self.name)
        _ip("addr", "add", f"{self.host_ip}/24", "dev", f"{self.name}h")
        _ip("link", "set", f"{self.name}h", "up")
        _ip("-n", self.name, "addr", "add", f"{self.inner_ip}/24", "dev", f"{self.name}n")
        _ip("-n", self.name, "link", "set", "lo", "up")
        self.set("up")

    def set(self, state: str) -> None:
        _ip("-n", self.name, "link", "set", f"{self.name}n", state)

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", f"{self.name}h"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    try:
        link.make()
    except (OSError, subprocess.CalledProcessError) as error:
        link.remove()
        pytest.skip(f"needs root, Debian's iproute2 and network namespaces: {error}")
    yield link
    link.remove()


@pytest.mark.slow
@pytest.mark.fault("C11")
def test_a_short_cut_costs_nothing_and_a_long_one_a_repeat_whose_late_twin_is_not_counted(
    ray_token: None, tests_importable: None, tmp_path: Path, link: Link, figure: Figure
) -> None:
    """Health checks that give up after some 5 s stand for Ray's own, which take a minute."""
    rig = RayRig(ip=link.host_ip)
    ledger = Ledger(tmp_path, "sweep")
    try:
        rig.head(cpus=1)
        raylet = rig.raylet(rig.node(cpus=1, ip=link.inner_ip, prefix=link.prefix))
        run_small(rig.address, tmp_path / "short", 2, {"*": "sleep:6"}, Cuts(link, 1.0).turn)
        shortly = [ends(record) for record in Ledger(tmp_path / "short", "sweep").read_trials()]
        assert shortly == [["ok"], ["ok"]]
        figure("runs repeated after a cut of 1 s", "0")
        cuts = Cuts(link, 15.0)
        run_small(rig.address, tmp_path, 2, {f"{trial:04d}/attempt-1": "sleep:14" for trial in range(2)}, cuts.turn)
        until(lambda: cuts.is_over or cuts.turn(), deadline_s=30.0)
        told = sorted(ends(record) for record in ledger.read_trials())
        assert told == [["lost_node", "ok"], ["ok"]]
        (lost,) = [record for record in ledger.read_trials() if len(record.attempts) == 2]
        files = ledger.attempt(lost.trial, 1)
        until(lambda: files.read_report(0) is not None)
        assert files.read_outcome() == lost.attempts[0].outcome
        assert lost.attempts[0].ended_s is not None
        figure("cut to given up", f"{lost.attempts[0].ended_s - cuts.cut_s:.1f} s")
        before = ledger.read_trials()
        until(lambda: not raylet.is_running(), deadline_s=60.0)
        run_small(rig.address, tmp_path, 2, {})
        assert ledger.read_trials() == before
    finally:
        rig.close()
    leaks.assert_home_clean(tmp_path)


class Cuts:
    """Cuts `link` once for `for_s`, a second after its first turn."""

    def __init__(self, link: Link, for_s: float) -> None:
        self._link, self._for_s = link, for_s
        self._begin_s: float | None = None
        self.cut_s = 0.0
        self.is_over = False

    def turn(self) -> bool:
        now_s = time.time()
        self._begin_s = self._begin_s or now_s + 4.0
        if not self.cut_s and now_s >= self._begin_s:
            self._link.set("down")
            self.cut_s = now_s
        if self.cut_s and not self.is_over and now_s >= self.cut_s + self._for_s:
            self._link.set("up")
            self.is_over = True
        return self.is_over
