"""The built-in shapes are those of the published models: counts of weights are equal, to the last one."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from orchestrator.contract.config import ModelSource
from orchestrator.contract.profile import TraceRequest
from orchestrator.spec.catalog import CatalogEntry, closest, entries, hint, known, weightless
from orchestrator.trial.trace.build import build


def _row(name: str) -> CatalogEntry:
    entry = known(name)
    assert entry is not None, name
    return entry


def _weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _built(entry: CatalogEntry) -> PreTrainedModel:
    with no_init_weights():
        model = build(TraceRequest(model=ModelSource(config=entry.config), task=entry.task), lora_rank=0)
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight and entry.config.get("tie_word_embeddings") is False:
        # transformers ties T5's head whatever its config says, and unties it when the checkpoint has one
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    return model


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_a_shape_has_the_weights_of_the_model(entry: CatalogEntry) -> None:
    assert _weights(_built(entry)) == entry.parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
        ("Qwen/Qwen2-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("meta-llama/Llama-2-13b-hf", 13_015_864_320),
        ("bigscience/mt0-large", 1_231_940_608 - 2_359_296),
    ],
)
def test_counts_that_others_have_printed(name: str, parameters: int) -> None:
    assert _row(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "rank", "targets", "parameters"),
    [
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 64, "all-linear", 50_462_720),
        ("Qwen/Qwen2-0.5B", 64, "all-linear", 35_192_832),
        ("Qwen/Qwen2.5-3B-Instruct", 16, None, 3_686_400),
        ("meta-llama/Llama-2-7b-hf", 8, ["q_proj", "v_proj"], 4_194_304),
        ("meta-llama/Llama-2-13b-hf", 8, ["q_proj", "v_proj"], 6_553_600),
        ("bigscience/mt0-large", 8, None, 2_359_296),
    ],
)
def test_adapters_on_a_shape_have_the_published_size(
    name: str, rank: int, targets: list[str] | str | None, parameters: int
) -> None:
    entry = _row(name)
    assert _adapter_weights(entry.config, entry.task, rank, targets) == parameters


def test_fused_layers_make_smaller_adapters() -> None:
    """175,636,480 is printed for Llama-3.1-70B where queries, keys and values share a layer, as gate and up do."""
    config = {**_row("meta-llama/Llama-3.1-70B").config, "model_type": "phi3"}
    assert _adapter_weights(config, "causal_lm", 16, "all-linear") == 175_636_480


def _adapter_weights(config: dict[str, object], task: str, rank: int, targets: list[str] | str | None) -> int:
    adapter = {"peft_type": "LORA", "target_modules": targets}
    request = TraceRequest.model_validate({"model": {"config": config}, "task": task, "adapter": adapter})
    return sum(weight.numel() for weight in build(request, rank).parameters() if weight.requires_grad)


def test_names_do_not_clash() -> None:
    names = [name.lower().replace("_", "-") for entry in entries() for name in entry.names]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("META-LLAMA/llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen/Qwen-1_8B-Chat", "Qwen/Qwen-1_8B"),
        ("Qwen/Qwen-1.8B", "Qwen/Qwen-1_8B"),
        ("NousResearch/Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf"),
        ("TheBloke/Mistral-7B-v0.1-GPTQ", "mistralai/Mistral-7B-v0.1"),
        ("gpt2", "openai-community/gpt2"),
    ],
)
def test_a_model_is_known_by_many_names(name: str, identity: str) -> None:
    assert _row(name).id == identity


def test_a_short_name_of_two_shapes_is_not_guessed() -> None:
    assert known("mpt-7b") is None
    assert closest("mpt-7b")[:2] == ("llm-foundry/mpt-7b", "mosaicml/mpt-7b")


def test_slips_find_their_model() -> None:
    assert known("meta-lama/Llama-3.1-8B") is None
    assert closest("meta-lama/Llama-3.1-8B")[0] == "meta-llama/Llama-3.1-8B"
    assert closest("somebody/something-else-entirely") == ()


def test_a_message_about_a_missing_model_helps() -> None:
    assert "weights: random" in hint("Qwen/Qwen2.5-0.5B")
    assert "well-known names like it: Qwen/Qwen2.5-0.5B" in hint("Qwenn/Qwen2.5-0.5B")
    assert hint("somebody/something-else-entirely") == ""


def test_a_stand_in_says_so() -> None:
    assert _row("Qwen/Qwen-7B").surrogate is not None
    assert _row("Qwen/Qwen2.5-7B").surrogate is None


def test_a_known_id_becomes_its_config() -> None:
    source = weightless(ModelSource(id="Qwen/Qwen2.5-0.5B", weights="pretrained"))
    assert source == ModelSource(config=_row("Qwen/Qwen2.5-0.5B").config, weights="random")


@pytest.mark.parametrize(
    "source",
    [
        ModelSource(id="somebody/unknown"),
        ModelSource(id="Qwen/Qwen2.5-0.5B", revision="main"),
        ModelSource(id="Qwen/Qwen-7B", trust_remote_code=True),
        ModelSource(config={"model_type": "llama"}),
        ModelSource(path="/models/llama"),
    ],
)
def test_what_only_the_hub_or_the_disk_can_tell_stays(source: ModelSource) -> None:
    assert weightless(source) is source


def test_looking_up_a_model_imports_no_torch() -> None:
    code = "import sys; from orchestrator.spec.catalog import known; known('gpt2'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)
