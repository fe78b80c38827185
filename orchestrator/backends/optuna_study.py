"""The search held by Optuna: Brimful's `guided`, Optuna's `tpe` and `gp`, and `random` and `grid` over the candidates.

Sampling happens on a study in memory, made from the trials' records at the start of each session: so the choices of
a resumed sweep are those of an uninterrupted one, and a study file that is lost, damaged or of another space does no
harm. `optuna_store` mirrors the study into SQLite.

An out-of-memory is told as a finished trial that breaks the constraint `memory`, because samplers learn nothing from
a FAILed one. TPE takes it as PRUNED. GPSampler reads only COMPLETE trials, so for `gp` it carries a finite stand-in
value, which never leaves the study. Where the spec bounds the eval loss, that is a second constraint, `eval_loss`.
"""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import assert_never

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from orchestrator.backends.guided_sampler import GuidedSampler
from orchestrator.backends.optuna_store import CANDIDATE, STUDY_FILE, StudyFile, running_trial
from orchestrator.backends.optuna_verdict import LOSS_CONSTRAINT, MEMORY_CONSTRAINT, OUTCOME, Verdict, verdict
from orchestrator.contract.outcome import Ok, Outcome, OverLimit
from orchestrator.contract.record import TrialRecord
from orchestrator.search.guided import Expected, Suggestion
from orchestrator.search.ranking import is_guided, objective_values
from orchestrator.space.candidates import Candidate, Illegal, Space
from orchestrator.space.dimensions import Choice
from orchestrator.spec.sweep import Objective, Sampler, SearchSection
from orchestrator.sweep.state import is_final

STAND_IN = "stand_in_value"
"""Marks a trial of the study whose value is not a measurement."""
RE_ASKS = {Sampler.GUIDED: 0, Sampler.TPE: 10, Sampler.GP: 1, Sampler.RANDOM: 0, Sampler.GRID: 0}
"""How often a sampler may propose what is known or illegal before a new candidate is drawn at random. A Gaussian
process costs about a second for each."""


