"""What a sweep will cost before it begins: predicted time and device-hours of its trials."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.config import Frozen, MeasureSettings, QualitySettings
from orchestrator.contract.outcome import Phase
from orchestrator.placement.forecast import Forecast
from orchestrator.search.cost import Price

LAUNCH_S = 1.0
"""From dispatch to the first step in a warm lane: 0.4 to 1.2 s on two cores (`benchmarks.trial_overhead`)."""
LOAD_BYTES_PER_S = 1e9
"""Weights from disk or made anew, and onto the device. Assumed."""
PROBE_STEPS = 2
"""Steps of the longest rows before anything is measured (`orchestrator.trial.run`)."""


class Preview(Frozen):
    """Predicted cost of a sweep at most: `trials` of the `launchable` candidates, each at the mean cost of all of them.

    It may end before, when no candidate is worth its trial.
    """

    trials: int
    confirmations: int
    """Runs of the best after the search, one after another, at the mean cost of what is likely to fit."""
    launchable: int
    trial_s: float
    """Of one trial, on average."""
    wall_s: float
    """With `lanes` trials side by side."""
    lanes: int
    device_hours: float
    money: float | None
    """None without a price."""


@dataclass(frozen=True)
class Terms:
    """How a sweep launches: at most `budget` trials of `world_size` devices in the mean, `lanes` of them side by side,
    and how many runs confirm the best."""

    measure: MeasureSettings
    budget: int | None
    lanes: int
    world_size: float
    confirmations: int = 0
    price: Price | None = None


def preview(forecasts: Sequence[Forecast], terms: Terms) -> Preview | None:
    """The cost of trying the trials in `forecasts`; None where no speed is predicted."""
    measure, budget, lanes = terms.measure, terms.budget, terms.lanes
    costs_s = [cost_s for forecast in forecasts if (cost_s := trial_s(forecast, measure)) is not None]
    if not costs_s or len(costs_s) < len(forecasts):
        return None
    trials = len(forecasts) if budget is None else min(budget, len(forecasts))
    mean_s = sum(costs_s) / len(costs_s)
    whole_s = [cost_s for cost_s, forecast in zip(costs_s, forecasts, strict=True) if forecast.is_likely]
    confirm_s = terms.confirmations * sum(whole_s) / len(whole_s) if whole_s else 0.0
    device_s = (trials * mean_s + confirm_s) * terms.world_size
    return Preview(
        trials=trials,
        confirmations=terms.confirmations if whole_s else 0,
        launchable=len(forecasts),
        trial_s=mean_s,
        wall_s=mean_s * math.ceil(trials / lanes) + confirm_s,
        lanes=lanes,
        device_hours=device_s / 3600,
        money=terms.price.of(device_s) if terms.price is not None else None,
    )


def trial_s(forecast: Forecast, measure: MeasureSettings) -> float | None:
    """One trial from launch to end, if it measures for as long as it may; one that runs out ends in the probe."""
    if forecast.time is None:
        return None
    bill = forecast.verdict.bill
    weights_bytes = sum(size for name, size in bill.phases[Phase.LOAD].items() if name.endswith("_weights"))
    start_s = LAUNCH_S + weights_bytes / LOAD_BYTES_PER_S
    step_s = forecast.time.step_s
    if not forecast.is_likely:
        return start_s + step_s
    steps = min(measure.max_steps, max(measure.min_steps, math.ceil(measure.max_measure_s / step_s)))
    speed_s = (PROBE_STEPS + measure.warmup_steps + steps) * step_s
    return start_s + speed_s + (quality_s(forecast, measure.quality) if measure.quality is not None else 0.0)


def quality_s(forecast: Forecast, quality: QualitySettings) -> float:
    """Training for the loss; taking it costs a third of a step or less for each row of a step, which is left out."""
    return quality.train_tokens / forecast.tokens_per_second
