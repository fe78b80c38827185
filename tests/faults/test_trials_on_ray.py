"""Faults in real trials that span two Ray nodes of one slot each."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from pools.conformance import processes_of, run
from pools.rig import RayRig

from faults.conftest import Trials, seconds_since_strike
from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.outcome import Crashed, Ok, OomDevice

pytestmark = [pytest.mark.trains, pytest.mark.ray]


@pytest.fixture(scope="module")
def pool(ray_token: None, tests_importable: None) -> Iterator[RayPool]:
    rig = RayRig()
    try:
        rig.head(cpus=1)
        rig.node(cpus=1)
        with closing(RayPool(rig.address, template_module="faults.fault_template")) as pool:
            yield pool
    finally:
        rig.close()


def test_a_real_trial_over_two_nodes(pool: RayPool, trials: Trials) -> None:
    launch = trials.attempt(world_size=2)
    outcome = run(pool, launch)
    assert isinstance(outcome, Ok)
    assert [memory.rank for memory in outcome.measurement.ranks] == [0, 1]
    assert outcome.measurement.threads_per_rank == 1


@pytest.mark.fault("B8")
def test_one_rank_out_of_memory(pool: RayPool, trials: Trials) -> None:
    launch = trials.attempt({1: "torch_allocator"}, world_size=2)
    outcome = run(pool, launch)
    assert isinstance(outcome, OomDevice)
    assert outcome.rank == 1
    assert seconds_since_strike(launch) < 30.0


@pytest.mark.fault("B8")
def test_one_rank_killed_and_the_next_trial_runs(pool: RayPool, trials: Trials) -> None:
    launch = trials.attempt({1: "sigkill"}, world_size=2)
    outcome = run(pool, launch)
    assert isinstance(outcome, Crashed)
    assert (outcome.rank, outcome.signal) == (1, "SIGKILL")
    assert processes_of(launch) == []
    assert isinstance(run(pool, trials.attempt(world_size=2)), Ok)
