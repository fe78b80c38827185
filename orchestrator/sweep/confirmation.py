"""Which of the best trials is measured again next, before a winner is declared. Pure.

The best few run one after another and in turns (A B C A B C), so that what drifts on the machine meets all of them
alike. What is due follows from the records alone: a resumed sweep goes on where it was.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.outcome import MAX_RETRIES, RETRIED_KINDS
from orchestrator.contract.record import TrialRecord
from orchestrator.search.quality import lossy
from orchestrator.search.ranking import is_feasible, is_speed_first
from orchestrator.search.reported import confirmed_runs, reported, thrashes
from orchestrator.spec.sweep import ConfirmSection, Objective

MOST_CONFIRMED = 5
"""Trials that are measured again at most where the spec's `top` asks for fewer but more cannot be told from the best:
each costs whole launches, and the headroom decides among those that tie."""


@dataclass(frozen=True)
class Due:
    """One more run of a trial. `turn` counts from 1; `chosen` are the trials that are confirmed, by number."""

    record: TrialRecord
    turn: int
    chosen: tuple[int, ...]


def next_confirmation(
    objectives: Sequence[Objective],
    confirm: ConfirmSection,
    records: Sequence[TrialRecord],
    eval_loss_within: float | None = None,
) -> Due | None:
    """The next run, None when every chosen trial has had its runs or was given up."""
    chosen = chosen_trials(objectives, confirm.top, records, eval_loss_within) if confirm.repeats else []
    numbers = tuple(record.trial for record in chosen)
    due = [record for record in chosen if _runs(record) < confirm.repeats and not _is_given_up(record)]
    if not due:
        return None
    first = min(due, key=_runs)
    return Due(first, _runs(first) + 1, numbers)


def whole_confirmation_s(
    objectives: Sequence[Objective],
    confirm: ConfirmSection,
    records: Sequence[TrialRecord],
    eval_loss_within: float | None = None,
) -> float:
    """Seconds that all runs of the confirmation take, by what their trials took in the search. What is done of them
    counts too, so that a search which has ended to leave room for them does not begin again."""
    chosen = chosen_trials(objectives, confirm.top, records, eval_loss_within)
    ran = (record.searches[-1] for record in chosen)
    return confirm.repeats * sum((attempt.ended_s or attempt.dispatched_s) - attempt.dispatched_s for attempt in ran)


def chosen_trials(
    objectives: Sequence[Objective], top: int, records: Sequence[TrialRecord], eval_loss_within: float | None = None
) -> list[TrialRecord]:
    """The best `top` by the search's figures, and what may be as fast as the best of them: its 95 % interval reaches
    the other's, also where it thrashed, up to MOST_CONFIRMED in all; and the baseline, so that the gain is one between
    figures of one kind.

    A trial that failed when it was measured again has lost its place to the next one. None unless tokens/s come first.
    """
    if not top or not is_speed_first(objectives):
        return []
    barred = lossy(eval_loss_within, records)
    able = [_searched(record) for record in records if is_feasible(record) and record.trial not in barred]
    figures = reported(able)
    by_speed = sorted(able, key=lambda record: -figures[record.trial].tokens_per_second)
    chosen = sorted(by_speed, key=thrashes)[:top]
    if chosen:
        least = figures[chosen[0].trial].tokens_per_second_low
        rivals = [
            each for each in by_speed if each not in chosen and figures[each.trial].tokens_per_second_high >= least
        ]
        chosen += rivals[: max(0, MOST_CONFIRMED - len(chosen))]
        chosen += [each for each in able if each.is_baseline and each not in chosen]
    whole = {record.trial: record for record in records}
    return [whole[record.trial] for record in chosen]


def _searched(record: TrialRecord) -> TrialRecord:
    """The trial as the search left it, so that the choice stays the same while it is carried out."""
    return record.model_copy(update={"attempts": record.searches})


def _runs(record: TrialRecord) -> int:
    return len(confirmed_runs(record))


def _is_given_up(record: TrialRecord) -> bool:
    """Whether what lies outside of the trial ended its runs too often."""
    kinds = Counter(attempt.outcome.kind for attempt in record.confirmations if attempt.outcome is not None)
    return any(kind in RETRIED_KINDS and count > MAX_RETRIES for kind, count in kinds.items())
