"""What the sweep took and what its winner saves, as metrics of the sweep's run."""

import pytest
from fakes import config, ok, spec, sweep_record

from orchestrator.backends.mlflow_runs import RunContent, sweep_content
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.spec.sweep import ResourcesSection


def trial(number: int, speed: float) -> TrialRecord:
    """A trial that took 36 s on one device."""
    built = config(micro_batch=number + 1)
    attempt = AttemptRecord(attempt=1, token=f"t{number}", dispatched_s=1.0, ended_s=37.0, outcome=ok(speed))
    return TrialRecord(
        trial=number,
        candidate=built.candidate,
        label=f"mb{number + 1}",
        is_baseline=number == 0,
        config=built,
        attempts=(attempt,),
    )


TRIALS = [trial(0, 100.0), trial(1, 200.0)]


def metrics(content: RunContent) -> dict[str, float]:
    return {point.key: point.value for point in content.points}


def test_the_account_is_on_the_sweeps_run() -> None:
    of = spec(resources=ResourcesSection(price_per_device_hour=2.0, currency="EUR"))
    content = sweep_content(sweep_record(of).model_copy(update={"planned_tokens": 3_600_000}), TRIALS)
    found = metrics(content)
    assert content.tags["currency"] == "EUR"
    assert found["device_hours"] == pytest.approx(0.02)
    assert found["money"] == pytest.approx(0.04)
    assert found["training/best_device_hours"] == pytest.approx(5)
    assert found["training/baseline_device_hours"] == pytest.approx(10)
    assert (found["training/saved_device_hours"], found["training/saved_money"]) == (
        pytest.approx(5),
        pytest.approx(10),
    )
    assert found["break_even_tokens"] == pytest.approx(3_600_000 * 0.02 / 5)


def test_without_a_price_and_a_plan_nothing_is_made_up() -> None:
    content = sweep_content(sweep_record(spec()), TRIALS[:1])
    assert "currency" not in content.tags
    found = metrics(content)
    assert found["device_hours"] == pytest.approx(0.01)
    assert not {name for name in found if name.startswith("training/") or name in ("money", "break_even_tokens")}
