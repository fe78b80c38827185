"""What follows from trials that failed for what may be the fault of their node; rebuilt from the records."""

from collections.abc import Iterable

from orchestrator.contract.outcome import Crashed, LostNode, Phase
from orchestrator.contract.record import AttemptRecord, Purpose, TrialRecord
from orchestrator.placement.quarantine import (
    ExcludedNode,
    excluded_nodes,
    failed_nodes,
    poison,
    wants_another_node,
)


class Suspects:
    """The trials that met such a failure, and the nodes that are excluded for it."""

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._records = {record.trial: record for record in records if failed_nodes(record)}
        self.excluded: tuple[ExcludedNode, ...] = excluded_nodes(self._records.values())

    def judged(self, record: TrialRecord, others: Iterable[TrialRecord]) -> TrialRecord:
        """`record`, whose last attempt has just ended, with what that means: a crash that is tried on another node, or
        a trial that is poison. `others`: all trials."""
        last = record.attempts[-1]
        if last.purpose is Purpose.SEARCH and isinstance(last.outcome, Crashed):
            if wants_another_node(record, [each for each in others if each.trial != record.trial]):
                record = _with_last(record, last.model_copy(update={"is_tried_elsewhere": True}))
        elif isinstance(last.outcome, LostNode) and (reason := poison(record)):
            end = Crashed(phase=Phase.START, rank=None, error=reason, evidence=last.outcome.evidence)
            record = _with_last(record, last.model_copy(update={"outcome": end}))
        if failed_nodes(record):
            self._records[record.trial] = record
            self.excluded = excluded_nodes(self._records.values())
        return record

    def avoid(self, record: TrialRecord | None = None) -> frozenset[str]:
        """Nodes on which `record`, or any trial, is not run."""
        excluded = frozenset(each.node for each in self.excluded)
        return excluded if record is None else excluded | failed_nodes(record)


def _with_last(record: TrialRecord, last: AttemptRecord) -> TrialRecord:
    return record.model_copy(update={"attempts": (*record.attempts[:-1], last)})
