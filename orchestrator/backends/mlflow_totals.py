"""The totals of a sweep, as metrics of its MLflow run. Pure; no mlflow."""

from collections.abc import Sequence

from orchestrator.backends.mlflow_status import status_of
from orchestrator.contract.record import TrialRecord
from orchestrator.search import ranking
from orchestrator.search.cost import SweepCost
from orchestrator.search.quality import eval_loss
from orchestrator.search.reported import reported
from orchestrator.spec.sweep import Objective


def sweep_totals(
    objectives: Sequence[Objective], trials: Sequence[TrialRecord], best: TrialRecord | None
) -> dict[str, float]:
    """What became of the launched `trials`, and the figures of the best."""
    kinds = [trial.standing.kind for trial in trials if trial.standing]
    baseline = next((trial for trial in trials if trial.is_baseline), None)
    summary = {
        "n_trials": float(len(trials)),
        "n_feasible": float(kinds.count("ok")),
        "n_over_limit": float(kinds.count("over_limit")),
        "n_oom": float(kinds.count("oom_device") + kinds.count("oom_host")),
        "n_failed": float(sum(status_of(trial.standing) == "FAILED" for trial in trials) - kinds.count("oom_device")
                          - kinds.count("oom_host")),
    }  # fmt: skip
    if best is not None and best.measurement is not None:
        figures = reported(trials)[best.trial]
        for objective in objectives:
            summary[f"best/{objective.metric}"] = ranking.reported_value(objective, best, figures) or 0.0
        summary |= {
            "best/tokens_per_second": figures.tokens_per_second,
            "best/tokens_per_second_low": figures.tokens_per_second_low,
            "best/tokens_per_second_high": figures.tokens_per_second_high,
            "best/search_tokens_per_second": best.measurement.tokens_per_second,
            "best/confirmation_runs": float(figures.runs),
        }
        summary |= {"best/mfu": figures.mfu} if figures.mfu is not None else {}
        loss = eval_loss(best)
        summary |= {"best/eval_loss": loss} if loss is not None else {}
        speedup = ranking.speedup(best, baseline) if baseline else None
        summary |= {"speedup_vs_baseline": speedup} if speedup is not None else {}
    return summary


def cost_totals(cost: SweepCost) -> dict[str, float]:
    """What the sweep took, and what the whole training takes and saves: predicted from measured tokens/s."""
    numbers = {
        "device_hours": cost.device_hours,
        "money": cost.money,
        "break_even_tokens": cost.break_even_tokens,
        "training/best_device_hours": cost.best.device_hours if cost.best is not None else None,
        "training/baseline_device_hours": cost.baseline.device_hours if cost.baseline is not None else None,
        "training/saved_device_hours": cost.saved_device_hours,
        "training/saved_money": cost.saved_money,
    }
    return {name: value for name, value in numbers.items() if value is not None}
