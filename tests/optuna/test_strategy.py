"""Every sampler keeps the Strategy port's promises, and an out-of-memory teaches those that learn."""

import sqlite3
from collections import Counter
from pathlib import Path

import optuna
import pytest
from fakes import candidate as outside_candidate
from fakes import ok, oom, over_limit
from spaces import MEDIUM, SMALL, SPEED, SPEED_AND_MEMORY, Session, device, fits, record_of, search, space_of

from orchestrator.backends.optuna_store import CANDIDATE, STUDY_FILE
from orchestrator.backends.optuna_study import OptunaStrategy
from orchestrator.contract.outcome import Cancelled, Crashed, OomHost, Outcome, Phase
from orchestrator.space.candidates import Candidate
from orchestrator.spec.sweep import Sampler

ALL = list(Sampler)


@pytest.mark.parametrize(("sampler", "budget"), [*((sampler, 40) for sampler in ALL), (Sampler.TPE, 7)])
def test_a_small_space_gives_distinct_trials_and_then_none(tmp_path: Path, sampler: Sampler, budget: int) -> None:
    """field-cases G4."""
    section = search(SMALL, sampler)
    space = space_of(section)
    session = Session(space, section, tmp_path)
    records = session.run(budget, fits)
    assert len(records) == min(budget, 12)
    assert len({record.candidate for record in records}) == len(records)
    assert {record.candidate for record in records} <= {each.id for each in space.candidates}
    if budget > 12:
        assert session.strategy.ask() is None


@pytest.mark.parametrize("sampler", ALL)
def test_what_runs_is_not_asked_again_and_the_baseline_is_first(tmp_path: Path, sampler: Sampler) -> None:
    baseline = {"zero_stage": 2, "gradient_checkpointing": "full", "micro_batch": 2}
    section = search(SMALL, sampler, baseline=baseline)
    session = Session(space_of(section), section, tmp_path)
    started = [session.start() for _ in range(12)]
    assert started[0] is not None
    assert started[0].is_baseline
    assert started[0].config.knobs.zero_stage == 2
    assert len({record.candidate for record in started if record}) == 12
    assert session.start() is None


@pytest.mark.parametrize("sampler", ALL)
def test_a_baseline_outside_of_the_choices_is_no_harm(tmp_path: Path, sampler: Sampler) -> None:
    section = search(SMALL, sampler, baseline={"micro_batch": 64})
    session = Session(space_of(section), section, tmp_path)
    records = session.run(20, fits)
    assert records[0].is_baseline
    assert records[0].config.knobs.micro_batch == 64
    assert len(records) == 13


@pytest.mark.parametrize("sampler", ALL)
def test_two_objectives_with_every_kind_of_end(tmp_path: Path, sampler: Sampler) -> None:
    section = search(SMALL, sampler)
    session = Session(space_of(section), section, tmp_path, SPEED_AND_MEMORY)
    crash = Crashed(phase=Phase.INIT, rank=0, error="ValueError: no")
    host = OomHost(phase=Phase.INIT, evidence="cgroup oom_kill rose by 1")
    ends: list[Outcome] = [oom(), crash, over_limit(), host, ok(), Cancelled()] * 2
    session.run(12, lambda candidate: ends.pop())
    assert session.strategy.ask() is None


@pytest.mark.parametrize("sampler", ALL)
def test_a_stopped_and_resumed_sweep_chooses_like_an_uninterrupted_one(tmp_path: Path, sampler: Sampler) -> None:
    """reliability J5; the running trial of the stop is repeated and told in the second session."""
    section = search(MEDIUM, sampler, seed=3)
    space = space_of(section)
    trials = 12 if sampler is Sampler.GP else 16
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    straight = Session(space, section, tmp_path / "one").run(trials, device)

    broken = Session(space, section, tmp_path / "two")
    broken.run(trials // 2, device)
    running = broken.start()
    assert running is not None
    broken.strategy.close()
    broken.open()
    broken.finish(running.trial, device(Candidate(running.candidate, running.label, running.config)))
    resumed = broken.run(trials, device)
    assert [record.candidate for record in resumed] == [record.candidate for record in straight]


def test_grid_follows_the_order_of_the_space(tmp_path: Path) -> None:
    section = search(SMALL, Sampler.GRID)
    space = space_of(section)
    records = Session(space, section, tmp_path).run(20, fits)
    assert [record.candidate for record in records] == [candidate.id for candidate in space.candidates]


def test_out_of_memory_teaches_tpe(tmp_path: Path) -> None:
    """field-cases G1: 78 % of this space is out of memory; the share among TPE's trials falls, no point comes twice,
    and the winner is among the fastest of the candidates that fit."""
    micro_batches = tuple(each for each in range(1, 65) if 55440 % each == 0)
    knobs = {"method": ("lora",), "lora_rank": tuple(range(8, 257, 8)), "micro_batch": micro_batches}
    early, late, best = 0, 0, 0.0
    for seed in range(2):
        section = search(knobs, Sampler.TPE, seed=seed)
        space = space_of(section, global_batch=55440)
        (tmp_path / str(seed)).mkdir()
        records = Session(space, section, tmp_path / str(seed)).run(45, device)
        kinds = [record.outcome.kind for record in records if record.outcome]
        early += Counter(kinds[:15])["oom_device"]
        late += Counter(kinds[30:])["oom_device"]
        assert len({record.candidate for record in records}) == 45
        best = max(best, *(record.measurement.tokens_per_second for record in records if record.measurement))
    fitting = [end.measurement.tokens_per_second for end in map(device, space.candidates) if end.kind == "ok"]
    assert late < 0.75 * early
    assert sum(speed > best for speed in fitting) <= 0.05 * len(fitting)


def test_the_study_file_tells_what_happened(tmp_path: Path) -> None:
    section = search(SMALL, Sampler.TPE)
    session = Session(space_of(section), section, tmp_path)
    ends: list[Outcome] = [ok(peak_memory_bytes=600), over_limit(), oom(needed_bytes=1500)]
    session.run(3, lambda candidate: ends[len(session.records) - 1])
    session.start()
    session.strategy.close()

    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / STUDY_FILE}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED", "WAITING"]
    assert [trial.user_attrs[CANDIDATE] for trial in study.trials] == [record.candidate for record in session.records]
    fits_by, over_by, out_by = (trial.constraints["memory"] for trial in study.trials[:3])
    assert fits_by == pytest.approx(0.0)
    assert over_by > 0
    assert out_by == pytest.approx(0.5)
    assert study.best_trial.number == 0


