"""Sweeps over a real pool whose ranks do as a plan says: `{"0000/attempt-1": "hang"}`; the others do as under `*`.

`python -m faults.small_sweep ADDRESS HOME TRIALS PLAN` runs or resumes one on the Ray cluster at ADDRESS.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from fakes import FakeStrategy, candidate, new_ledger, spec
from pools.conformance import STUB

from orchestrator.backends.ray_pool import RayPool
from orchestrator.contract.errors import BrimfulError
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Ended, Launch

Plan = Mapping[str, str]


class ScriptedPool(RayPool):
    """Ranks do as `plan` says; `on_wait` is called at every turn of the sweep."""

    plan: Plan = {}
    on_wait: Callable[[], None] = staticmethod(lambda: None)

    def launch(self, launch: Launch) -> None:
        name = f"{launch.directory.parent.name}/{launch.directory.name}"
        behaviour = self.plan.get(name, self.plan.get("*", "ok"))
        (launch.directory / "behave.json").write_text(json.dumps({"0": behaviour}))
        super().launch(launch)

    def wait(self, timeout_s: float) -> list[Ended]:
        self.on_wait()
        return super().wait(timeout_s)


def run_small(
    address: str, home: Path, trials: int, plan: Plan, on_wait: Callable[[], None] = lambda: None
) -> tuple[SweepRecord, Ledger]:
    """Run or resume a sweep of so many trials."""
    of = spec()
    ledger = new_ledger(home, of)
    strategy = FakeStrategy((candidate(size) for size in range(1, trials + 1)), ledger.read_trials())
    with closing(ScriptedPool(address, template_module=STUB)) as pool, ledger.lock():
        pool.plan, pool.on_wait = plan, on_wait
        return run_sweep(of, ledger, Services(pool, strategy)), ledger


def ends(record: TrialRecord) -> list[str]:
    """How the attempts of a trial ended."""
    return [attempt.outcome.kind for attempt in record.attempts if attempt.outcome is not None]


def main() -> int:
    address, home, trials, plan = sys.argv[1:]
    try:
        sweep, _ = run_small(address, Path(home), int(trials), json.loads(plan))
    except BrimfulError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return sweep.exit_code or 0


if __name__ == "__main__":
    sys.exit(main())
