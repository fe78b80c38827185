"""Thousands of candidates that surely do not fit cost neither a proposal nor a record each, and are counted."""

from collections.abc import Iterable
from pathlib import Path

from fakes import FakePool, new_ledger, ok
from predict.profiles import decoder
from space.space_facts import facts, spec

from orchestrator.backends.optuna_study import OptunaStrategy
from orchestrator.contract.outcome import Ok, Rejected
from orchestrator.contract.profile import Profile, TraceRequest
from orchestrator.contract.units import GIB
from orchestrator.placement.forecast import Forecaster
from orchestrator.placement.gate import NEAREST, ForecastGate, without_hopeless
from orchestrator.placement.platform import Platform
from orchestrator.placement.rows import uniform_rows
from orchestrator.placement.tracing import Untraceable, request_key
from orchestrator.predict.constants import CUDA_CLOCK
from orchestrator.predict.overhead import CUDA
from orchestrator.space.candidates import Space, build_space
from orchestrator.spec.sweep import BudgetSection, ConfirmSection, SweepSpec
from orchestrator.sweep.loop import Services, run_sweep

ELEMENTS = 50_000_000
"""Of the reduce buckets, which stand on the device in two bytes each: they alone decide here what fits."""
SEARCHED: SweepSpec = spec(
    {"reduce_bucket_size": tuple(ELEMENTS * number for number in range(1000, 0, -1))},
    fixed={"zero_stage": 3, "method": "full"},
    devices=2,
    sampler="grid",
)


def predicts(space: Space) -> Forecaster:
    """On two devices of 20 GiB, where buckets of about 180 of the sizes fit."""
    profile = decoder(hidden=64, layers=2, intermediate=128, vocabulary=512)

    def trace(requests: Iterable[TraceRequest]) -> dict[str, Profile | Untraceable]:
        return {request_key(request): profile for request in requests}

    platform = Platform("cuda", 2, CUDA, CUDA_CLOCK, capacity_bytes=20 * GIB)
    forecaster = Forecaster(platform, uniform_rows(128), trace)
    forecaster.prepare(candidate.config for candidate in space.candidates[:1])
    return forecaster


def test_only_what_is_nearest_to_fitting_is_rejected_one_by_one(tmp_path: Path) -> None:
    whole = build_space(SEARCHED, facts(on_cuda=True))
    assert len(whole.candidates) == 1000
    forecaster = predicts(whole)
    space = without_hopeless(whole, forecaster, reject_probability=0.95)
    assert len(space.candidates) + len(space.left_out) == 1000
    assert len(space.left_out) > 700
    assert set(space.left_out.values()) <= {"reduce_buckets in optimizer_step", "reduce_buckets in backward"}
    kept = [forecaster.forecast(each.config, replays=False).probability_fits or 0.0 for each in space.candidates]
    assert sum(odds < 1e-3 for odds in kept) == NEAREST
    gone = [each for each in whole.candidates if each.id in space.left_out]
    least = min(forecaster.forecast(each.config, replays=False).needed_bytes for each in gone)
    assert all(forecaster.forecast(each.config, replays=False).needed_bytes <= least for each in space.candidates)

    measure = SEARCHED.measure.model_copy(update={"confirm": ConfirmSection(repeats=0)})
    of = SEARCHED.model_copy(update={"budget": BudgetSection(trials=2), "measure": measure})
    assert of.search is not None
    ledger = new_ledger(tmp_path, of)
    ledger.write_sweep(ledger.read_sweep().model_copy(update={"left_out": {"reduce_buckets in backward": 800}}))
    strategy = OptunaStrategy(space, of.search, of.objective, ledger.folder, ())
    gate = ForecastGate(forecaster, 0.95)
    with ledger.lock():
        run_sweep(of, ledger, Services(pool=FakePool(lambda launch: ok(), slots=2), strategy=strategy, gate=gate))
    records = ledger.read_trials()
    first = next(number for number, record in enumerate(records) if isinstance(record.outcome, Ok))
    doubtful = sum(odds < 0.05 for odds in kept)
    assert NEAREST <= first <= doubtful < 200
    assert all(isinstance(record.outcome, Rejected) for record in records[:first])
