"""What every `TrialPool` promises, shown with real processes. A pool inherits `PoolConformance` and gives `pool`."""

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from orchestrator.contract.config import (
    DataSource,
    Knobs,
    MeasureSettings,
    Method,
    ModelSource,
    TrainSettings,
    TrialConfig,
)
from orchestrator.contract.errors import UnplaceableError
from orchestrator.contract.handoff import CONFIG_FILE, AttemptFiles
from orchestrator.contract.outcome import Cancelled, Crashed, Hang, Infra, Ok, OomDevice, Outcome, Timeout
from orchestrator.placement.processes import TEMPLATE_VARIABLE
from orchestrator.sweep.ports import Ended, Launch, TrialPool

STUB = "pools.stub_template"
DEADLINE_S = 120.0

Behaviours = dict[str, str]


def config(world_size: int = 1, **measure: float) -> TrialConfig:
    return TrialConfig(
        knobs=Knobs(method=Method.FULL, micro_batch=1),
        model=ModelSource(config={"model_type": "llama"}),
        data=DataSource(directory="/nowhere", digest="0", sequence_length=8),
        train=TrainSettings(global_batch=world_size, learning_rate=1e-3),
        measure=MeasureSettings.model_validate(measure),
        world_size=world_size,
        gradient_accumulation=1,
    )


class Home:
    """Makes attempts below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def attempt(self, behaviours: Behaviours | None = None, of: TrialConfig | None = None) -> Launch:
        token = uuid.uuid4().hex
        directory = self.root / token
        directory.mkdir()
        (directory / CONFIG_FILE).write_text((of or config()).model_dump_json())
        (directory / "behave.json").write_text(json.dumps(behaviours or {}))
        return Launch(token, directory, of or config())


def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Poll `condition`; fail when it is still false after `deadline_s`."""
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_s, "the condition did not come true in time"
        time.sleep(0.02)


def reach(pool: TrialPool, condition: Callable[[], bool]) -> None:
    """Drive `pool` until `condition` is true; no attempt may end meanwhile."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_s, "the condition did not come true in time"
        assert pool.wait(0.02) == []


def gather(pool: TrialPool, count: int) -> list[Ended]:
    """Wait until `count` attempts have ended."""
    ended: list[Ended] = []
    give_up_s = time.monotonic() + DEADLINE_S
    while len(ended) < count:
        assert time.monotonic() < give_up_s, f"{len(ended)} of {count} attempts ended in {DEADLINE_S:.0f} s"
        ended += pool.wait(0.5)
    return ended


def run(pool: TrialPool, launch: Launch) -> Outcome:
    """Launch when there is room, and wait for the end."""
    until(lambda: pool.has_room(launch.config.world_size))
    pool.launch(launch)
    (ended,) = gather(pool, 1)
    assert ended.token == launch.token
    return ended.outcome


def begun(launch: Launch, ranks: Sequence[int] = (0,)) -> bool:
    """Whether each of `ranks` has reached its forward pass."""
    seen = {event.rank for event in AttemptFiles(launch.directory).read_events() if event.phase == "forward"}
    return seen >= set(ranks)


def processes_of(launch: Launch) -> list[int]:
    """Processes that carry the attempt's folder in their open files, or its token in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            files = {file.path for file in process.open_files()}
        except (psutil.Error, OSError):
            continue
        in_folder = any(path.startswith(str(launch.directory)) for path in files)
        if in_folder or launch.token.encode() in environment:
            found.append(process.pid)
    return found


