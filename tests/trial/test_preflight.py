import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.config import ModelSource
from orchestrator.contract.facts import Facts, LinearLayer, ModelFacts, PreflightFailure
from orchestrator.trial.model import load_config
from orchestrator.trial.shape import check_lora_targets, model_facts, weightless_model
from orchestrator.trial.unusable import Unusable
from trial.rig import FULL_PARAMETERS, LLAMA


def facts_of(config: dict[str, Any]) -> ModelFacts:
    source = ModelSource(config=config)
    return model_facts(weightless_model(load_config(source), source))


def layer(facts: ModelFacts, name: str) -> LinearLayer:
    (found,) = [each for each in facts.linear_layers if each.name == name]
    return found


def test_a_llama_with_grouped_heads() -> None:
    facts = facts_of(LLAMA)
    assert facts.total_parameters == FULL_PARAMETERS
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (4, 2, 16)
    assert layer(facts, "k_proj") == LinearLayer(name="k_proj", in_features=64, out_features=32, count=2)
    assert layer(facts, "lm_head").is_output_head
    assert "lm_head" not in facts.adaptable
    assert not facts.tied_embeddings


def test_tied_weights_count_once() -> None:
    facts = facts_of({**LLAMA, "tie_word_embeddings": True})
    assert facts.tied_embeddings
    assert facts.total_parameters == FULL_PARAMETERS - 512 * 64


def test_experts_carry_the_share_of_tokens_that_use_them() -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    facts = facts_of(mixtral)
    down = layer(facts, "down_proj")
    assert (down.in_features, down.out_features, down.count, down.active_fraction) == (128, 64, 16, 0.25)
    assert layer(facts, "q_proj").active_fraction == 1
    assert "down_proj" not in facts.adaptable


def test_a_family_with_names_of_its_own() -> None:
    facts = facts_of({"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 512})
    assert (facts.hidden_size, facts.num_layers, facts.head_dim) == (48, 3, 12)
    assert facts.max_position_embeddings == 1024
    assert layer(facts, "c_attn") == LinearLayer(name="c_attn", in_features=48, out_features=144, count=3)
    assert facts.tied_embeddings


def test_unknown_lora_targets_are_answered_with_the_model_s_own_layers() -> None:
    source = ModelSource(config=LLAMA)
    model = weightless_model(load_config(source), source)
    check_lora_targets(model, (("q_proj", "self_attn.v_proj"), ("all-linear",)))
    with pytest.raises(Unusable, match=r"query is no linear layer .* are down_proj, gate_proj, k_proj") as caught:
        check_lora_targets(model, (("q_proj",), ("query",)))
    assert caught.value.field == "search.lora_targets"


def preflight(tmp_path: Path, **request: Any) -> tuple[int, Path, str]:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"text": f"row {number} of some words"} for number in range(20)]))
    content = {
        "model": {"config": LLAMA},
        "data": {"path": str(rows), "sequence_length": 32},
        "data_directory": str(tmp_path / "data"),
        "device": "cpu",
        **request,
    }
    (tmp_path / "request.json").write_text(json.dumps(content))
    command = [sys.executable, "-m", "orchestrator.trial.preflight", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, tmp_path, done.stderr


def test_a_preflight_leaves_facts_and_prepared_rows(tmp_path: Path) -> None:
    code, folder, stderr = preflight(tmp_path, precisions=["fp32", "bf16"])
    assert code == 0, stderr
    facts = Facts.model_validate_json((folder / "facts.json").read_bytes())
    assert facts.data.rows == 20
    assert (folder / "data" / "data.json").exists()
    assert min(facts.peak_flops_per_s.values()) > 1e8
    assert "with 1 threads" in facts.peak_source


def test_a_model_that_needs_code_of_its_own_is_refused_without_running_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code, folder, stderr = preflight(tmp_path, model={"path": str(model)})
    failure = PreflightFailure.model_validate_json((folder / "error.json").read_bytes())
    assert code == 2
    assert failure.field == "model.path"
    assert "trust_remote_code: true" in failure.message
    assert "Traceback" not in stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (ModelSource(config={"hidden_size": 8}), "no model_type"),
        (ModelSource(config={"model_type": "lama"}), "lama"),
        (ModelSource(path="/nowhere/model"), "/nowhere/model"),
    ],
)
def test_a_model_that_is_none_is_refused(source: ModelSource, says: str) -> None:
    with pytest.raises(Unusable, match=says):
        load_config(source)
