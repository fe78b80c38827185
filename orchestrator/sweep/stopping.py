"""When a sweep is over: its budget is used up, or no candidate is worth its trial. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from orchestrator.contract.outcome import Rejected
from orchestrator.contract.record import TrialRecord
from orchestrator.contract.units import format_duration, format_money
from orchestrator.search.cost import Price
from orchestrator.search.ranking import contenders
from orchestrator.search.reported import reported
from orchestrator.spec.sweep import STOP_BELOW_GAIN, BudgetSection

ASKS = 2
"""So many candidates in a row have to promise too little: what the first one shows may change the belief."""
KEPT_SHARE = 0.25
"""Share of a budget that is kept for the confirmation at most: most of it is for finding something to confirm."""


@dataclass(frozen=True)
class Worth:
    """What device-hours and gains are worth to the user. `planned_tokens`: length of the whole training."""

    price: Price | None = None
    stop_below_gain: float = STOP_BELOW_GAIN
    planned_tokens: int | None = None
    eval_loss_within: float | None = None
    """See `orchestrator.search.quality.loss_limit`."""


def budget_used_up(
    budget: BudgetSection,
    price: Price | None,
    elapsed_s: float,
    used_s: float,
    kept_s: float = 0.0,
    widest: int = 1,
) -> str:
    """Says which part of the budget forbids any more attempts; else empty. Trials are counted by the sweep itself.

    `used_s` are device-seconds. `kept_s` is what one trial after another may still take afterwards, on at most `widest`
    devices; of each budget at most KEPT_SHARE is kept.
    """
    if budget.time is not None and elapsed_s + min(kept_s, KEPT_SHARE * budget.time) >= budget.time:
        return f"budget used: {format_duration(budget.time)}"
    if budget.device_hours is None and budget.money is None:
        return ""
    kept_s *= widest
    hours = budget.device_hours
    if hours is not None and (used_s + min(kept_s, KEPT_SHARE * hours * 3600)) / 3600 >= hours:
        return f"budget used: {budget.device_hours:g} device-hours"
    if budget.money is None or price is None:
        return ""
    spent = price.of(used_s) + min(price.of(kept_s), KEPT_SHARE * budget.money)
    return f"budget used: {format_money(budget.money, price.currency)}" if spent >= budget.money else ""


def fastest_tokens_per_second(records: Sequence[TrialRecord], eval_loss_within: float | None) -> float | None:
    """Of the trials that may win; None while there is none."""
    able = reported(contenders(records, eval_loss_within))
    return max((figures.tokens_per_second for figures in able.values()), default=None)


def no_gain_left(worth: Worth, records: Sequence[TrialRecord], gain: float | None, trial_s: float | None = None) -> str:
    """Why the candidate asked last is not worth its trial, nor was the one before it; else empty.

    `gain`: see `orchestrator.sweep.ports.Strategy.expected_gain`. Never without a trial that fits, with a strategy that
    knows no gain, or where `stop_below_gain` is 0. With a planned length a gain is worth the time that it saves in the
    whole training, and has to be worth the time of a trial, `trial_s` in median, on the same devices.

    `records`: the fastest of all and the last one launched are enough (`orchestrator.sweep.history`).
    """
    if gain is None or not worth.stop_below_gain:
        return ""
    best = fastest_tokens_per_second(records, worth.eval_loss_within)
    if best is None:
        return ""
    launched = [record for record in records if not isinstance(record.outcome, Rejected)]
    before = [record.expected_gain for record in islice(reversed(launched), ASKS - 1)]
    known = [each for each in (gain, *before) if each is not None]
    if len(known) < ASKS:
        return ""
    if worth.planned_tokens is None:
        return _below_share(worth.stop_below_gain, max(known))
    return _below_cost(worth.planned_tokens / best, trial_s, known)


def _below_share(least: float, largest: float) -> str:
    if largest >= least:
        return ""
    return f"no candidate is expected to gain more than {least * 100:g} % over the best (search.stop_below_gain)"


def _below_cost(training_s: float, trial_s: float | None, gains: Sequence[float]) -> str:
    """`gains`: that of the candidate asked last comes first."""
    saved_s = [training_s * gain / (1 + gain) for gain in gains]
    if trial_s is None or max(saved_s) >= trial_s:
        return ""
    return (
        f"no candidate is worth its trial: one takes about {format_duration(trial_s)}, and the next is expected to"
        f" save {format_duration(saved_s[0])} of the planned training, {format_duration(training_s)} with the best"
    )
