"""The guided sampler inside a sweep's strategy and inside a study of one's own."""

import math
from pathlib import Path

import optuna
from fakes import ok
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState
from spaces import MEDIUM, SMALL, SPEED, SPEED_AND_MEMORY, Session, device, search, space_of

from orchestrator.backends.guided_sampler import GuidedSampler
from orchestrator.backends.optuna_study import OptunaStrategy
from orchestrator.contract.outcome import Ok, Outcome
from orchestrator.search.guided import Expected
from orchestrator.space.candidates import Candidate, Space
from orchestrator.spec.sweep import Objective, ResourcesSection, Sampler

LAUNCHES = 8


def rough_forecast(space: Space) -> dict[str, Expected]:
    """What a prediction would say of `spaces.device`: the right shape, wrong by a constant, blind to offload."""
    found = {}
    for candidate in space.candidates:
        knobs = candidate.config.knobs
        assert knobs.lora_rank is not None
        found[candidate.id] = Expected(
            tokens_per_second=250.0 * knobs.micro_batch**0.5 / (1 + 0.1 * knobs.zero_stage),
            share_of_limit=0.8 * knobs.micro_batch * knobs.lora_rank / 512,
        )
    return found


def best_speed(session: Session) -> float:
    ended = [record.outcome for record in session.records]
    return max(each.measurement.tokens_per_second for each in ended if isinstance(each, Ok))


def test_with_predictions_few_launches_find_the_best_and_few_run_out(tmp_path: Path) -> None:
    section = search(MEDIUM, Sampler.GUIDED)
    space = space_of(section)
    truth = [device(candidate) for candidate in space.candidates]
    best = max(each.measurement.tokens_per_second for each in truth if isinstance(each, Ok))
    session = Session(space, section, tmp_path)
    session.strategy.close()
    session.strategy = OptunaStrategy(space, section, SPEED, tmp_path, (), rough_forecast(space))
    session.run(LAUNCHES, device)
    assert best_speed(session) == best
    assert sum(not isinstance(record.outcome, Ok) for record in session.records) <= 2


def test_the_expected_gain_is_known_once_a_trial_has_succeeded_and_shrinks(tmp_path: Path) -> None:
    section = search(MEDIUM, Sampler.GUIDED)
    session = Session(space_of(section), section, tmp_path)
    gains = []
    while session.run(len(session.records) + 1, device) and len(session.records) < 30:
        gains.append(session.strategy.expected_gain())
    assert gains[0] is None
    known = [gain for gain in gains if gain is not None]
    assert len(known) >= len(gains) - 2
    assert all(gain >= 0 for gain in known)
    assert sum(known[-3:]) < sum(known[:3])


def test_it_says_when_nothing_is_predicted(tmp_path: Path) -> None:
    section, said = search(SMALL, Sampler.GUIDED), list[str]()
    OptunaStrategy(space_of(section), section, SPEED, tmp_path, say=said.append).close()
    assert said == ["No speed is predicted: guided learns from the trials alone."]


def test_it_says_that_tpe_takes_its_place(tmp_path: Path) -> None:
    section, said = search(SMALL, Sampler.GUIDED), list[str]()
    space = space_of(section)
    strategy = OptunaStrategy(space, section, SPEED_AND_MEMORY, tmp_path, say=said.append)
    strategy.close()
    assert said == ["guided searches for tokens_per_second alone: for these objectives tpe takes its place."]


def test_it_searches_for_the_speed_of_one_device_over_trials_of_several_sizes(tmp_path: Path) -> None:
    """Four devices are faster together, and each of them at three quarters: one device is the best that can be had."""
    section = search({"method": ("lora",), "lora_rank": (8,), "micro_batch": (1, 2, 4, 8)}, Sampler.GUIDED)
    space = space_of(section, resources=ResourcesSection(devices_per_trial=(1, 2, 4)))

    def speed(candidate: Candidate) -> float:
        config = candidate.config
        return config.world_size ** (1 + math.log(0.75, 4)) * 100 * config.knobs.micro_batch**0.5

    def measure(candidate: Candidate) -> Outcome:
        return ok(tokens_per_second=speed(candidate))

    expected = {each.id: Expected(speed(each) / each.config.world_size, 0.5) for each in space.candidates}
    per_device = (Objective(metric="tokens_per_second_per_device"),)
    session = Session(space, section, tmp_path, per_device)
    session.strategy.close()
    session.strategy = OptunaStrategy(space, section, per_device, tmp_path, (), expected)
    session.run(3, measure)
    asked = [record.config for record in session.records]
    assert (asked[0].world_size, asked[0].knobs.micro_batch) == (1, 8)
    session = Session(space, section, tmp_path / "whole")
    session.strategy.close()
    whole = {each.id: Expected(speed(each), 0.5) for each in space.candidates}
    session.strategy = OptunaStrategy(space, section, SPEED, tmp_path / "whole", (), whole)
    session.run(1, measure)
    assert session.records[0].config.world_size == 4


