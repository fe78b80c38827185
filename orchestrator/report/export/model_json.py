"""`model.json`: where the model comes from and how it is loaded; `optimizer.json`: what updates it."""

from pydantic import JsonValue

from orchestrator.contract.config import Precision
from orchestrator.report.export.measured import MeasuredTrial

FILE = "model.json"
OPTIMIZER_FILE = "optimizer.json"
_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16"}


def model_settings(trial: MeasuredTrial) -> dict[str, JsonValue]:
    """`kwargs` go to `from_pretrained` or `from_config` of transformers' AutoModelForCausalLM."""
    source = trial.config.model
    return {
        "config": source.config,
        "path": source.path,
        "id": source.id,
        "revision": source.revision,
        "weights": source.weights,
        "kwargs": {
            "dtype": _DTYPES[trial.config.knobs.precision],
            "attn_implementation": trial.config.knobs.attention.value,
            "trust_remote_code": source.trust_remote_code,
        },
    }


def optimizer_settings(trial: MeasuredTrial) -> dict[str, JsonValue]:
    """`class` is the optimizer's dotted name, all else its arguments."""
    return trial.resolved.optimizer
