"""What many searches come to: launches to within a regret of the best, out-of-memory launches, regrets, time to ask."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from benchmarks.strategies.play import Run

COLUMNS = (
    "strategy", "3 % median", "p90", "solved", "1 % median", "p90", "solved", "OOM %", "regret @5", "@10", "@20", "end",
    "launches", "ask ms",
)  # fmt: skip


def launches_quantile(runs: Sequence[Run], regret: float, quantile: float) -> int | None:
    """By rank, a search that never got there counting as infinitely many; None: infinitely many."""
    found = sorted(run.launches_to(regret) or np.inf for run in runs)
    reached = found[min(len(found) - 1, ceil(quantile * len(found)) - 1)]
    return None if np.isinf(reached) else int(reached)


def scores(runs: Sequence[Run]) -> dict[str, Any]:
    """Of some searches of one strategy. Regrets are medians, the OOM share is a mean; None: not reached."""
    found: dict[str, Any] = {"searches": len(runs)}
    for percent in (5, 3, 1):
        regret = percent / 100
        found[f"launches_to_{percent}_pct_median"] = launches_quantile(runs, regret, 0.5)
        found[f"launches_to_{percent}_pct_p90"] = launches_quantile(runs, regret, 0.9)
        found[f"solved_{percent}_pct"] = float(np.mean([run.launches_to(regret) is not None for run in runs]))
    found["oom_share"] = float(np.mean([run.oom_share for run in runs]))
    for launches in (5, 10, 20):
        found[f"regret_after_{launches}"] = float(np.median([run.regret_after(launches) for run in runs]))
    found["regret_at_end"] = float(np.median([run.regret_after(10**9) for run in runs]))
    found["launches_median"] = float(np.median([len(run.regrets) for run in runs]))
    asks_s = [each for run in runs for each in run.asks_s]
    found["ask_ms_mean"] = 1e3 * float(np.mean(asks_s)) if asks_s else 0.0
    found["ask_ms_max"] = 1e3 * max(asks_s, default=0.0)
    return found


def cells(strategy: str, found: dict[str, Any], budget: int) -> tuple[str, ...]:
    """One row of the table under COLUMNS."""

    def launches(name: str) -> str:
        return f">{budget}" if found[name] is None else str(found[name])

    return (
        strategy,
        launches("launches_to_3_pct_median"),
        launches("launches_to_3_pct_p90"),
        f"{found['solved_3_pct']:.2f}",
        launches("launches_to_1_pct_median"),
        launches("launches_to_1_pct_p90"),
        f"{found['solved_1_pct']:.2f}",
        f"{100 * found['oom_share']:.0f}",
        *(f"{found[name]:.3f}" for name in ("regret_after_5", "regret_after_10", "regret_after_20", "regret_at_end")),
        f"{found['launches_median']:.0f}",
        f"{found['ask_ms_mean']:.1f}",
    )