def templates() -> list[int]:
    """Every process of this user whose environment names a template of the stub."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            command = " ".join(process.cmdline())
        except (psutil.Error, OSError):
            continue
        if f"{TEMPLATE_VARIABLE}=".encode() in environment and (STUB in command or "sleep 360" in command):
            found.append(process.pid)
    return found


class PoolConformance:
    """The pool under test has exactly two devices and runs the stub template."""

    def test_every_launch_ends_exactly_once(self, pool: TrialPool, home: Home) -> None:
        launches = [home.attempt(), home.attempt()]
        for launch in launches:
            until(lambda: pool.has_room(1))
            pool.launch(launch)
        ended = gather(pool, 2)
        assert {end.token for end in ended} == {launch.token for launch in launches}
        assert all(isinstance(end.outcome, Ok) and end.node for end in ended)
        assert pool.wait(0.3) == []
        for end, launch in zip(
            sorted(ended, key=lambda e: e.token), sorted(launches, key=lambda x: x.token), strict=True
        ):
            assert AttemptFiles(launch.directory).read_outcome() == end.outcome

    def test_runs_as_many_at_once_as_there_are_devices(self, pool: TrialPool, home: Home) -> None:
        first, second = home.attempt({"0": "sleep:60"}), home.attempt({"0": "sleep:60"})
        assert pool.has_room(2)
        pool.launch(first)
        assert pool.has_room(1)
        assert not pool.has_room(2)
        pool.launch(second)
        assert not pool.has_room(1)
        reach(pool, lambda: begun(first) and begun(second))
        pool.cancel(first.token)
        (ended,) = gather(pool, 1)
        assert ended == Ended(first.token, Cancelled(), ended.node, ended.nodes)
        until(lambda: pool.has_room(1))
        pool.cancel(second.token)
        gather(pool, 1)

    def test_refuses_what_can_never_run(self, pool: TrialPool) -> None:
        pool.check(2, None)
        with pytest.raises(UnplaceableError, match=r"needs 3 CPU slots.*has 2 CPU slots"):
            pool.check(3, None)

    def test_a_two_rank_group_meets(self, pool: TrialPool, home: Home) -> None:
        assert isinstance(run(pool, home.attempt(of=config(2))), Ok)

    def test_cancel_ends_processes_that_left_their_session(self, pool: TrialPool, home: Home) -> None:
        launch = home.attempt({"0": "grandchildren"})
        pool.launch(launch)
        files = AttemptFiles(launch.directory)
        reach(pool, lambda: any(event.phase == "backward" for event in files.read_events()))
        assert processes_of(launch)
        pool.cancel(launch.token)
        (ended,) = gather(pool, 1)
        assert ended.outcome == Cancelled()
        assert processes_of(launch) == []

    def test_cancel_of_an_unknown_token_has_no_effect(self, pool: TrialPool, home: Home) -> None:
        pool.cancel("nobody")
        assert isinstance(run(pool, home.attempt()), Ok)

    def test_one_rank_killed_ends_the_group(self, pool: TrialPool, home: Home) -> None:
        launch = home.attempt({"0": "peer_lost", "1": "signal:SIGKILL"}, config(2))
        outcome = run(pool, launch)
        assert isinstance(outcome, Crashed)
        assert (outcome.rank, outcome.signal, outcome.phase) == (1, "SIGKILL", "forward"), outcome
        assert processes_of(launch) == []
        assert isinstance(run(pool, home.attempt(of=config(2))), Ok)

    def test_one_rank_out_of_memory_is_not_waited_out(self, pool: TrialPool, home: Home) -> None:
        outcome = run(pool, home.attempt({"0": "hang", "1": "oom"}, config(2)))
        assert isinstance(outcome, OomDevice)
        assert outcome.rank == 1

    @pytest.mark.parametrize(
        ("behaviour", "error", "exit_code", "signal"),
        [
            ("exit:0", "ended without a result", 0, None),
            ("exit:1", "ended without a result", 1, None),
            ("torn", "damaged result", 0, None),
            ("signal:SIGSEGV", "SIGSEGV", None, "SIGSEGV"),
        ],
    )
    def test_ends_without_a_result(
        self, pool: TrialPool, home: Home, behaviour: str, error: str, exit_code: int | None, signal: str | None
    ) -> None:
        outcome = run(pool, home.attempt({"0": behaviour}))
        assert isinstance(outcome, Crashed)
        assert error in outcome.error
        assert (outcome.exit_code, outcome.signal) == (exit_code, signal)
        assert ("last words" in outcome.evidence) == behaviour.startswith("exit")

    def test_a_silent_rank_is_a_hang(self, pool: TrialPool, home: Home) -> None:
        outcome = run(pool, home.attempt({"0": "sleep:60", "1": "stubborn"}, config(2, step_timeout_s=1.0)))
        assert isinstance(outcome, Hang)
        assert (outcome.rank, outcome.phase) == (1, "forward"), outcome
        assert outcome.silent_s >= 1.0

    def test_a_trial_over_its_time_is_a_timeout(self, pool: TrialPool, home: Home) -> None:
        outcome = run(pool, home.attempt({"0": "sleep:60"}, config(trial_timeout_s=1.5)))
        assert isinstance(outcome, Timeout)
        assert outcome.elapsed_s >= 1.5

    def test_a_lost_template_is_infra_and_is_replaced(self, pool: TrialPool, home: Home) -> None:
        launch = home.attempt({"0": "template_dies"})
        outcome = run(pool, launch)
        assert isinstance(outcome, Infra)
        assert "template" in outcome.cause
        assert processes_of(launch) == []
        assert isinstance(run(pool, home.attempt()), Ok)

    def test_no_secret_of_the_driver_reaches_a_trial(self, pool: TrialPool, home: Home) -> None:
        outcome = run(pool, home.attempt())
        assert isinstance(outcome, Ok)
        environment = outcome.measurement.resolved["environment"]
        assert isinstance(environment, dict)
        assert [name for name in environment if name.startswith(("RAY_", "MLFLOW_"))] == []
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""

    def test_trial_after_trial_leaves_nothing(self, pool: TrialPool, home: Home) -> None:
        for _ in range(3):
            assert isinstance(run(pool, home.attempt(of=config(2))), Ok)
        before = self._footprint()
        for _ in range(20):
            assert isinstance(run(pool, home.attempt(of=config(2))), Ok)
        # a rank that has just ended may still wait to be reaped
        until(lambda: all(now <= then for now, then in zip(self._footprint(), before, strict=True)))

    @staticmethod
    def _footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))

    def test_close_ends_everything_also_while_trials_run(self, pool: TrialPool, home: Home) -> None:
        launch = home.attempt({"0": "grandchildren"})
        pool.launch(launch)
        files = AttemptFiles(launch.directory)
        reach(pool, lambda: any(event.phase == "backward" for event in files.read_events()))
        assert templates()
        pool.close()
        until(lambda: templates() == [], deadline_s=15.0)
        assert processes_of(launch) == []
