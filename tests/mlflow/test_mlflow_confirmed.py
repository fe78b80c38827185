"""Confirmed figures in MLflow's runs: each run of the confirmation by itself, and the sweep's best by them."""

from fakes import config, ok, oom, spec, sweep_record

from orchestrator.backends.mlflow_runs import RunContent, attempt_content, sweep_content
from orchestrator.contract.outcome import Outcome
from orchestrator.contract.record import AttemptRecord, Purpose, TrialRecord

OF = spec()


def trial(number: int, search: Outcome, *again: Outcome) -> TrialRecord:
    built = config(micro_batch=number + 1)
    purposes = [Purpose.SEARCH, *[Purpose.CONFIRM] * len(again)]
    attempts = tuple(
        AttemptRecord(
            attempt=index + 1,
            token=f"{number}-{index}",
            purpose=purpose,
            dispatched_s=1.0 + 10 * index + number,
            ended_s=2.0 + 10 * index + number,
            outcome=outcome,
            mfu=0.1 * (index + 1),
        )
        for index, (purpose, outcome) in enumerate(zip(purposes, (search, *again), strict=True))
    )
    return TrialRecord(
        trial=number, candidate=built.candidate, label=f"mb{number + 1}", config=built, attempts=attempts, mfu=0.1
    )


LUCKY, TRUE = trial(0, ok(400.0), ok(300.0), ok(302.0)), trial(1, ok(390.0), ok(380.0), ok(382.0))
FAILED = trial(2, ok(500.0), oom())


def metrics(content: RunContent) -> dict[str, float]:
    return {point.key: point.value for point in content.points}


def test_each_run_of_the_confirmation_is_a_run_of_its_own() -> None:
    contents = [attempt_content(sweep_record(OF), TRUE, attempt) for attempt in TRUE.attempts]
    assert [content.name for content in contents] == [
        "t0001 mb2",
        "t0001 mb2, confirmation 1",
        "t0001 mb2, confirmation 2",
    ]
    assert [content.tags["purpose"] for content in contents] == ["search", "confirm", "confirm"]
    assert [metrics(content)["tokens_per_second"] for content in contents] == [390.0, 380.0, 382.0]
    assert [round(metrics(content)["mfu"], 9) for content in contents] == [0.1, 0.2, 0.3]


def test_the_sweep_s_best_is_by_the_confirmation_and_tells_the_search_s_figure() -> None:
    content = sweep_content(sweep_record(OF), [LUCKY, TRUE, FAILED])
    found = metrics(content)
    assert content.tags["best.trial"] == "1"
    assert (found["best/tokens_per_second"], found["best/search_tokens_per_second"]) == (381.0, 390.0)
    assert found["best/tokens_per_second_low"] < 381.0 < found["best/tokens_per_second_high"]
    assert (found["best/confirmation_runs"], round(found["best/mfu"], 9)) == (2, 0.25)
    assert (found["n_feasible"], found["n_oom"]) == (2, 1)
    assert "381.0 tokens/s in 2 runs after the search" in content.tags["mlflow.note.content"]


def test_a_confirmation_s_totals_come_after_the_search_s() -> None:
    """MLflow shows the value of the latest time, and of one time the largest: the search's luck must not stay."""
    searched = TRUE.model_copy(update={"attempts": TRUE.searches})
    before, after = (sweep_content(sweep_record(OF), [each]) for each in (searched, TRUE))
    times = [{p.time_ms for p in c.points if p.key == "best/tokens_per_second"} for c in (before, after)]
    assert max(times[0]) < min(times[1])
