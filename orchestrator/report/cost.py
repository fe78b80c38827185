"""What a report says about what the sweep cost and what its winner saves in the user's whole training."""

from collections.abc import Iterable

from orchestrator.contract.record import SweepState
from orchestrator.contract.units import format_duration, format_hours, format_money
from orchestrator.report.summary import Summary
from orchestrator.search.cost import SweepCost, TrainingCost


def cost_headline(summary: Summary) -> Iterable[str]:
    """What the whole training costs, what was spent on the sweep, and whether that is paid back."""
    cost, best = summary.cost, summary.best
    if best is not None and cost.best is not None and cost.planned_tokens is not None:
        text = f"Whole training of {_tokens(cost.planned_tokens)}: {_training(cost.best, cost)} with trial {best.trial}"
        if cost.baseline is not None and not best.is_baseline:
            text += f", {_training(cost.baseline, cost)} with the baseline"
        yield f"{text}."
    if cost.device_hours > 0:
        so_far = " so far" if summary.sweep.state is SweepState.RUNNING else ""
        yield f"The sweep took {_priced(cost.device_hours, cost.money, cost)}{so_far}{_return(summary)}."


def _return(summary: Summary) -> str:
    """What the sweep's price has bought; empty without a winner beside the baseline."""
    cost, best = summary.cost, summary.best
    if best is None or best.is_baseline or best.baseline_speedup is None:
        return ""
    if cost.break_even_tokens is None:
        return " and saves nothing"
    if cost.saved_device_hours is None:
        tokens = _tokens(cost.break_even_tokens)
        return f"; what trial {best.trial} saves against the baseline pays for that after {tokens} of training"
    saved = f" and saves {_priced(cost.saved_device_hours, cost.saved_money, cost)} in that training"
    if cost.saved_device_hours >= cost.device_hours:
        return saved
    return f"{saved}, less than it took: it pays from {_tokens(cost.break_even_tokens)} on"


def cost_notes(summary: Summary) -> Iterable[str]:
    """Which of the figures are not measured."""
    cost = summary.cost
    if cost.best is not None:
        yield (
            "Whole training: its planned tokens at the tokens/s reported here, without evaluation and saving. It is"
            " predicted; nobody has run it."
        )
    if cost.not_launched_device_hours is not None:
        yield (
            f"Not launching {len(summary.rejected)} of the candidates saved about"
            f" {format_hours(cost.not_launched_device_hours)} device-hours: predicted, each as long as a trial took in"
            " median."
        )
    if cost.money is not None:
        yield "Money: device-hours at resources.price_per_device_hour."


def _training(training: TrainingCost, cost: SweepCost) -> str:
    return f"{format_duration(training.training_s)} ({_priced(training.device_hours, training.money, cost, ', ')})"


def _priced(device_hours: float, money: float | None, cost: SweepCost, between: str = " / ") -> str:
    text = f"{format_hours(device_hours)} device-hours"
    return text if money is None or cost.currency is None else f"{text}{between}{format_money(money, cost.currency)}"


def _tokens(count: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word} tokens"
    return f"{count:,.0f} tokens"
