"""The guided search as a sampler of Optuna, for any study over a finite list of points."""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from orchestrator.backends.optuna_verdict import LOSS_CONSTRAINT, MEMORY_CONSTRAINT, OUTCOME
from orchestrator.search.guided import UNKNOWN_NEED, Expected, Guided, Limits, Observation, Prediction, Suggestion
from orchestrator.search.residuals import Amplitudes, Axis
from orchestrator.space.dimensions import Choice

_UNPREDICTED_MEMORY = (Amplitudes(0.3, 0.3, 0.2, 0.03),)
"""Where nothing is predicted, the knobs explain all."""
_MONOTONE = ("micro_batch",)
"""Knobs of which more never frees memory, all else equal."""

Point = Mapping[str, Choice]


class GuidedSampler(BaseSampler):
    """Proposes the most promising of `points` that the study has not tried; maximizes one value.

    `points` hold choices of `distributions` by name, without those that have no effect beside the others. `expected`
    says what each is predicted to do; None: nothing is, and the sampler learns from the study alone. The study tells
    memory by the constraint `memory` (need over limit, less 1), also of trials that ran out of it, which are PRUNED.
    The user attribute `outcome` may say more of a PRUNED one: `oom_host` is host memory, `rejected` was never run.
    What FAILed teaches nothing and is not proposed again. Nothing is drawn at random and nothing is kept: equal studies
    give equal proposals, and of equals the first of `points` is proposed.

        distributions = {"method": CategoricalDistribution(("full", "lora")), "rank": CategoricalDistribution((4, 16))}
        points = [{"method": "full"}, {"method": "lora", "rank": 4}, {"method": "lora", "rank": 16}]
        study = optuna.create_study(direction="maximize", sampler=GuidedSampler(distributions, points))
        trial = study.ask()
        point = {"method": trial.suggest_categorical("method", ("full", "lora"))}
        if point["method"] == "lora":
            point["rank"] = trial.suggest_categorical("rank", (4, 16))
        tokens_per_s, share_of_limit = train(point)  # yours; on an out-of-memory: study.tell(trial, state=PRUNED)
        trial.set_constraint("memory", share_of_limit - 1)
        study.tell(trial, tokens_per_s)
    """

    def __init__(
        self,
        distributions: Mapping[str, CategoricalDistribution],
        points: Sequence[Point],
        expected: Sequence[Expected] | None = None,
    ) -> None:
        self._distributions = dict(distributions)
        self._points = [dict(point) for point in points]
        self._index = {_key(point): number for number, point in enumerate(self._points)}
        self._guided = _guided(self._distributions, self._points, expected)
        self._fallback = RandomSampler(seed=0)
        self.suggestion: Suggestion | None = None
        """The answer to the last ask, for who wants to know what it promised; no later answer depends on it."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All knobs, whatever the study has seen."""
        return dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The choices of one point; empty when all were tried."""
        self.suggestion = self._guided.ask(*self._read(study))
        return {} if self.suggestion is None else dict(self._points[self.suggestion.candidate])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A knob that the proposed point leaves open."""
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def _read(self, study: Study) -> tuple[list[Observation], list[int], list[int]]:
        """What the study has seen of the points, which run, and which ended without a word."""
        seen: dict[int, Observation] = {}
        running: set[int] = set()
        closed: set[int] = set()
        for past in study.get_trials(deepcopy=False):
            candidate = self._index.get(_key(past.params))
            if candidate is None:
                continue
            if not past.state.is_finished():
                running.add(candidate)
            elif observation := _observation(candidate, past):
                seen[candidate] = observation
            else:
                closed.add(candidate)
        return list(seen.values()), sorted(running - seen.keys()), sorted(closed - running - seen.keys())


def _observation(candidate: int, trial: FrozenTrial) -> Observation | None:
    excess = trial.constraints.get(MEMORY_CONSTRAINT)
    if trial.state is TrialState.COMPLETE and trial.value is not None and trial.value > 0:
        # 0 is told where nothing bounds the memory
        need = log(1 + excess) if excess and excess > -1 else None
        overshoot = trial.constraints.get(LOSS_CONSTRAINT)
        log_loss = None if overshoot is None or overshoot <= -1 else log(1 + overshoot)
        is_over = excess is not None and excess > 0
        return Observation(candidate, "ok", log(trial.value), need, is_over=is_over, log_loss=log_loss)
    if trial.state is TrialState.PRUNED and excess is not None and excess > 0:
        match trial.user_attrs.get(OUTCOME):
            case "rejected":
                return None
            case "oom_host":
                return Observation(candidate, "oom_host")
            case _:
                return Observation(candidate, "oom_device")
    return None


def _key(point: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset(point.items())


def _guided(
    distributions: Mapping[str, CategoricalDistribution], points: Sequence[Point], expected: Sequence[Expected] | None
) -> Guided:
    columns, axes = [], []
    for distribution, name in zip(distributions.values(), distributions, strict=True):
        choices = list(distribution.choices)
        is_ordered = all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices)
        is_ordered = is_ordered and name != "zero_stage"
        ordered = sorted(choices, key=lambda choice: choice if is_ordered else 0)  # type: ignore[arg-type, return-value]
        columns.append([ordered.index(point[name]) if name in point else len(ordered) for point in points])
        positions = tuple(np.linspace(0.0, 1.0, len(ordered)).tolist()) if is_ordered else ()
        axes.append(Axis(len(ordered) + 1, positions))
    monotone = tuple(number for number, name in enumerate(distributions) if name in _MONOTONE)
    levels = np.array(columns, dtype=np.int64).T.reshape(len(points), len(axes))
    if expected is None:
        flat = Prediction(None, np.full(len(points), log(UNKNOWN_NEED)))
        return Guided(levels, tuple(axes), flat, Limits(0.0), memory=_UNPREDICTED_MEMORY, monotone=monotone)
    prediction = Prediction(
        np.log([max(each.tokens_per_second, 1e-9) for each in expected]),
        np.log([max(each.share_of_limit, 1e-9) for each in expected]),
    )
    return Guided(levels, tuple(axes), prediction, Limits(0.0), monotone=monotone)
