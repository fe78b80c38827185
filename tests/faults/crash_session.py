"""Drivers without a command line, started in milliseconds and struck at chosen places.

As a process it reads lines of JSON, each a list of sessions that run at the same time, every one in a fork of its own,
and answers with their exit codes. A session is the real loop, ledger, study and lock over a pool whose trials end at
once; only the pool is a fake. It is struck at the n-th system call that changes the disk, or at the n-th passing of a
named place in the loop, by SIGKILL or by the disk's refusal.
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SAID_FILE = "said"
SPACE = {"zero_stage": (0, 1, 2), "gradient_checkpointing": ("none", "full"), "micro_batch": (1, 2)}
"""Twelve candidates."""
DISK_CALLS = ("write", "fsync", "replace", "mkdir")
PLACES = (
    "after_ask",
    "after_launch_record",
    "before_launch",
    "after_launch",
    "after_result",
    "after_end_record",
    "before_tell",
    "after_tell",
    "before_last_log",
    "after_last_log",
)


@dataclass(frozen=True)
class Strike:
    """`where`: "disk" or one of PLACES; `count`: at which passing, from 1; `how`: "kill" or an errno's name.

    A refusal lasts for `calls` calls.
    """

    where: str
    count: int
    how: str = "kill"
    calls: int = 1


@dataclass(frozen=True)
class Session:
    """One driver of the sweep `sweep` under `home`. `mark` names the file that holds what it said at its end."""

    home: str
    trials: int = 12
    slots: int = 2
    top: int = 0
    seed: int = 1
    sampler: str = "random"
    strike: Strike | None = None
    delay_s: float = 0.0
    trial_s: float = 0.0
    noise: float = 0.0
    mark: str = "session"

    @property
    def said(self) -> str:
        """What it said at its end: the error's text, empty without one."""
        return Path(self.home, f"{SAID_FILE}-{self.mark}").read_text()


class Sessions:
    """The process that forks them, from outside."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
        command = [sys.executable, "-m", "faults.crash_session"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, *sessions: Session) -> list[int]:
        """Run them at the same time and return how each ended: an exit code, or minus a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(each) for each in sessions]) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


class _Striker:
    def __init__(self, strike: Strike | None) -> None:
        self._strike = strike
        self._passed = 0

    def passing(self, where: str) -> None:
        strike = self._strike
        if strike is None or strike.where != where:
            return
        self._passed += 1
        if not strike.count <= self._passed < strike.count + strike.calls:
            return
        if strike.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, strike.how)
        raise OSError(number, os.strerror(number))

    @contextmanager
    def at_the_disk(self) -> Iterator[None]:
        """Every call that changes the disk passes by "disk" first."""
        real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in DISK_CALLS}

        def passing(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.passing("disk")
                return real[name](*arguments, **options)

            return call

        for name in DISK_CALLS:
            setattr(os, name, passing(name))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)


def drive(session: Session) -> int:
    """Run or resume the sweep; returns the exit code."""
    from fakes import new_ledger, spec
    from spaces import search, space_of

    from orchestrator.backends.optuna_study import OptunaStrategy
    from orchestrator.contract.errors import BrimfulError
    from orchestrator.spec.sweep import BudgetSection, ConfirmSection, MeasureSection, Sampler
    from orchestrator.sweep.loop import Services, run_sweep

    striker = _Striker(session.strike)
    section = search(SPACE, Sampler(session.sampler), seed=session.seed)
    measure = MeasureSection(racing=False, confirm=ConfirmSection(top=session.top, repeats=3))
    of = spec(budget=BudgetSection(trials=session.trials), measure=measure, search=section)
    try:
        ledger = new_ledger(Path(session.home), of)
        with ledger.lock(), striker.at_the_disk():
            strategy = OptunaStrategy(space_of(section), section, of.objective, ledger.folder, ledger.read_trials())
            with closing(strategy):
                services = Services(
                    pool=_pool(session, striker), strategy=_strategy(strategy, striker), logs=(_log(striker),)
                )
                return run_sweep(of, ledger, services).exit_code or 0
    except BrimfulError as error:
        Path(session.home, f"{SAID_FILE}-{session.mark}").write_text(str(error))
        return error.exit_code


def _pool(session: Session, striker: _Striker) -> Any:
    from fakes import FakePool, ok, oom

    from orchestrator.sweep.ports import Ended, Launch

    def end(launch: Launch) -> Any:
        knobs = launch.config.knobs
        if knobs.micro_batch == 2 and knobs.zero_stage == 0:
            return oom()
        speed = 100.0 * knobs.micro_batch / (1 + 0.1 * knobs.zero_stage)
        return ok(tokens_per_second=speed * (1 + session.noise * random.Random(launch.token).uniform(-1, 1)))

    class Pool(FakePool):
        def launch(self, launch: Launch) -> None:
            striker.passing("before_launch")
            super().launch(launch)
            striker.passing("after_launch")

        def wait(self, timeout_s: float) -> list[Ended]:
            ends = super().wait(timeout_s)
            if ends:
                striker.passing("after_result")
            return ends

    return Pool(end, slots=session.slots, trial_s=session.trial_s)


def _strategy(strategy: Any, striker: _Striker) -> Any:
    class Strategy:
        expected_gain = strategy.expected_gain

        def ask(self) -> Any:
            candidate = strategy.ask()
            striker.passing("after_ask")
            return candidate

        def tell(self, *told: Any) -> None:
            striker.passing("before_tell")
            strategy.tell(*told)
            striker.passing("after_tell")

    return Strategy()


def _log(striker: _Striker) -> Any:
    from fakes import FakeRunLog

    class Log(FakeRunLog):
        def sweep_changed(self, sweep: Any) -> None:
            if sweep.exit_code is None:
                return
            striker.passing("before_last_log")
            super().sweep_changed(sweep)
            striker.passing("after_last_log")

        def trial_changed(self, trial: Any) -> None:
            striker.passing("after_launch_record" if trial.running is not None else "after_end_record")

    return Log()


def _forked(fields: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        strike = fields.pop("strike")
        session = Session(**fields, strike=Strike(**strike) if strike else None)
        time.sleep(session.delay_s)  # the offset of a race is what its test varies
        code = drive(session)
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve until the end of standard input."""
    sys.path.insert(0, str(TESTS / "optuna"))
    import fakes  # noqa: F401 (imported once, before any fork)
    import spaces  # noqa: F401

    import orchestrator.sweep.loop  # noqa: F401

    for line in sys.stdin:
        requests: Sequence[dict[str, Any]] = json.loads(line)
        pids = [_forked(fields) for fields in requests]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
