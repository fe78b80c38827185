"""Which trials lose too much quality to win: their eval loss against the baseline's. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.contract.record import TrialRecord


@dataclass(frozen=True)
class LossLimit:
    """How far a winner's eval loss may be above the baseline's, as a fraction of it. Losses are in nats a token."""

    baseline_loss: float
    within: float

    def allows(self, record: TrialRecord) -> bool:
        """Whether the trial may win; one whose loss was not taken may not."""
        excess = self.excess(record)
        return excess is not None and excess <= self.within

    def excess(self, record: TrialRecord) -> float | None:
        """By which fraction of the baseline's loss the trial's is above it; negative below."""
        loss = eval_loss(record)
        return None if loss is None else loss / self.baseline_loss - 1


def eval_loss(record: TrialRecord) -> float | None:
    """The trial's loss on held-out rows; None when it was not taken."""
    return record.measurement.eval_loss if record.measurement is not None else None


def loss_limit(within: float | None, records: Iterable[TrialRecord]) -> LossLimit | None:
    """None where the spec sets none, and while the baseline has no loss to compare with."""
    if within is None:
        return None
    losses = (eval_loss(record) for record in records if record.is_baseline)
    baseline_loss = next((loss for loss in losses if loss is not None), None)
    return LossLimit(baseline_loss, within) if baseline_loss else None


def lossy(within: float | None, records: Iterable[TrialRecord]) -> dict[int, float | None]:
    """Trials that ran and cannot win for their eval loss, with their excess over the baseline's."""
    records = list(records)
    limit = loss_limit(within, records)
    if limit is None:
        return {}
    ran = (record for record in records if record.measurement is not None)
    return {record.trial: limit.excess(record) for record in ran if not limit.allows(record)}