class OptunaStrategy:
    """A Strategy that asks an Optuna sampler; the baseline comes first, and no candidate comes twice.

    `folder` is the sweep's folder, `records` its trials so far: those that are not final count as running. Equal seeds
    and histories give equal candidates. `expected` is what `guided` knows beforehand, by candidate, its speed in the
    objective's terms; None: nothing.
    `loss_within`: by which fraction of the baseline's eval loss a trial may be above it to win; None: by any.
    `say` hears in a line when `guided` cannot do what it is there for.
    """

    def __init__(
        self,
        space: Space,
        search: SearchSection | None,
        objectives: Sequence[Objective],
        folder: Path,
        records: Sequence[TrialRecord] = (),
        expected: Mapping[str, Expected] | None = None,
        loss_within: float | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        search = search or SearchSection()
        self._space = space
        self._sampler = search.sampler
        self._seed = search.seed
        self._objectives = tuple(objectives)
        self._loss_within = loss_within
        self._say = say
        self._is_led = expected is not None
        self._baseline_loss: float | None = None
        self._distributions = {name: CategoricalDistribution(choices) for name, choices in space.choices.items()}
        self._guided = self._guided_sampler(expected) if self._sampler is Sampler.GUIDED else None
        self._known = set(space.left_out)
        self._gain: float | None = None
        self._running: dict[str, int] = {}
        self._storage = InMemoryStorage()
        directions = [objective.goal for objective in self._objectives]
        self._study = optuna.create_study(storage=self._storage, directions=directions)
        for record in records:
            self._replay(record)
        self._file = StudyFile(folder / STUDY_FILE, self._study, say)

    def ask(self) -> Candidate | None:
        """The next candidate, None when all of the space's candidates were tried."""
        self._gain = None
        candidate = self._choose()
        if candidate is not None:
            self._file.begin(self._begin(candidate))
        return candidate

    def expected_gain(self) -> float | None:
        """Of the candidate asked last, as the port says; known to `guided` alone, once a trial has succeeded."""
        return self._gain

    def tell(self, candidate: Candidate, outcome: Outcome, values: tuple[float, ...] | None) -> None:
        """Store the outcome with the running trial of `candidate`; without one it has no effect."""
        if candidate.id in self._running:
            self._file.end(self._end(candidate, outcome, values))

    def close(self) -> None:
        """Release the study's file."""
        self._file.close()

    def _choose(self) -> Candidate | None:
        unseen = [candidate for candidate in self._space.candidates if candidate.id not in self._known]
        if not unseen:
            return None
        if unseen[0].is_baseline:
            return unseen[0]
        dice = random.Random(f"{self._seed}:{len(self._known)}")
        match self._sampler:
            case Sampler.GRID:
                return unseen[0]
            case Sampler.RANDOM:
                return dice.choice(unseen)
            case Sampler.GUIDED | Sampler.TPE | Sampler.GP:
                return self._sampled(dice) or dice.choice(unseen)
            case _:
                assert_never(self._sampler)

    def _sampled(self, dice: random.Random) -> Candidate | None:
        """A new candidate from the sampler, None when it proposes nothing new."""
        for _ in range(1 + RE_ASKS[self._sampler]):
            self._study.sampler = self._guided or _sampler(self._sampler, dice.randrange(2**32))
            trial = self._study.ask()
            resolved = self._space.resolve(self._suggest(trial))
            # What is launched is added as a trial of its own: the proposal itself must not count as running.
            self._study.tell(trial, state=TrialState.FAIL)
            if not isinstance(resolved, Illegal) and resolved.id not in self._known:
                if self._guided and self._guided.suggestion:
                    self._hear(self._guided.suggestion)
                return resolved
        return None

    def _hear(self, suggestion: Suggestion) -> None:
        self._gain = suggestion.expected_gain
        if self._is_led and not suggestion.is_led:
            self._say("The trials do not follow the predicted speeds: guided goes on without them.")
        self._is_led = suggestion.is_led

    def _guided_sampler(self, expected: Mapping[str, Expected] | None) -> GuidedSampler | None:
        """None for objectives that it does not know; then TPE takes its place."""
        if not is_guided(self._objectives):
            self._say("guided searches for tokens_per_second alone: for these objectives tpe takes its place.")
            return None
        if expected is None:
            self._say("No speed is predicted: guided learns from the trials alone.")
        points = {each.id: self._space.choices_of(each) for each in self._space.candidates}
        known = {name: point for name, point in points.items() if point is not None}
        predictions = None if expected is None else [expected[name] for name in known]
        return GuidedSampler(self._distributions, tuple(known.values()), predictions)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Choice]:
        chosen: dict[str, Choice] = {}
        for name, distribution in self._distributions.items():
            if self._space.is_active(name, chosen):
                choice = trial.suggest_categorical(name, distribution.choices)
                assert choice is not None, "no knob has None among its choices"
                chosen[name] = choice
        return chosen

    def _begin(self, candidate: Candidate) -> FrozenTrial:
        chosen = self._space.choices_of(candidate) or {}
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(chosen),
            distributions={name: self._distributions[name] for name in chosen},
            user_attrs={CANDIDATE: candidate.id},
        )
        self._running[candidate.id] = len(self._study.get_trials(deepcopy=False))
        self._known.add(candidate.id)
        self._study.add_trial(trial)
        return trial

    def _end(self, candidate: Candidate, outcome: Outcome, values: tuple[float, ...] | None) -> FrozenTrial:
        number = self._running.pop(candidate.id)
        judged = self._judge(candidate, outcome, values)
        if candidate.is_baseline:
            self._baseline_loss = _eval_loss(outcome)
        trial = running_trial(self._study, self._storage, number)
        trial.set_user_attr(OUTCOME, outcome.kind)
        if judged.is_stand_in:
            trial.set_user_attr(STAND_IN, True)
        if judged.constraint is not None:
            trial.set_constraint(MEMORY_CONSTRAINT, judged.constraint)
            overshoot = self._loss_overshoot(outcome)
            if overshoot is None and self._loss_within is not None and self._sampler is Sampler.GP:
                overshoot = 0.0  # it wants every constraint of every trial
            if overshoot is not None:
                trial.set_constraint(LOSS_CONSTRAINT, overshoot)
        return self._study.tell(number, judged.values, state=judged.state)

    def _loss_overshoot(self, outcome: Outcome) -> float | None:
        """How far the eval loss is above the greatest allowed, as a fraction of that; None where nothing is known."""
        loss = _eval_loss(outcome)
        if loss is None or self._baseline_loss is None or self._loss_within is None:
            return None
        return loss / (self._baseline_loss * (1 + self._loss_within)) - 1

    def _replay(self, record: TrialRecord) -> None:
        candidate = Candidate(record.candidate, record.label, record.config, record.is_baseline)
        self._begin(candidate)
        if is_final(record) and record.outcome is not None:
            self._end(candidate, record.outcome, objective_values(self._objectives, record))

    def _judge(self, candidate: Candidate, outcome: Outcome, values: tuple[float, ...] | None) -> Verdict:
        """The lesson for this sampler. What lies outside of the choices, as a baseline may, teaches nothing."""
        if self._space.choices_of(candidate) is None:
            return Verdict(TrialState.FAIL)
        judged = verdict(outcome, candidate.config.limits, values)
        if judged.state is TrialState.PRUNED and self._sampler is Sampler.GP:
            return Verdict(TrialState.COMPLETE, self._worst_values(), judged.constraint, is_stand_in=True)
        return judged

    def _worst_values(self) -> tuple[float, ...]:
        """For each objective the worst measured value so far, 0 before the first."""
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        measured = [trial.values for trial in finished if STAND_IN not in trial.user_attrs]
        if not measured:
            return (0.0,) * len(self._objectives)
        worst = (min if objective.goal == "maximize" else max for objective in self._objectives)
        return tuple(pick(column) for pick, column in zip(worst, zip(*measured, strict=True), strict=True))


def _eval_loss(outcome: Outcome) -> float | None:
    return outcome.measurement.eval_loss if isinstance(outcome, Ok | OverLimit) else None


def _sampler(sampler: Sampler, seed: int) -> BaseSampler:
    """A sampler without a past: all that it knows is the study, so equal studies and seeds give equal proposals."""
    if sampler is Sampler.GP:
        from optuna.samplers import GPSampler  # brings torch in

        return GPSampler(seed=seed, warn_independent_sampling=False)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        return TPESampler(seed=seed, multivariate=True, group=True)
