import pytest
from sweep_records import make_facts, make_sweep, make_trials

from orchestrator.contract.facts import Facts
from orchestrator.contract.record import SweepRecord, TrialRecord


@pytest.fixture
def trials() -> list[TrialRecord]:
    return make_trials()


@pytest.fixture
def facts() -> Facts:
    return make_facts()


@pytest.fixture
def sweep() -> SweepRecord:
    return make_sweep()
