"""A win must be earned: what has to hold before a trial may count as having run its candidate."""

import torch
from pydantic import JsonValue
from torch import nn

from orchestrator.contract.config import Method, TrialConfig, content_hash
from orchestrator.trial.engine import Engine
from orchestrator.trial.group import Group

_SAMPLED_ELEMENTS = 1024


class InvalidTrial(Exception):
    """The trial does not do what its candidate says; the text is the reason."""


class LossDiverged(Exception):
    """The loss is not finite; the text says at which step."""


class FirstUpdate:
    """Watches that the first optimizer step moves what is to be trained.

    An adapter's B matrix starts at zero and leaves it exactly when its gradient is not zero. Of other tensors a
    sample of elements is compared, and one tensor that moved is enough: an update can be lost in bf16's rounding.
    """

    def __init__(self, engine: Engine, method: Method) -> None:
        trainable = [
            (name, parameter) for name, parameter in engine.engine.module.named_parameters() if parameter.requires_grad
        ]
        self._adapters = [(name, each) for name, each in trainable if "lora_B" in name]
        self._others = [(each, _sample(each)) for name, each in trainable] if method is Method.FULL else []

    def check(self, group: Group) -> None:
        """Raise InvalidTrial when a gradient was missing. A collective: every rank calls it after its first step."""
        moved = {name for name, parameter in self._adapters if bool(_local(parameter).any())}
        has_moved = any(not torch.equal(_sample(parameter), before) for parameter, before in self._others)
        answers = group.gather((moved, has_moved))
        dead = [name for name, _ in self._adapters if not any(name in moved for moved, _ in answers)]
        if dead:
            raise InvalidTrial(
                f"{len(dead)} of {len(self._adapters)} adapters had no gradient in the first step, e.g. {dead[0]}"
            )
        if self._others and not any(has_moved for _, has_moved in answers):
            raise InvalidTrial("no trained parameter changed in the first optimizer step")
        if not self._adapters and not self._others:
            raise InvalidTrial("nothing is trained: the candidate has no adapter and no trainable parameter")


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard under ZeRO-3, else the whole parameter."""
    shard: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return shard.detach()


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    flat = _local(parameter).reshape(-1)
    stride = max(1, len(flat) // _SAMPLED_ELEMENTS)
    return flat[::stride].clone()


def check_same_run(config: TrialConfig, engine: Engine, world_size: int, group: Group) -> None:
    """Raise InvalidTrial unless every rank runs the candidate's batch and one resolved configuration."""
    run = engine.engine
    batch = (run.train_micro_batch_size_per_gpu(), run.gradient_accumulation_steps(), run.train_batch_size())
    wanted = (config.knobs.micro_batch, config.gradient_accumulation, config.train.global_batch)
    mine: JsonValue = {"config": config.candidate, "deepspeed": engine.config, "optimizer": engine.optimizer}
    answers = group.gather((world_size, batch, content_hash(mine)))
    for rank, (size, seen, _) in enumerate(answers):
        if size != config.world_size or seen != wanted:
            raise InvalidTrial(
                f"rank {rank} runs micro-batch {seen[0]} x accumulation {seen[1]} = batch {seen[2]} on {size} ranks,"
                f" the candidate says {wanted[0]} x {wanted[1]} = {wanted[2]} on {config.world_size}"
            )
    if len({answer[2] for answer in answers}) > 1:
        raise InvalidTrial("the ranks of the trial run different configurations")
