"""The model of a trial: a real transformers causal LM, with adapters and checkpointing as the knobs say."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from pydantic import JsonValue
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from orchestrator.contract.config import Checkpointing, Knobs, Method, ModelSource, Precision, TrialConfig
from orchestrator.trial.unusable import Unusable

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready for an engine, and its counts of parameters."""

    model: nn.Module
    trainable_parameters: int
    total_parameters: int
    lora: dict[str, JsonValue] | None
    sharded_init: HfDeepSpeedConfig | None
    """transformers only holds a weak reference to it."""


def load_config(source: ModelSource) -> PretrainedConfig:
    """transformers' configuration of `source`, without weights.

    Raises Unusable when there is none, when its type is unknown, or when it needs code of its own that
    `trust_remote_code` does not allow.
    """
    field = "model.config" if source.config is not None else "model.path" if source.path is not None else "model.id"
    try:
        if source.config is not None:
            values = dict(source.config)
            return AutoConfig.for_model(str(values.pop("model_type", "")), **values)
        return AutoConfig.from_pretrained(
            source.path or source.id, revision=source.revision, trust_remote_code=source.trust_remote_code
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Unusable(field, _config_failure(source, error)) from error


def _config_failure(source: ModelSource, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if "trust_remote_code" in str(error):
        return "the model needs its own code; allow it with model.trust_remote_code: true and --allow-remote-code"
    if source.config is not None and "model_type" not in source.config:
        return "the configuration has no model_type; write for example `model_type: llama`"
    if source.id is not None:
        return (
            f"the model {source.id} cannot be reached: {text};"
            " where no network is, give model.path or fill the cache that HF_HOME names"
        )
    return f"the configuration cannot be used: {text}"


def build_model(config: TrialConfig, resolved: dict[str, JsonValue], device: torch.device) -> LoadedModel:
    """Build the model that `config` asks for, sharded from the start under ZeRO-3.

    `resolved` is DeepSpeed's configuration. Random weights follow from the seed.
    """
    knobs = config.knobs
    torch.manual_seed(config.train.seed)
    # transformers asks this object whether to create parameters in shards
    sharded_init = HfDeepSpeedConfig(resolved) if knobs.zero_stage == 3 else None
    model: nn.Module = _create(config.model, knobs, device if sharded_init is None else None)
    if knobs.gradient_checkpointing is Checkpointing.FULL:
        _enable_checkpointing(model, needs_input_gradients=knobs.method is Method.LORA)
    lora = None
    if knobs.method is Method.LORA:
        lora = lora_arguments(config)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    model.train()
    return LoadedModel(
        model=model,
        trainable_parameters=sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad),
        total_parameters=sum(_size(parameter) for parameter in model.parameters()),
        lora=lora,
        sharded_init=sharded_init,
    )


def _create(source: ModelSource, knobs: Knobs, device: torch.device | None) -> PreTrainedModel:
    attention, dtype = knobs.attention.value, DTYPES[knobs.precision]
    if source.weights == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(
            source.path or source.id,
            revision=source.revision,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=source.trust_remote_code,
            use_safetensors=True,
        )
    else:
        model_config = load_config(source)
        # transformers makes sharded weights in one pass of their own; the other stages do alike, so that equal seeds
        # give equal weights. Code that comes with a model may rely on more than that pass
        is_one_pass = device is not None and not source.trust_remote_code
        # without a device of its own, deepspeed.zero.Init chooses where each parameter goes
        with device or torch.device("cpu"), no_init_weights() if is_one_pass else nullcontext():
            model = AutoModelForCausalLM.from_config(
                model_config,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=source.trust_remote_code,
            )
        if is_one_pass:
            model.init_weights()
    model.config.use_cache = False
    return model


def _enable_checkpointing(model: nn.Module, needs_input_gradients: bool) -> None:
    assert isinstance(model, PreTrainedModel)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if needs_input_gradients:
        model.enable_input_require_grads()


def lora_arguments(config: TrialConfig) -> dict[str, JsonValue]:
    """peft's LoraConfig for `config`, as JSON."""
    knobs = config.knobs
    assert knobs.lora_rank is not None, "a LoRA candidate without a rank"
    assert knobs.lora_targets is not None, "a LoRA candidate without targets"
    targets: JsonValue = knobs.lora_targets if isinstance(knobs.lora_targets, str) else list(knobs.lora_targets)
    return {
        "r": knobs.lora_rank,
        "lora_alpha": config.train.lora_alpha or 2 * knobs.lora_rank,
        "lora_dropout": config.train.lora_dropout,
        "target_modules": targets,
    }


def _size(parameter: nn.Parameter) -> int:
    # a parameter that ZeRO-3 has sharded is empty and keeps its size beside it
    return int(getattr(parameter, "ds_numel", parameter.numel()))
