"""`training_arguments.json`: for `transformers.TrainingArguments(**json)`, in the names of transformers 5."""

from pydantic import JsonValue

from orchestrator.contract.config import Checkpointing, Optimizer, Precision
from orchestrator.report.export.deepspeed_json import FILE as DEEPSPEED_FILE
from orchestrator.report.export.measured import MeasuredTrial

FILE = "training_arguments.json"


def training_arguments(trial: MeasuredTrial) -> dict[str, JsonValue]:
    """Agrees with `ds_config.json` in every value that both hold; transformers refuses them otherwise."""
    config, device = trial.config, trial.measurement.device
    is_checkpointing = config.knobs.gradient_checkpointing is Checkpointing.FULL
    arguments: dict[str, JsonValue] = {
        "output_dir": "output",
        "deepspeed": DEEPSPEED_FILE,
        "per_device_train_batch_size": config.knobs.micro_batch,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "num_train_epochs": 1.0,
        "learning_rate": config.train.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": config.train.weight_decay,
        "max_grad_norm": config.train.gradient_clipping,
        "optim": "sgd" if config.knobs.optimizer is Optimizer.SGD else "adamw_torch_fused",
        "bf16": config.knobs.precision is Precision.BF16,
        "gradient_checkpointing": is_checkpointing,
        "seed": config.train.seed,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "dataloader_pin_memory": device == "cuda",
        "use_cpu": device == "cpu",
        "save_strategy": "no",
        "report_to": "none",
    }
    if is_checkpointing:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if config.knobs.optimizer is Optimizer.ADAMW:
        arguments |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    return arguments
