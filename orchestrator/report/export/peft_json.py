"""`adapter_config.json`: the adapters, as `peft.LoraConfig.from_pretrained` reads them."""

from pydantic import JsonValue

from orchestrator.report.export.measured import MeasuredTrial

FILE = "adapter_config.json"


def adapter_config(trial: MeasuredTrial) -> dict[str, JsonValue] | None:
    """None for a trial without adapters."""
    if trial.resolved.lora is None:
        return None
    source = trial.config.model
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.path or source.id,
        "revision": source.revision,
        "bias": "none",
        **trial.resolved.lora,
    }
