"""`ds_config.json`: the DeepSpeed configuration that every rank ran with."""

from pydantic import JsonValue

from orchestrator.report.export.measured import MeasuredTrial

FILE = "ds_config.json"


def deepspeed_config(trial: MeasuredTrial) -> dict[str, JsonValue]:
    """Resolved numbers throughout, never `auto`.

    Beside what was measured it states the global batch, so that a launch on another number of ranks is refused, and
    under ZeRO-3 that a saved model is gathered; neither changes a step.
    """
    config: dict[str, JsonValue] = {"train_batch_size": trial.config.train.global_batch, **trial.resolved.deepspeed}
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        config["zero_optimization"] = {**zero, "stage3_gather_16bit_weights_on_model_save": True}
    return config
