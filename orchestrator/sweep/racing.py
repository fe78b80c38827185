"""What a trial has to beat so that measuring it on is worth the time. Pure."""

from collections.abc import Iterable

from orchestrator.contract.record import TrialRecord
from orchestrator.search.quality import lossy
from orchestrator.search.ranking import is_feasible, is_speed_alone
from orchestrator.search.reported import reported, thrashes
from orchestrator.spec.sweep import SweepSpec


def tokens_per_second_to_beat(spec: SweepSpec, record: TrialRecord, records: Iterable[TrialRecord]) -> float | None:
    """The lower end of the 95 % interval of the fastest trial that may win; None where nothing is raced.

    A trial whose upper end lies below could be told from it, so it neither wins nor ties. The baseline is measured
    whole, since the gain is told against it, and so is every trial that is also held against others for its loss.
    """
    if not (spec.measure.racing and is_speed_alone(spec.objective)) or record.is_baseline or spec.measure.quality:
        return None
    records = list(records)
    barred = lossy(spec.limits.eval_loss_within, records)
    rivals = [each for each in records if is_feasible(each) and not thrashes(each) and each.trial not in barred]
    fastest = max(reported(rivals).values(), key=lambda figures: figures.tokens_per_second, default=None)
    return fastest.tokens_per_second_low if fastest is not None else None
