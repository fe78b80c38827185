"""What a trial has to beat so that measuring it on is worth the time. Pure."""

from collections.abc import Iterable

from orchestrator.contract.record import TrialRecord
from orchestrator.search.quality import loss_limit
from orchestrator.search.ranking import contenders, is_speed_alone
from orchestrator.search.reported import reported
from orchestrator.spec.sweep import SweepSpec


def tokens_per_second_to_beat(spec: SweepSpec, record: TrialRecord, records: Iterable[TrialRecord]) -> float | None:
    """The lower end of the 95 % interval of the fastest trial that may win; None where nothing is raced.

    A trial whose upper end lies below could be told from it, so it neither wins nor ties. The baseline is measured
    whole, since the gain is told against it. Where the loss is taken but bounds nobody, every trial gets one; where it
    bounds who may win, nothing is raced before the baseline's loss says who that is.
    """
    if not (spec.measure.racing and is_speed_alone(spec.objective)) or record.is_baseline:
        return None
    records = list(records)
    within = spec.limits.eval_loss_within
    if spec.measure.quality is not None and loss_limit(within, records) is None:
        return None
    rivals = contenders(records, within)
    fastest = max(reported(rivals).values(), key=lambda figures: figures.tokens_per_second, default=None)
    return fastest.tokens_per_second_low if fastest is not None else None
