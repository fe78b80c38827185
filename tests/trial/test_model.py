import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.trial.engine import deepspeed_config
from orchestrator.trial.model import build_model
from trial.rig import FULL, LLAMA, VOCABULARY, trial_config


def saved_bytes(knobs: dict[str, Any], sequence_length: int) -> int:
    """Bytes that the forward pass of a tiny Llama keeps for its backward pass, parameters left out."""
    model = {"config": {**LLAMA, "vocab_size": VOCABULARY}}
    config = trial_config(Path("/rows"), {**knobs, "micro_batch": 1}, model=model)
    built = build_model(config, deepspeed_config(config, pin_memory=False), torch.device("cpu")).model
    parameters = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.ones((1, sequence_length), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = built(input_ids=ids, labels=ids).loss
    total = sum(saved.values())
    del loss, built
    gc.collect()
    return total


def test_lora_can_keep_more_activations_than_full_training() -> None:
    full = saved_bytes(FULL, 1024)
    narrow, wide = (
        saved_bytes({"method": "lora", "lora_rank": rank, "lora_targets": "all-linear"}, 1024) for rank in (4, 64)
    )
    assert narrow < wide
    assert wide > full


def test_checkpointing_keeps_far_less() -> None:
    assert saved_bytes({**FULL, "gradient_checkpointing": "full"}, 512) < 0.5 * saved_bytes(FULL, 512)


@pytest.mark.parametrize("alpha", [None, 3])
def test_alpha_is_twice_the_rank_unless_it_is_given(alpha: int | None) -> None:
    train = {"global_batch": 4, "learning_rate": 1e-3, "lora_alpha": alpha}
    knobs = {"method": "lora", "lora_rank": 8, "lora_targets": ["q_proj"]}
    config = trial_config(Path("/rows"), knobs, train=train)
    loaded = build_model(config, deepspeed_config(config, pin_memory=False), torch.device("cpu"))
    assert loaded.lora is not None
    assert loaded.lora["lora_alpha"] == (alpha or 16)
    assert loaded.trainable_parameters == 2 * 8 * (64 + 64)
