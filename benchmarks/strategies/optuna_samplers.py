"""Optuna's own samplers on a landscape, TPE and Gaussian processes: an OOM is FAIL, or a broken constraint."""

import warnings
from math import log
from typing import Any, Literal

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Result

_OVER = 0.15
"""By which share of the limit a run that ran out is taken to break the constraint."""


class OptunaStrategy:
    """Suggests knob by knob, in the table's order; a choice that the table does not have beside the ones before is
    taken as the nearest that it has.

    OOM as `fail`: state FAIL, which samplers ignore. As `constraint`: a trial that breaks it, PRUNED, or COMPLETE with
    the worst value so far for a sampler that reads no others (`needs_value`)."""

    first_launches = 0

    def __init__(
        self,
        landscape: Landscape,
        sampler: BaseSampler,
        oom_as: Literal["fail", "constraint"],
        needs_value: bool = False,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._limit_gib = landscape.limits["peak_gib"]
        self._oom_as, self._needs_value = oom_as, needs_value
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._choices = {name: _sorted({each[name] for each in landscape.candidates}) for name in landscape.knobs}
        self._index = {tuple(each.values()): number for number, each in enumerate(landscape.candidates)}
        self._have: dict[tuple[Any, ...], set[Any]] = {}
        for values in self._index:
            for depth, value in enumerate(values):
                self._have.setdefault(values[:depth], set()).add(value)
        self._open: dict[int, list[optuna.Trial]] = {}
        self._worst: float | None = None

    def ask(self) -> int | None:
        """See Strategy."""
        trial = self._study.ask()
        chosen: tuple[Any, ...] = ()
        for name, choices in self._choices.items():
            have = self._have[chosen]
            # a knob without a choice beside the ones before is not suggested
            place = choices.index(next(iter(have))) if len(have) == 1 else self._suggested(trial, name, choices)
            chosen += (min(have, key=lambda value: abs(choices.index(value) - place)),)
        candidate = self._index[chosen]
        self._open.setdefault(candidate, []).append(trial)
        return candidate

    def tell(self, candidate: int, result: Result) -> None:
        """See Strategy."""
        trial = self._open[candidate].pop()
        if result.is_ok:
            value = log(result.tokens_per_s)
            self._worst = value if self._worst is None else min(self._worst, value)
            if self._oom_as == "constraint":
                trial.set_constraint("memory", result.peak_gib / self._limit_gib - 1)
            self._study.tell(trial, value)
        elif self._oom_as == "fail":
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_constraint("memory", _OVER)
            if self._needs_value:
                self._study.tell(trial, self._worst or 0.0)
            else:
                self._study.tell(trial, state=TrialState.PRUNED)

    def _suggested(self, trial: optuna.Trial, name: str, choices: list[Any]) -> int:
        if all(isinstance(choice, int) for choice in choices):
            return trial.suggest_int(name, 0, len(choices) - 1)
        return choices.index(trial.suggest_categorical(name, choices))


def _sorted(values: set[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        return TPESampler(seed=seed, multivariate=True, group=True)


def tpe_fail(landscape: Landscape, seed: int) -> OptunaStrategy:
    """TPE, as a sweep with failed trials is usually written."""
    return OptunaStrategy(landscape, _tpe(seed), "fail")


def tpe_constraint(landscape: Landscape, seed: int) -> OptunaStrategy:
    """TPE that is told of memory."""
    return OptunaStrategy(landscape, _tpe(seed), "constraint")


def gp_constraint(landscape: Landscape, seed: int) -> OptunaStrategy:
    """GPSampler that is told of memory."""
    from optuna.samplers import GPSampler  # brings torch in

    sampler = GPSampler(seed=seed, warn_independent_sampling=False)
    return OptunaStrategy(landscape, sampler, "constraint", needs_value=True)