def test_a_prediction_that_the_trials_contradict_is_dropped_and_it_says_so_once(tmp_path: Path) -> None:
    section, said = search(MEDIUM, Sampler.GUIDED), list[str]()
    space = space_of(section)
    upside_down = {
        name: Expected(1e5 / each.tokens_per_second, each.share_of_limit)
        for name, each in rough_forecast(space).items()
    }
    session = Session(space, section, tmp_path)
    session.strategy.close()
    session.strategy = OptunaStrategy(space, section, SPEED, tmp_path, (), upside_down, say=said.append)
    session.run(12, device)
    assert said == ["The trials do not follow the predicted speeds: guided goes on without them."]


def test_what_ended_without_a_word_teaches_nothing_and_is_not_proposed_again(tmp_path: Path) -> None:
    distributions = {"micro_batch": CategoricalDistribution((1, 2, 4, 8))}
    points = [{"micro_batch": n} for n in (1, 2, 4, 8)]
    expected = [Expected(tokens_per_second=100.0 * n, share_of_limit=0.1 * n) for n in (1, 2, 4, 8)]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(distributions, points, expected))
    for state in (TrialState.FAIL, TrialState.FAIL):
        trial = study.ask()
        trial.suggest_categorical("micro_batch", (1, 2, 4, 8))
        study.tell(trial, state=state)
    third = study.ask().suggest_categorical("micro_batch", (1, 2, 4, 8))
    assert [trial.params["micro_batch"] for trial in study.trials] == [8, 4, 2]
    assert third == 2


def test_a_run_over_its_limit_is_a_measured_need(tmp_path: Path) -> None:
    """It teaches memory as a success does, and is nothing to improve on."""
    distributions = {"micro_batch": CategoricalDistribution((1, 2, 4, 8))}
    points = [{"micro_batch": n} for n in (1, 2, 4, 8)]
    expected = [Expected(tokens_per_second=100.0 * n, share_of_limit=0.1 * n) for n in (1, 2, 4, 8)]
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(distributions, points, expected))
    trial = study.ask()
    assert trial.suggest_categorical("micro_batch", (1, 2, 4, 8)) == 8
    trial.set_constraint("memory", 1.4)  # predicted 0.8 of the limit, measured 2.4: three times
    study.tell(trial, 800.0)
    sampler = study.sampler
    assert isinstance(sampler, GuidedSampler)
    study.ask().suggest_categorical("micro_batch", (1, 2, 4, 8))
    assert study.trials[1].params["micro_batch"] in (1, 2), "four would need 1.2 of the limit"
    assert sampler.suggestion is not None
    assert sampler.suggestion.expected_gain is None, "nothing has won yet"


def test_samplers_that_believe_nothing_know_no_gain(tmp_path: Path) -> None:
    section = search(MEDIUM, Sampler.RANDOM)
    session = Session(space_of(section), section, tmp_path)
    session.run(3, device)
    assert session.strategy.expected_gain() is None


def test_without_predictions_it_learns_from_the_trials(tmp_path: Path) -> None:
    section = search(MEDIUM, Sampler.GUIDED)
    guided, chance = (tmp_path / name for name in ("guided", "chance"))
    guided.mkdir()
    chance.mkdir()
    learning = Session(space_of(section), section, guided)
    learning.run(16, device)
    random_section = search(MEDIUM, Sampler.RANDOM)
    drawing = Session(space_of(random_section), random_section, chance)
    drawing.run(16, device)
    assert best_speed(learning) >= best_speed(drawing)
    ran_out = [sum(not isinstance(record.outcome, Ok) for record in each.records) for each in (learning, drawing)]
    assert ran_out[0] <= ran_out[1]


def test_a_study_of_ones_own_over_conditional_points(tmp_path: Path) -> None:
    distributions = {
        "method": CategoricalDistribution(("full", "lora")),
        "rank": CategoricalDistribution((4, 16)),
        "micro_batch": CategoricalDistribution((1, 2, 4)),
    }
    points = [{"method": "full", "micro_batch": size} for size in (1, 2, 4)]
    points += [{"method": "lora", "rank": rank, "micro_batch": size} for rank in (4, 16) for size in (1, 2, 4)]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=GuidedSampler(distributions, points))
    seen = []
    for _ in points:
        trial = study.ask()
        point = {"method": trial.suggest_categorical("method", ("full", "lora"))}
        if point["method"] == "lora":
            point["rank"] = trial.suggest_categorical("rank", (4, 16))
        point["micro_batch"] = trial.suggest_categorical("micro_batch", (1, 2, 4))
        seen.append(point)
        if point["method"] == "full" and point["micro_batch"] == 4:
            trial.set_constraint("memory", 0.2)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, 100.0 * point["micro_batch"])
    assert len(seen) == len(points)
    assert all(point in seen for point in points)
