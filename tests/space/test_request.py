"""The preflight hears of every set of layers and every precision that some candidate may use."""

from pathlib import Path

import pytest
from space_facts import spec

from orchestrator.contract.config import Precision
from orchestrator.space.request import preflight_request
from orchestrator.space.trials import model_source
from orchestrator.spec.sweep import ModelSection


def test_targets_are_collected_from_everywhere() -> None:
    asked = spec(
        {"lora_targets": ("all-linear", ("q_proj",))},
        paired=({"precision": "bf16", "attention": "sdpa"},),
        baseline={"lora_targets": ("k_proj", "v_proj")},
    )
    request = preflight_request(asked, Path("/prepared"), threads_per_rank=2)
    assert request.lora_targets == (("k_proj", "v_proj"), ("q_proj",))
    assert request.precisions == (Precision.BF16,)
    assert request.data_directory == "/prepared"
    assert request.threads_per_rank == 2


@pytest.mark.parametrize(
    ("section", "weights"),
    [
        ({"config": {"model_type": "llama"}}, "random"),
        ({"path": "/models/config.json"}, "random"),
        ({"path": "/models/checkpoint"}, "pretrained"),
        ({"id": "org/name"}, "pretrained"),
        ({"id": "org/name", "weights": "random"}, "random"),
    ],
)
def test_unset_weights_follow_from_the_source(section: dict[str, object], weights: str) -> None:
    assert model_source(ModelSection.model_validate(section)).weights == weights


def test_a_known_model_without_weights_needs_no_hub() -> None:
    source = model_source(ModelSection.model_validate({"id": "Qwen/Qwen2.5-0.5B", "weights": "random"}))
    assert source.id is None
    assert source.config is not None
    assert source.config["model_type"] == "qwen2"


def test_pretrained_weights_come_from_the_hub() -> None:
    assert model_source(ModelSection.model_validate({"id": "Qwen/Qwen2.5-0.5B"})).id == "Qwen/Qwen2.5-0.5B"
