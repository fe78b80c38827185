"""Faults in real trials: each gets its own outcome with evidence, the group is gone in seconds, the next trial runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from pools.conformance import gather, processes_of, reach, run

from faults.conftest import LIMIT_BYTES, Trials, seconds_since_strike
from orchestrator.backends.local_pool import LocalPool
from orchestrator.contract.handoff import AttemptFiles
from orchestrator.contract.outcome import (
    Cancelled,
    Crashed,
    Diverged,
    Hang,
    Ok,
    OomDevice,
    Outcome,
    Phase,
)

pytestmark = pytest.mark.trains

Figure = Callable[[str, str], None]
GONE_WITHIN_S = 30.0
"""Far below the 1800 s of a collective's timeout; a loaded machine takes a few seconds."""


@pytest.fixture(scope="module")
def pool(tests_importable: None) -> Iterator[LocalPool]:
    with closing(LocalPool(devices=2, template_module="faults.fault_template")) as pool:
        yield pool


def suffer(pool: LocalPool, trials: Trials, faults: dict[int, str], world_size: int = 1, **measure: float) -> Outcome:
    """The outcome of a trial with `faults` by rank; afterwards its group is gone and the lane works."""
    launch = trials.attempt(faults, world_size, **measure)
    outcome = run(pool, launch)
    assert seconds_since_strike(launch) < GONE_WITHIN_S
    assert processes_of(launch) == []
    assert isinstance(run(pool, trials.attempt(world_size=world_size)), Ok)
    return outcome


@pytest.mark.fault("B5")
def test_an_exception_is_a_crash_with_its_traceback(pool: LocalPool, trials: Trials) -> None:
    outcome = suffer(pool, trials, {0: "exception"})
    assert isinstance(outcome, Crashed)
    assert (outcome.error, outcome.phase) == ("ValueError: injected failure", Phase.OPTIMIZER_STEP)
    assert "in user_error" in outcome.evidence


@pytest.mark.fault("B2")
def test_sigkill_alone_is_a_crash_and_no_out_of_memory(pool: LocalPool, trials: Trials) -> None:
    outcome = suffer(pool, trials, {0: "sigkill"})
    assert isinstance(outcome, Crashed)
    assert (outcome.signal, outcome.phase) == ("SIGKILL", Phase.OPTIMIZER_STEP)


@pytest.mark.fault("B5")
def test_a_segfault_shows_where(pool: LocalPool, trials: Trials) -> None:
    outcome = suffer(pool, trials, {0: "sigsegv"})
    assert isinstance(outcome, Crashed)
    assert outcome.signal == "SIGSEGV"
    assert "string_at" in outcome.evidence


@pytest.mark.fault("B6")
def test_a_hang_names_the_rank_and_shows_its_stack(pool: LocalPool, trials: Trials, figure: Figure) -> None:
    outcome = suffer(pool, trials, {1: "hang"}, world_size=2, step_timeout_s=6.0)
    assert isinstance(outcome, Hang)
    figure("silent when it was ended, step_timeout_s 6", f"{outcome.silent_s:.1f} s")
    assert (outcome.rank, outcome.phase) == (1, Phase.OPTIMIZER_STEP)
    assert "fault_template.py" in outcome.evidence


@pytest.mark.fault("B7")
def test_a_rank_that_stops_before_a_collective_is_the_one_that_hangs(pool: LocalPool, trials: Trials) -> None:
    """Its peer waits in the all-reduce, as it would in NCCL's."""
    outcome = suffer(pool, trials, {1: "sigstop"}, world_size=2, step_timeout_s=6.0)
    assert isinstance(outcome, Hang)
    assert outcome.rank == 1


@pytest.mark.fault("B5")
@pytest.mark.parametrize(
    ("fault", "error", "exit_code"),
    [
        ("exit_0", "ended without a result", 0),
        ("exit_1", "ended without a result", 1),
        ("torn_result", "damaged result", 0),
    ],
)
def test_no_whole_result_is_a_crash(pool: LocalPool, trials: Trials, fault: str, error: str, exit_code: int) -> None:
    outcome = suffer(pool, trials, {0: fault})
    assert isinstance(outcome, Crashed)
    assert error in outcome.error
    assert (outcome.exit_code, outcome.signal) == (exit_code, None)


