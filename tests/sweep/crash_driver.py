"""A driver in a process of its own, to be killed: `crash_driver.py HOME TRIALS [TOP]` runs or resumes the sweep
`sweep`, which confirms its best TOP."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import FakePool, FakeStrategy, candidate, new_ledger, ok, oom, spec

from orchestrator.contract.outcome import Outcome
from orchestrator.spec.sweep import BudgetSection, ConfirmSection, MeasureSection
from orchestrator.sweep.loop import Services, run_sweep
from orchestrator.sweep.ports import Launch


def end(launch: Launch) -> Outcome:
    micro_batch = launch.config.knobs.micro_batch
    return oom() if micro_batch % 3 == 0 else ok(tokens_per_second=10.0 * micro_batch)


def main() -> None:
    home, trials, top = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    measure = MeasureSection(confirm=ConfirmSection(top=top, repeats=3))
    of = spec(budget=BudgetSection(trials=trials), measure=measure)
    ledger = new_ledger(home, of)
    with ledger.lock():
        strategy = FakeStrategy([candidate(micro_batch) for micro_batch in range(1, 100)], ledger.read_trials())
        run_sweep(of, ledger, Services(pool=FakePool(end, slots=2, trial_s=0.02), strategy=strategy))


if __name__ == "__main__":
    main()
