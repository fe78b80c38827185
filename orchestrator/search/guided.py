"""What to try next: expected improvement in log throughput times the probability that it fits, over a finite space.

The prediction is the mean before anything was measured; Gaussian processes learn how far measurements lie from it.
Stateless: an answer follows from the observations and what is running, so that a sweep resumes without anything kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from orchestrator.search.residuals import Amplitudes, Axis, Belief, Floats, Levels, fit

SPEED = (Amplitudes(0.3, 0.10, 0.10, 0.02),)
"""Of log(measured / predicted throughput). One set did as well as a choice of three on fifteen landscapes
(`benchmarks/search_factory.py`)."""
MEMORY = (Amplitudes(0.10, 0.02, 0.02, 0.01), Amplitudes(0.2, 0.06, 0.05, 0.02), Amplitudes(0.3, 0.15, 0.12, 0.03))
"""Of log(measured / predicted need): a good prediction, a middling one, one that is wrong about some knobs."""
LOSS = (Amplitudes(0.05, 0.01, 0.005, 0.002), Amplitudes(0.1, 0.05, 0.02, 0.005), Amplitudes(0.3, 0.15, 0.05, 0.01))
"""Of log(eval loss / greatest allowed), unpredicted: candidates that learn nearly alike, and others."""
LEAST_DEVIATION = 0.02
"""Of a memory belief: peaks of one configuration vary by more on every device."""
PROBABILITY_POWER = 4.0
"""Of P(fits) in the score: against 2, it takes launches that run out of memory from 14 to 5 % on those landscapes, at
no cost in launches to the best."""
LEAST_LOSS_DEVIATION = 0.001
"""Of a loss belief: another order of sums alone moves a loss by less (`tests/trial/test_quality.py`)."""
MARGIN = 0.02
"""Of the limit, that a candidate should leave."""
CENSORED_STEP = 0.02
"""By how much more than its limit a run that ran out is taken to need, at least, in log units."""


@dataclass(frozen=True)
class Expected:
    """What one candidate is predicted to do. `share_of_limit`: its need over what it may use; 0 without a limit."""

    tokens_per_second: float
    share_of_limit: float


@dataclass(frozen=True)
class Prediction:
    """Before anything is measured, for each candidate: natural logarithms of tokens/s and of needed bytes."""

    log_speed: Floats
    log_device: Floats
    log_host: Floats | None = None


@dataclass(frozen=True)
class Limits:
    """Natural logarithms of the bytes that a trial may use."""

    log_device: float
    log_host: float | None = None


@dataclass(frozen=True)
class Observation:
    """What became of a candidate. A run that ran out needs at least the limit; one that says nothing is left out."""

    candidate: int
    outcome: Literal["ok", "oom_device", "oom_host"]
    log_speed: float = 0.0
    log_device: float | None = None
    log_host: float | None = None
    log_loss: float | None = None
    """Of its eval loss over the greatest that may win; None where no loss was taken or none bounds it."""

    @property
    def may_win(self) -> bool:
        """False: it loses too much and is nothing to improve on, however fast."""
        return self.log_loss is None or self.log_loss <= 0


@dataclass(frozen=True)
class Suggestion:
    """`expected_gain`: expected improvement over the best so far (as a share), times the probability that it fits; what
    runs counts as it is believed. None before anything that may win was measured."""

    candidate: int
    expected_gain: float | None
    probability_fits: float


@dataclass(frozen=True)
class Guided:
    """The sampler's knowledge of a space."""

    levels: Levels
    axes: tuple[Axis, ...]
    prediction: Prediction
    limits: Limits
    speed: tuple[Amplitudes, ...] = SPEED
    memory: tuple[Amplitudes, ...] = MEMORY
    monotone: tuple[int, ...] = field(default=())
    """Columns of `levels` along which memory never falls, all else equal."""

    def ask(self, observations: Sequence[Observation], running: Sequence[int] = ()) -> Suggestion | None:
        """The most promising candidate that was not tried and does not run; None when there is none left."""
        tried = {seen.candidate for seen in observations} | set(running)
        if len(tried) == len(self.levels):
            return None
        fits = self._fits(observations, running)
        speed = self._speed(observations, running)
        gains = self._gains(speed, observations, running)
        keeps = self._keeps_quality(observations)
        scores = gains * fits**PROBABILITY_POWER * keeps
        open_ones = np.ones(len(self.levels), dtype=bool)
        open_ones[list(tried)] = False
        open_ones &= ~self._dominated(observations)
        if not open_ones.any():
            return None
        if not np.any(scores[open_ones] > 0):
            scores = fits
        chosen = int(np.argmax(np.where(open_ones, scores, -1.0)))
        has_best = any(seen.outcome == "ok" and seen.may_win for seen in observations)
        gain = float(gains[chosen] * fits[chosen] * keeps[chosen]) if has_best else None
        return Suggestion(chosen, gain, float(fits[chosen]))

    def believed_speed(self, observations: Sequence[Observation]) -> Belief:
        """Log tokens/s of every candidate, after the observations."""
        return self._speed(observations, ())

    def _speed(self, observations: Sequence[Observation], running: Sequence[int]) -> Belief:
        seen = [seen for seen in observations if seen.outcome == "ok"]
        rows = np.array([each.candidate for each in seen], dtype=np.int64)
        residuals = np.array([each.log_speed for each in seen]) - self.prediction.log_speed[rows]
        return self._after(self.prediction.log_speed, rows, residuals, running, self.speed)

    def _after(
        self,
        prior: Floats,
        rows: NDArray[np.int64],
        residuals: Floats,
        running: Sequence[int],
        choices: tuple[Amplitudes, ...],
    ) -> Belief:
        """Prior and residuals; what runs is taken to come out as believed, so that it is not asked for again."""
        belief = fit(self.levels, rows, residuals, self.axes, choices)
        waiting = np.array([each for each in running if each not in set(rows.tolist())], dtype=np.int64)
        if len(waiting):
            rows = np.concatenate([rows, waiting])
            belief = fit(self.levels, rows, np.concatenate([residuals, belief.mean[waiting]]), self.axes, choices)
        return Belief(prior + belief.mean, belief.deviation)

    def _fits(self, observations: Sequence[Observation], running: Sequence[int]) -> Floats:
        device = self._memory(observations, "oom_device", self.prediction.log_device, self.limits.log_device)
        if self.prediction.log_host is None or self.limits.log_host is None:
            return device
        return device * self._memory(observations, "oom_host", self.prediction.log_host, self.limits.log_host)

    def _memory(self, observations: Sequence[Observation], oom: str, prior: Floats, limit: float) -> Floats:
        """P(fits) of every candidate. A run that ran out counts as what is believed of it, at least the limit."""
        known = [
            (seen.candidate, value)
            for seen in observations
            if (value := seen.log_device if oom == "oom_device" else seen.log_host) is not None
        ]
        rows = np.array([candidate for candidate, _ in known], dtype=np.int64)
        residuals = np.array([value for _, value in known]) - prior[rows]
        belief = fit(self.levels, rows, residuals, self.axes, self.memory)
        censored = np.array([seen.candidate for seen in observations if seen.outcome == oom], dtype=np.int64)
        if len(censored):
            least = limit + CENSORED_STEP - prior[censored]
            values = np.maximum(belief.mean[censored], least)
            # a run that was thought to need more than the limit anyway has nothing to teach
            surprising = belief.mean[censored] < least
            rows = np.concatenate([rows, censored[surprising]])
            belief = fit(self.levels, rows, np.concatenate([residuals, values[surprising]]), self.axes, self.memory)
        deviation = np.maximum(belief.deviation, LEAST_DEVIATION)
        return _cumulative((limit - MARGIN - prior - belief.mean) / deviation)

    def _gains(self, speed: Belief, observations: Sequence[Observation], running: Sequence[int]) -> Floats:
        """Expected improvement, as a share of the best so far; before there is one, the speed itself.

        What runs counts among the best as it is believed: a first batch of neighbours would teach one thing.
        """
        measured = [seen.candidate for seen in observations if seen.outcome == "ok" and seen.may_win] + list(running)
        if not measured:
            return np.asarray(np.exp(speed.mean - speed.mean.max()))
        best = float(speed.mean[measured].max())
        deviation = np.maximum(speed.deviation, 1e-9)
        z = (speed.mean - best) / deviation
        density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
        gains: Floats = np.maximum(deviation * (z * _cumulative(z) + density), 0.0)
        return gains

    def _keeps_quality(self, observations: Sequence[Observation]) -> Floats:
        """P(its loss allows it to win) of every candidate; 1 where no loss is known."""
        known = [(seen.candidate, seen.log_loss) for seen in observations if seen.log_loss is not None]
        if not known:
            return np.ones(len(self.levels))
        rows = np.array([candidate for candidate, _ in known], dtype=np.int64)
        belief = fit(self.levels, rows, np.array([value for _, value in known]), self.axes, LOSS)
        return _cumulative(-belief.mean / np.maximum(belief.deviation, LEAST_LOSS_DEVIATION))

    def _dominated(self, observations: Sequence[Observation]) -> NDArray[np.bool_]:
        """Candidates that surely need no less than one that ran out: the same but along monotone columns."""
        dominated = np.zeros(len(self.levels), dtype=bool)
        for seen in observations:
            if seen.outcome != "oom_device" or not self.monotone:
                continue
            own = self.levels[seen.candidate]
            others = [column for column in range(self.levels.shape[1]) if column not in self.monotone]
            equal = np.all(self.levels[:, others] == own[others], axis=1)
            greater = np.all(self.levels[:, self.monotone] >= own[list(self.monotone)], axis=1)
            dominated |= equal & greater
        return dominated


def _cumulative(z: Floats) -> Floats:
    return np.asarray(ndtr(z), dtype=np.float64)