@pytest.mark.fault("B5", "E12")
def test_a_nan_loss_is_diverged(pool: LocalPool, trials: Trials) -> None:
    outcome = suffer(pool, trials, {0: "nan"})
    assert isinstance(outcome, Diverged)
    assert "nan" in outcome.evidence


@pytest.mark.fault("B4")
@pytest.mark.parametrize(
    ("fault", "evidence"), [("torch_allocator", "DefaultCPUAllocator"), ("empty_memory_error", "MemoryError")]
)
def test_a_failed_allocation_under_the_limit(pool: LocalPool, trials: Trials, fault: str, evidence: str) -> None:
    outcome = suffer(pool, trials, {0: fault})
    assert isinstance(outcome, OomDevice)
    assert (outcome.phase, outcome.rank, outcome.limit_bytes) == (Phase.OPTIMIZER_STEP, 0, LIMIT_BYTES)
    assert evidence in outcome.evidence
    assert (outcome.requested_bytes == 2**46) == (fault == "torch_allocator")


@pytest.mark.fault("B4")
def test_gloo_without_memory_for_its_thread_is_the_starved_ranks_out_of_memory(pool: LocalPool, trials: Trials) -> None:
    """Rank 0 only sees its peer go (DistNetworkError, or a closed connection); that must not decide."""
    outcome = suffer(pool, trials, {0: "starved_gloo", 1: "starved_gloo"}, world_size=2)
    assert isinstance(outcome, OomDevice)
    assert outcome.rank == 1


@pytest.mark.fault("B8")
def test_one_rank_out_of_memory_ends_the_other_at_once(pool: LocalPool, trials: Trials) -> None:
    """Field case E3: the others would wait for the collective's timeout."""
    outcome = suffer(pool, trials, {1: "torch_allocator"}, world_size=2)
    assert isinstance(outcome, OomDevice)
    assert outcome.rank == 1


@pytest.mark.fault("B8")
def test_one_rank_of_two_dying(pool: LocalPool, trials: Trials, figure: Figure) -> None:
    launch = trials.attempt({1: "sigkill"}, world_size=2)
    outcome = run(pool, launch)
    figure("rank killed to all gone", f"{seconds_since_strike(launch):.1f} s")
    assert seconds_since_strike(launch) < GONE_WITHIN_S
    assert processes_of(launch) == []
    assert isinstance(outcome, Crashed)
    assert (outcome.rank, outcome.signal) == (1, "SIGKILL")


@pytest.mark.fault("B9")
def test_grandchildren_in_sessions_of_their_own_end_with_the_trial(pool: LocalPool, trials: Trials) -> None:
    outcome = suffer(pool, trials, {0: "grandchildren"})
    assert isinstance(outcome, Ok)


@pytest.mark.fault("B9")
def test_cancel_ends_grandchildren_too(pool: LocalPool, trials: Trials, figure: Figure) -> None:
    launch = trials.attempt({0: "grandchildren"}, max_steps=100_000, min_steps=100_000, max_measure_s=600.0)
    pool.launch(launch)
    reach(pool, (launch.directory / "struck").exists)
    reach(pool, lambda: len(processes_of(launch)) >= 2)
    cancelled_s = time.monotonic()
    pool.cancel(launch.token)
    (ended,) = gather(pool, 1)
    figure("cancelled to nothing left", f"{time.monotonic() - cancelled_s:.1f} s")
    assert ended.outcome == Cancelled()
    assert processes_of(launch) == []


@pytest.mark.fault("B2", "B5")
def test_ends_that_look_alike_are_told_apart(pool: LocalPool, trials: Trials) -> None:
    """Field case E1; the fourth cause, an out-of-memory of the host, is in `pools`, where it is real."""
    told = {}
    for fault in ("cuda_oom", "sigkill", "sigsegv", "exit_1"):
        launch = trials.attempt({0: fault})
        told[fault] = run(pool, launch)
        assert AttemptFiles(launch.directory).read_outcome() == told[fault]
    oom, killed, segfault, left = told.values()
    assert isinstance(oom, OomDevice)
    assert (oom.requested_bytes, oom.phase) == (2 * 2**30, Phase.OPTIMIZER_STEP)
    assert [(end.signal, end.exit_code) for end in (killed, segfault, left) if isinstance(end, Crashed)] == [
        ("SIGKILL", None),
        ("SIGSEGV", None),
        (None, 1),
    ]
