"""The loss on held-out rows: token-weighted, of the same value however rows are batched, padded and spread."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from orchestrator.trial.checks import LossDiverged
from orchestrator.trial.data import IGNORED_LABEL, EvalBatch
from orchestrator.trial.device import Device
from orchestrator.trial.engine import Engine
from orchestrator.trial.events import EventLog
from orchestrator.trial.group import Group


class EvalLoss(NamedTuple):
    """Mean cross-entropy over `tokens` predicted tokens of all ranks, in nats a token."""

    loss: float
    tokens: int


class Quality(NamedTuple):
    """The fields of a Measurement that tell of quality."""

    eval_loss: float
    eval_tokens: int
    trained_tokens: int


def evaluate(engine: Engine, batches: Sequence[EvalBatch], group: Group, device: Device, events: EventLog) -> EvalLoss:
    """The loss of the weights as they are, without dropout. A collective: every rank brings as many `batches`.

    Raises LossDiverged, on every rank alike, when it is not finite.
    """
    total, tokens = 0.0, 0
    engine.engine.eval()
    with torch.no_grad():
        for each in batches:
            loss, count = _sum_of_losses(engine, each, device)
            if each.is_counted:
                total += loss
                tokens += count
            events.end_eval_batch(count)
    engine.engine.train()
    parts = group.gather((total, tokens))
    count = sum(part[1] for part in parts)
    mean = math.fsum(part[0] for part in parts) / count if all(math.isfinite(part[0]) for part in parts) else math.nan
    if not math.isfinite(mean):
        raise LossDiverged(f"the loss on the held-out rows after step {events.step} is not finite")
    return EvalLoss(mean, count)


def _sum_of_losses(engine: Engine, each: EvalBatch, device: Device) -> tuple[float, int]:
    """Row by row and in float32, so that neither padding nor the number of rows takes part."""
    batch = each.batch
    logits = engine.engine(
        input_ids=batch.input_ids.to(device.torch_device()),
        attention_mask=batch.attention_mask.to(device.torch_device()),
    ).logits
    total, tokens = 0.0, 0
    for row, labels in zip(logits, batch.labels, strict=True):
        length = int((labels != IGNORED_LABEL).sum())
        targets = labels[1:length].to(row.device)
        total += float(cross_entropy(row[: length - 1].float(), targets, reduction="sum"))
        tokens += length - 1
    return total, tokens
