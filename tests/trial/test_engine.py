import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.trial.engine import deepspeed_config
from trial.rig import FULL, LORA, trial_config

GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, dict[str, Any]] = {
    "stage0_fp32_lora": {**LORA, "zero_stage": 0},
    "stage2_bf16_offload": {
        **FULL,
        "zero_stage": 2,
        "precision": "bf16",
        "offload_optimizer": "cpu",
        "overlap_comm": False,
        "micro_batch": 4,
    },
    "stage3_offload_all": {
        **FULL,
        "zero_stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "overlap_comm": True,
        "micro_batch": 1,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_deepspeed_configuration_is_as_agreed(name: str) -> None:
    resolved = deepspeed_config(trial_config(Path("/rows"), CASES[name]), pin_memory=name == "stage3_offload_all")
    assert resolved == json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_itself_accepts_it(name: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    resolved = deepspeed_config(trial_config(Path("/rows"), CASES[name]), pin_memory=False)
    section = resolved["zero_optimization"]
    assert isinstance(section, dict)
    assert DeepSpeedZeroConfig(**section).stage == CASES[name]["zero_stage"]
    assert "auto" not in json.dumps(resolved)


def test_each_knob_value_arrives_whatever_ran_before() -> None:
    for micro_batch in (1, 2, 4):
        resolved = deepspeed_config(trial_config(Path("/rows"), {**FULL, "micro_batch": micro_batch}), False)
        assert resolved["train_micro_batch_size_per_gpu"] == micro_batch
        assert resolved["gradient_accumulation_steps"] == 2
        assert "train_batch_size" not in resolved
