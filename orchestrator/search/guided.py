"""What to try next: expected improvement in log throughput times the probability that it fits, over a finite space.

The prediction is the mean before anything was measured; Gaussian processes learn how far measurements lie from it.
Stateless: an answer follows from the observations and what is running, so that a sweep resumes without anything kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from orchestrator.search.residuals import Amplitudes, Axis, Belief, Floats, Levels, Residuals, Rows
from orchestrator.search.trust import CONTRAST, is_doubtful, wants_contrast

SPEED = (Amplitudes(0.3, 0.05, 0.05, 0.02), Amplitudes(0.3, 0.10, 0.10, 0.02), Amplitudes(0.4, 0.20, 0.20, 0.02))
MEMORY = (
    Amplitudes(0.10, 0.02, 0.02, 0.01),
    Amplitudes(0.6, 0.02, 0.02, 0.01),
    Amplitudes(0.2, 0.06, 0.05, 0.02),
    Amplitudes(0.6, 0.15, 0.12, 0.03),
)
"""Of log(measured / predicted), throughput and need: a good prediction, a middling one, one that is wrong about some
knobs, and for need one that is right but for a factor. The likeliest counts."""
LOSS = (Amplitudes(0.05, 0.01, 0.005, 0.002), Amplitudes(0.1, 0.05, 0.02, 0.005), Amplitudes(0.3, 0.15, 0.05, 0.01))
"""Of log(eval loss / greatest allowed), unpredicted: candidates that learn nearly alike, and others."""
UNPREDICTED_SPEED = (Amplitudes(0.5, 0.3, 0.1, 0.03),)
"""Of log throughput where nothing is predicted: the knobs explain all."""
UNKNOWN_NEED = 0.6
"""Of the limit, that a candidate is taken to need where nothing is predicted."""
LEAST_DEVIATION = 0.02
"""Of a memory belief: peaks of one configuration vary by more on every device."""
PROBABILITY_POWER = 3.0
BEARABLE = 0.08
POWER_SLOPE = 20.0
"""Of P(fits) in the score, and how it grows with the share of launches that ran out of memory beyond what is
bearable. A power of 2 finds the best as soon, and runs out more often; 4 finds the last percent more seldom."""
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
    """Before anything is measured, for each candidate: natural logarithms of tokens/s (None: nothing is predicted of
    them) and of needed bytes."""

    log_speed: Floats | None
    log_device: Floats
    log_host: Floats | None = None


@dataclass(frozen=True)
class Limits:
    """Natural logarithms of the bytes that a trial may use."""

    log_device: float
    log_host: float | None = None


@dataclass(frozen=True)
class Observation:
    """What became of a candidate that says something. A run that ran out needs at least the limit; one that ran over a
    limit is `ok`, with what it needed, and `is_over`."""

    candidate: int
    outcome: Literal["ok", "oom_device", "oom_host"]
    log_speed: float = 0.0
    log_device: float | None = None
    log_host: float | None = None
    is_over: bool = False
    log_loss: float | None = None
    """Of its eval loss over the greatest that may win; None where no loss was taken or none bounds it."""

    @property
    def may_win(self) -> bool:
        """False: it needs or loses too much and is nothing to improve on, however fast."""
        return not self.is_over and (self.log_loss is None or self.log_loss <= 0)


@dataclass(frozen=True)
class Suggestion:
    """`expected_gain`: expected improvement over the best so far (as a share) times the probability that it fits, of
    the most promising candidate, which this is unless the prediction is put to the test; what runs counts as it is
    believed. None before anything that may win was measured. `is_led`: whether predicted speeds lead the search.
    """

    candidate: int
    expected_gain: float | None
    probability_fits: float
    is_led: bool


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

    def ask(
        self, observations: Sequence[Observation], running: Sequence[int] = (), closed: Sequence[int] = ()
    ) -> Suggestion | None:
        """The most promising candidate that was not tried and does not run; None when there is none left.

        `closed` were tried and say nothing: killed, lost, never launched.
        """
        tried = {seen.candidate for seen in observations} | set(running) | set(closed)
        if len(tried) == len(self.levels):
            return None
        fits = self._fits(observations)
        speed = self._speed(observations, running)
        gains = self._gains(speed, observations, running)
        keeps = self._keeps_quality(observations)
        power = _caution(observations)
        scores = gains * fits**power * keeps
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
        probes = open_ones & self._contrasting(observations, running)
        if probes.any():
            chosen = int(np.argmax(np.where(probes, np.exp(speed.mean) * fits**power, -1.0)))
        return Suggestion(chosen, gain, float(fits[chosen]), self.leading_speed(observations) is not None)

    def leading_speed(self, observations: Sequence[Observation]) -> Floats | None:
        """The predicted log tokens/s that it starts from; None without, and once trials show that they are no guide."""
        predicted = self.prediction.log_speed
        if predicted is None or np.ptp(predicted) == 0:
            return None
        rows, measured = _measured(observations)
        if not is_doubtful(predicted[rows], measured):
            return predicted
        with_it = self._residuals.fit(rows, measured - predicted[rows], self.speed)
        without = self._residuals.fit(rows, measured - measured.mean(), UNPREDICTED_SPEED)
        return predicted if with_it.log_likelihood > without.log_likelihood else None

    @cached_property
    def _residuals(self) -> Residuals:
        return Residuals(self.levels, self.axes)

    def _speed(self, observations: Sequence[Observation], running: Sequence[int]) -> Belief:
        """What runs is taken to come out as believed, so that it is not asked for again."""
        rows, measured = _measured(observations)
        prior, choices = self.leading_speed(observations), self.speed
        if prior is None:
            level = float(measured.mean()) if len(measured) else 0.0
            prior, choices = np.full(len(self.levels), level), UNPREDICTED_SPEED
        waiting = np.array([each for each in running if each not in set(rows.tolist())], dtype=np.int64)
        belief = self._residuals.fit(rows, measured - prior[rows], choices).belief(waiting)
        return Belief(prior + belief.mean, belief.deviation)

    def _fits(self, observations: Sequence[Observation]) -> Floats:
        device = self._memory(observations, "oom_device", self.prediction.log_device, self.limits.log_device)
        if self.prediction.log_host is not None and self.limits.log_host is not None:
            return device * self._memory(observations, "oom_host", self.prediction.log_host, self.limits.log_host)
        if any(seen.outcome == "oom_host" for seen in observations):
            return device * self._memory(observations, "oom_host", np.full(len(self.levels), log(UNKNOWN_NEED)), 0.0)
        return device

    def _memory(self, observations: Sequence[Observation], oom: str, prior: Floats, limit: float) -> Floats:
        """P(fits) of every candidate. A run that ran out counts as what is believed of it, at least the limit; one
        that ran without a figure as what is predicted."""
        known = [
            (seen.candidate, prior[seen.candidate] if value is None else value)
            for seen in observations
            if seen.outcome == "ok"
            for value in (seen.log_device if oom == "oom_device" else seen.log_host,)
        ]
        rows = np.array([candidate for candidate, _ in known], dtype=np.int64)
        residuals = np.array([value for _, value in known]) - prior[rows]
        process = self._residuals.fit(rows, residuals, self.memory)
        censored = np.array([seen.candidate for seen in observations if seen.outcome == oom], dtype=np.int64)
        if len(censored):
            least = limit + CENSORED_STEP - prior[censored]
            # a run that was thought to need more than the limit anyway has nothing to teach
            surprising = process.mean(censored) < least
            rows = np.concatenate([rows, censored[surprising]])
            process = self._residuals.fit(rows, np.concatenate([residuals, least[surprising]]), self.memory)
        belief = process.belief(np.array([], dtype=np.int64))
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
        process = self._residuals.fit(rows, np.array([value for _, value in known]), LOSS)
        belief = process.belief(np.array([], dtype=np.int64))
        return _cumulative(-belief.mean / np.maximum(belief.deviation, LEAST_LOSS_DEVIATION))

    def _contrasting(self, observations: Sequence[Observation], running: Sequence[int]) -> NDArray[np.bool_]:
        """Candidates that would show whether predicted speeds are a guide; none where nobody asks."""
        rows, measured = _measured(observations)
        speed = self.prediction.log_speed
        if speed is None or not wants_contrast(speed[rows], measured, speed[list(running)]):
            return np.zeros(len(self.levels), dtype=bool)
        return np.asarray(speed < speed[rows].max() - CONTRAST)

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


def _caution(observations: Sequence[Observation]) -> float:
    """The power of P(fits): where too many launches ran out of memory, the next must be surer to fit."""
    ran_out = sum(seen.outcome != "ok" for seen in observations) / max(len(observations), 10)
    return PROBABILITY_POWER + POWER_SLOPE * max(ran_out - BEARABLE, 0.0)


def _measured(observations: Sequence[Observation]) -> tuple[Rows, Floats]:
    """Those that ran, and their log tokens/s."""
    ran = [seen for seen in observations if seen.outcome == "ok"]
    return np.array([seen.candidate for seen in ran], dtype=np.int64), np.array([seen.log_speed for seen in ran])


def _cumulative(z: Floats) -> Floats:
    return np.asarray(ndtr(z), dtype=np.float64)
