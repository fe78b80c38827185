"""The loss on held-out rows in MLflow's runs, and a best that keeps within it."""

from fakes import config, measurement, spec, sweep_record

from orchestrator.backends.mlflow_runs import RunContent, attempt_content, sweep_content
from orchestrator.contract.outcome import Ok
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.spec.sweep import LimitsSection, SearchSection

OF = spec(
    measure={"quality": {"train_tokens": 100}},
    search=SearchSection(baseline={"micro_batch": 1}),
    limits=LimitsSection(eval_loss_within=0.02),
)


def trial(number: int, speed: float, loss: float | None) -> TrialRecord:
    built = config(micro_batch=number + 1)
    found = measurement(speed).model_copy(update={"eval_loss": loss, "eval_tokens": 64, "trained_tokens": 128})
    attempt = AttemptRecord(
        attempt=1, token=f"t{number}", dispatched_s=1.0, ended_s=2.0 + number, outcome=Ok(measurement=found)
    )
    return TrialRecord(
        trial=number,
        candidate=built.candidate,
        label=f"mb{number + 1}",
        config=built,
        attempts=(attempt,),
        is_baseline=number == 0,
    )


TRIALS = [trial(0, 10.0, 4.0), trial(1, 90.0, 5.0), trial(2, 50.0, 4.0), trial(3, 99.0, None)]


def metrics(content: RunContent) -> dict[str, float]:
    return {point.key: point.value for point in content.points}


def test_an_attempt_carries_its_loss_and_one_without_carries_none() -> None:
    first = metrics(attempt_content(sweep_record(OF), TRIALS[1], TRIALS[1].attempts[-1]))
    assert (first["eval_loss"], first["eval_tokens"], first["trained_tokens"]) == (5.0, 64, 128)
    assert "eval_loss" not in metrics(attempt_content(sweep_record(OF), TRIALS[3], TRIALS[3].attempts[-1]))


def test_the_best_of_the_sweep_keeps_within_the_loss() -> None:
    content = sweep_content(sweep_record(OF), TRIALS)
    found = metrics(content)
    assert content.tags["best.trial"] == "2"
    assert (found["best/tokens_per_second"], found["best/eval_loss"], found["n_lossy"]) == (50.0, 4.0, 2.0)
    history = [point.value for point in content.points if point.key == "best_so_far"]
    assert history == [10.0, 10.0, 50.0, 50.0]


def test_without_a_limit_the_fastest_is_the_best() -> None:
    of = OF.model_copy(update={"limits": LimitsSection()})
    content = sweep_content(sweep_record(of), TRIALS)
    assert content.tags["best.trial"] == "3"
    assert "n_lossy" not in metrics(content)
