"""How fast, and how surely: tokens per second of measured steps with its confidence interval."""

import math
from dataclasses import dataclass

from scipy.stats import t as student_t

from orchestrator.contract.config import MeasureSettings

CONFIDENCE = 0.95


@dataclass(frozen=True)
class StepTime:
    """One measured optimizer step: non-padding tokens of all ranks, and its duration."""

    tokens: int
    step_s: float


@dataclass(frozen=True)
class Rate:
    """Tokens per second and the ends of its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def relative_precision(self) -> float:
        """Half the interval over the mean."""
        return (self.high - self.low) / 2 / self.mean


def rate(steps: list[StepTime]) -> Rate:
    """Tokens per second over at least two steps, as the ratio of sums.

    Steps carry unlike numbers of tokens, so the error is that of a ratio estimator (Cochran, Sampling Techniques,
    3rd ed., section 6.4): the spread of tokens - rate * seconds, over the mean seconds, with Student's t. The lower
    end stays above zero.
    """
    count = len(steps)
    total_s = sum(step.step_s for step in steps)
    mean = sum(step.tokens for step in steps) / total_s
    squares = sum((step.tokens - mean * step.step_s) ** 2 for step in steps)
    standard_error = math.sqrt(squares / (count - 1) / count) / (total_s / count)
    half = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) * standard_error
    return Rate(mean, max(mean - half, mean * 1e-3), mean + half)


def is_beaten(steps: list[StepTime], settings: MeasureSettings, tokens_per_second: float | None) -> bool:
    """Whether the whole confidence interval lies below `tokens_per_second`. Never before `min_steps`."""
    return tokens_per_second is not None and len(steps) >= settings.min_steps and rate(steps).high < tokens_per_second


def is_measured(steps: list[StepTime], settings: MeasureSettings) -> bool:
    """Whether to stop: precise enough, or at the greatest number of steps or seconds. Never before `min_steps`."""
    if len(steps) < settings.min_steps:
        return False
    if len(steps) >= settings.max_steps or sum(step.step_s for step in steps) >= settings.max_measure_s:
        return True
    return rate(steps).relative_precision <= settings.relative_precision