def test_stand_in_values_of_gp_are_marked_and_finite(tmp_path: Path) -> None:
    section = search(SMALL, Sampler.GP)
    session = Session(space_of(section), section, tmp_path)
    ends: list[Outcome] = [oom(), ok(tokens_per_second=50.0), ok(tokens_per_second=80.0), oom()]
    session.run(4, lambda candidate: ends[len(session.records) - 1])
    session.strategy.close()
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / STUDY_FILE}")
    assert [trial.values for trial in study.trials] == [[0.0], [50.0], [80.0], [50.0]]
    assert [trial.user_attrs.get("stand_in_value", False) for trial in study.trials] == [True, False, False, True]
    assert study.best_value == 80.0


@pytest.mark.parametrize("damage", ["lost", "torn", "flipped", "not a database", "another study"])
def test_a_lost_or_damaged_study_is_made_again_from_the_trials(tmp_path: Path, damage: str) -> None:
    """reliability E4."""
    section = search(SMALL, Sampler.TPE)
    space = space_of(section)
    session = Session(space, section, tmp_path)
    session.run(3, fits)
    session.strategy.close()
    file = tmp_path / STUDY_FILE
    content = file.read_bytes()
    match damage:
        case "lost":
            file.unlink()
        case "torn":
            file.write_bytes(content[: len(content) // 2])
        case "flipped":
            page = 4096 * 2
            file.write_bytes(
                content[:page] + bytes(255 - byte for byte in content[page : page + 4096]) + content[page + 4096 :]
            )
        case "not a database":
            file.write_text("hello")
        case _:
            file.unlink()
            sqlite3.connect(file).execute("create table alembic_version (version_num text)").connection.close()
    session.open()
    session.run(5, fits)
    session.strategy.close()
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{file}")
    assert [trial.user_attrs[CANDIDATE] for trial in study.trials] == [record.candidate for record in session.records]
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert len(session.records) == 5


@pytest.mark.parametrize("sampler", [Sampler.TPE, Sampler.GRID])
def test_changed_choices_on_resume_keep_what_was_learned(tmp_path: Path, sampler: Sampler) -> None:
    """field-cases G3: a choice more, and one less, than the study on disk knows."""
    before = search(SMALL, sampler)
    first = Session(space_of(before), before, tmp_path)
    first.run(5, fits)
    first.strategy.close()

    after = search({**SMALL, "zero_stage": (0, 1, 2, 3), "micro_batch": (1, 4)}, sampler)
    space = space_of(after)
    second = Session(space, after, tmp_path)
    second.records = list(first.records)
    second.open()
    records = second.run(60, fits)
    new = [record.candidate for record in records[5:]]
    assert set(new) == {each.id for each in space.candidates} - {record.candidate for record in first.records}
    assert len(set(new)) == len(new)


def test_telling_what_was_not_asked_has_no_effect(tmp_path: Path) -> None:
    section = search(SMALL, Sampler.TPE)
    strategy = OptunaStrategy(space_of(section), section, SPEED, tmp_path)
    strategy.tell(outside_candidate(5), ok(), (1.0,))
    asked = strategy.ask()
    assert asked is not None
    strategy.tell(asked, ok(), (1.0,))
    strategy.tell(asked, oom(), None)
    strategy.close()
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / STUDY_FILE}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"]


def test_records_of_a_mixed_past_are_taken_over(tmp_path: Path) -> None:
    section = search(SMALL, Sampler.TPE)
    space = space_of(section)
    ends = [ok(), oom(), None, Cancelled(), Crashed(phase=Phase.INIT, rank=0, error="ValueError")]
    records = [record_of(each, trial, ends[trial]) for trial, each in enumerate(space.candidates[:5])]
    strategy = OptunaStrategy(space, section, SPEED, tmp_path, records)
    asked = [strategy.ask() for _ in range(7)]
    assert {each.id for each in asked if each} == {each.id for each in space.candidates[5:]}
    assert strategy.ask() is None
    strategy.tell(space.candidates[2], ok(), (1.0,))
    strategy.close()
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / STUDY_FILE}")
    assert [trial.state.name for trial in study.trials[:5]] == ["COMPLETE", "PRUNED", "COMPLETE", "WAITING", "FAIL"]
