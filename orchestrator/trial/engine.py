"""From a trial's configuration to a running DeepSpeed engine."""

import logging
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.accelerator import real_accelerator
from pydantic import JsonValue
from torch import nn

from orchestrator.contract.config import Offload, Optimizer, Precision, TrialConfig
from orchestrator.trial.device import Device
from orchestrator.trial.group import require_gloo_room

JsonObject = dict[str, JsonValue]

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
_NEVER_PRINT_STEPS = 10**9
_STAGE3_KNOBS = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "sub_group_size",
)
_SHARED_KNOBS = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm")


def deepspeed_config(config: TrialConfig, pin_memory: bool) -> JsonObject:
    """DeepSpeed's configuration for `config`, with numbers throughout and never `auto`.

    The batch is given as micro-batch and accumulation; DeepSpeed multiplies them by the world size that it sees.
    `pin_memory` says whether offloaded states lie in pinned host memory (there is none for a CPU device).
    A knob that is None takes no part here, or stays at DeepSpeed's default.
    """
    resolved: JsonObject = {
        "train_micro_batch_size_per_gpu": config.knobs.micro_batch,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.train.gradient_clipping,
        "zero_optimization": _zero_section(config, pin_memory),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER_PRINT_STEPS,
    }
    if config.knobs.precision is Precision.BF16:
        resolved["bf16"] = {"enabled": True}
    return resolved


def _zero_section(config: TrialConfig, pin_memory: bool) -> JsonObject:
    knobs = config.knobs
    section: JsonObject = {"stage": knobs.zero_stage}
    if knobs.zero_stage == 0:
        return section
    values = knobs.model_dump(mode="json")
    names = _SHARED_KNOBS + (_STAGE3_KNOBS if knobs.zero_stage == 3 else ())
    section |= {name: values[name] for name in names if values[name] is not None}
    if knobs.offload_optimizer is Offload.CPU:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
    if knobs.offload_param is Offload.CPU:
        section["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    return section


@dataclass(frozen=True)
class Engine:
    """A DeepSpeed engine and what it was built from."""

    engine: deepspeed.DeepSpeedEngine
    config: JsonObject
    optimizer: JsonObject
    """`class` (dotted name) and its arguments."""
    learning_rate: float

    def hold_weights(self) -> None:
        """From now on optimizer steps do all their work and leave the weights as they are: a learning rate of 0."""
        self._set_learning_rate(0.0)

    def begin_anew(self) -> None:
        """Learn from here on with the optimizer's states as they are before a first step: all zero."""
        self._set_learning_rate(self.learning_rate)
        for state in self.engine.basic_optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif name == "step":
                    state[name] = 0  # DeepSpeed's own Adam counts in a plain number

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = rate


def select_accelerator(device: Device) -> None:
    """Make DeepSpeed compute on `device`; it chooses for itself only when it is imported."""
    accelerator = real_accelerator.get_accelerator()
    if accelerator.device_name() != device.kind:
        assert device.kind == "cpu", "a trial on CUDA in a process whose DeepSpeed sees no GPU"
        real_accelerator.set_accelerator(real_accelerator.CPU_Accelerator())
    # it serves inference alone, and would start a compiler in every process that has one
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def build_engine(model: nn.Module, config: TrialConfig, resolved: JsonObject, device: Device) -> Engine:
    """Wrap `model` by DeepSpeed with the optimizer that `config` asks for."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, description = _optimizer(parameters, config, device)
    if device.backend == "gloo":
        require_gloo_room()  # DeepSpeed makes a group of its own
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=resolved)
    return Engine(engine, resolved, description, config.train.learning_rate)


def _optimizer(
    parameters: list[nn.Parameter], config: TrialConfig, device: Device
) -> tuple[torch.optim.Optimizer, JsonObject]:
    rate, decay = config.train.learning_rate, config.train.weight_decay
    description: JsonObject = {"lr": rate, "weight_decay": decay}
    optimizer: torch.optim.Optimizer
    if config.knobs.optimizer is Optimizer.SGD:
        optimizer = torch.optim.SGD(parameters, lr=rate, weight_decay=decay, fused=True)
        return optimizer, {"class": "torch.optim.SGD", **description, "fused": True}
    description |= {"betas": list(ADAM_BETAS), "eps": ADAM_EPS}
    if device.kind == "cuda" and config.knobs.offload_optimizer is Offload.CPU:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
            parameters, lr=rate, weight_decay=decay, betas=ADAM_BETAS, eps=ADAM_EPS
        )
        return optimizer, {"class": "deepspeed.ops.adam.DeepSpeedCPUAdam", **description}
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True)
    return optimizer, {"class": "torch.optim.AdamW", **description, "fused": True}
