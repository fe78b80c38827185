"""A trial that loses too much against the baseline teaches the samplers, and is nothing to improve on."""

from pathlib import Path

import optuna
import pytest
from fakes import ok, oom
from spaces import SPEED, Session, search, space_of

from orchestrator.backends.guided_sampler import GuidedSampler
from orchestrator.backends.optuna_study import STUDY_FILE, OptunaStrategy
from orchestrator.contract.outcome import Ok, Outcome
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import Sampler

KNOBS = {
    "method": ("lora",),
    "lora_rank": (2, 4, 8, 16, 32, 64, 128, 256),
    "gradient_checkpointing": ("none", "full"),
    "zero_stage": (0, 1, 2),
    "micro_batch": (1, 2, 4, 8, 16),
}
BASELINE = {"method": "lora", "lora_rank": 64, "micro_batch": 1, "zero_stage": 2}
WITHIN = 0.02


class LossSession(Session):
    """A session whose spec bounds the loss."""

    def open(self) -> OptunaStrategy:
        self.strategy = OptunaStrategy(
            self._space, self._section, SPEED, self._folder, self.records, loss_within=WITHIN
        )
        return self.strategy


def small_is_fast_and_bad(candidate: Candidate) -> Ok:
    """Every halving of the rank gives 20 % more speed; below rank 32 it costs more than 2 % of the loss."""
    knobs = candidate.config.knobs
    assert knobs.lora_rank is not None
    halvings = 8 - (knobs.lora_rank.bit_length() - 1)
    loss = 4.0 if knobs.lora_rank >= 32 else 4.0 * (1.02 + 0.02 * halvings)
    outcome = ok(tokens_per_second=100.0 * 1.2**halvings * knobs.micro_batch**0.1 / (1 + 0.1 * knobs.zero_stage))
    return Ok(measurement=outcome.measurement.model_copy(update={"eval_loss": loss}))


def study_of(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / STUDY_FILE}")


@pytest.mark.parametrize("sampler", list(Sampler))
def test_the_loss_is_told_as_a_second_constraint(tmp_path: Path, sampler: Sampler) -> None:
    section = search(KNOBS, sampler, baseline=BASELINE)
    session = LossSession(space_of(section), section, tmp_path)
    ends: list[Outcome] = []

    def end(candidate: Candidate) -> Outcome:
        ends.append(oom() if len(ends) == 2 else small_is_fast_and_bad(candidate))
        return ends[-1]

    session.run(6, end)
    session.strategy.close()
    told = [trial.constraints for trial in study_of(tmp_path).trials]
    for constraints, outcome in zip(told, ends, strict=True):
        assert "memory" in constraints
        if isinstance(outcome, Ok):
            assert outcome.measurement.eval_loss is not None
            assert constraints["eval_loss"] == pytest.approx(outcome.measurement.eval_loss / 4.08 - 1)
        else:
            # Optuna's GP wants every constraint of every trial
            assert constraints.get("eval_loss") == (0.0 if sampler is Sampler.GP else None)


@pytest.mark.parametrize("first", [oom(), ok()], ids=["out of memory", "without a loss"])
@pytest.mark.parametrize("sampler", [Sampler.GP, Sampler.TPE])
def test_without_the_baseline_s_loss_nothing_is_held_against_a_trial(
    tmp_path: Path, sampler: Sampler, first: Outcome
) -> None:
    section = search(KNOBS, sampler, baseline=BASELINE)
    session = LossSession(space_of(section), section, tmp_path)
    session.run(4, lambda candidate: first if len(session.records) == 1 else small_is_fast_and_bad(candidate))
    session.strategy.close()
    told = [trial.constraints.get("eval_loss") for trial in study_of(tmp_path).trials]
    assert told == [0.0 if sampler is Sampler.GP else None] * 4


def test_a_baseline_outside_of_the_choices_is_still_compared_with(tmp_path: Path) -> None:
    section = search(KNOBS, Sampler.RANDOM, baseline={**BASELINE, "micro_batch": 64})
    session = LossSession(space_of(section), section, tmp_path)
    session.run(3, small_is_fast_and_bad)
    session.strategy.close()
    assert all(trial.constraints["eval_loss"] != 0.0 for trial in study_of(tmp_path).trials[1:])


def test_a_resumed_session_knows_the_baseline_s_loss(tmp_path: Path) -> None:
    section = search(KNOBS, Sampler.RANDOM, baseline=BASELINE)
    session = LossSession(space_of(section), section, tmp_path)
    session.run(2, small_is_fast_and_bad)
    session.strategy.close()
    session.open()
    session.run(3, small_is_fast_and_bad)
    session.strategy.close()
    assert study_of(tmp_path).trials[2].constraints["eval_loss"] != 0.0


def small_ranks_are_fast(candidate: Candidate) -> Ok:
    """Smaller ranks are faster; half of all ranks, those below 128, lose too much."""
    knobs = candidate.config.knobs
    assert knobs.lora_rank is not None
    loss = 4.0 if knobs.lora_rank >= 128 else 4.0 * (1.02 + 0.001 * (128 - knobs.lora_rank))
    outcome = ok(tokens_per_second=100.0 * (256 / knobs.lora_rank) ** 0.5 * knobs.micro_batch**0.1)
    return Ok(measurement=outcome.measurement.model_copy(update={"eval_loss": loss}))


def test_tpe_leaves_what_loses_too_much(tmp_path: Path) -> None:
    """The share of lossy ranks among its later trials against that of the same sampler without the bound."""
    micro_batches = tuple(each for each in range(1, 65) if 55440 % each == 0)
    knobs = {"method": ("lora",), "lora_rank": tuple(range(8, 257, 8)), "micro_batch": micro_batches}
    baseline = {"method": "lora", "lora_rank": 256, "micro_batch": 1}
    late = {True: 0, False: 0}
    for bounded in late:
        for seed in range(3):
            folder = tmp_path / f"{bounded}{seed}"
            folder.mkdir()
            section = search(knobs, Sampler.TPE, baseline=baseline, seed=seed)
            kind = LossSession if bounded else Session
            records = kind(space_of(section, global_batch=55440), section, folder).run(45, small_ranks_are_fast)
            late[bounded] += sum((record.config.knobs.lora_rank or 0) < 128 for record in records[30:])
    assert late[True] < 0.6 * late[False]


def test_guided_improves_on_the_best_that_may_win(tmp_path: Path) -> None:
    """The best of 30 trials that may win is among the fastest twentieth of those, though most of the fastest lose."""
    section = search(KNOBS, Sampler.GUIDED, baseline=BASELINE)
    space = space_of(section)
    session = LossSession(space, section, tmp_path)
    assert isinstance(session.strategy._guided, GuidedSampler)
    records = session.run(30, small_is_fast_and_bad)

    def speed(candidate: Candidate) -> float:
        return small_is_fast_and_bad(candidate).measurement.tokens_per_second

    allowed = sorted(speed(each) for each in space.candidates if (each.config.knobs.lora_rank or 0) >= 32)
    best = max(
        record.measurement.tokens_per_second
        for record in records
        if record.measurement and (record.config.knobs.lora_rank or 0) >= 32
    )
    assert best >= allowed[-len(allowed) // 20]
