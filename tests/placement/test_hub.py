"""A hub that is away is found out by one connection, not by its client's retries."""

import socket
from pathlib import Path

import pytest
from fakes import spec

from orchestrator.contract.errors import PreflightError
from orchestrator.placement.hub import hub_answers
from orchestrator.placement.ports import free_port
from orchestrator.placement.preflight import preflight
from orchestrator.spec.sweep import ModelSection


def test_whether_the_hub_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert hub_answers({"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"})
    assert not hub_answers({"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"})


def test_an_unknown_model_is_refused_without_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    unknown = spec(model=ModelSection(id="no-such-team/no-such-model"))
    with pytest.raises(PreflightError, match=r"spec\.yaml: model\.id: the model no-such-team/no-such-model cannot be"):
        preflight(unknown, "spec.yaml", tmp_path, threads_per_rank=1)
    (log,) = tmp_path.rglob("preflight.log")
    assert "Retrying" not in log.read_text()
