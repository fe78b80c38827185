"""A sweep as a whole: who won, by how much, what fits, what does not and by how much it misses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.facts import Facts
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.report.rows import TrialRow, trial_row
from orchestrator.search import ranking
from orchestrator.spec.sweep import Objective

OOM_KINDS = frozenset({"oom_device", "oom_host", "over_limit"})
"""Outcomes that say: needs more memory than it may have."""


REJECTED = "rejected"


class BestRow(TrialRow):
    """The winner's row and what it gains."""

    baseline_speedup: float | None = None
    """Winner's tokens/s over the baseline's; None when no baseline was given or it has no speed."""
    not_distinguishable: tuple[int, ...] = ()
    """Trials whose 95 % interval of tokens/s overlaps the winner's."""


@dataclass(frozen=True)
class Summary:
    """What every rendering of a report starts from."""

    sweep: SweepRecord
    facts: Facts | None
    objectives: tuple[Objective, ...]
    rows: tuple[TrialRow, ...]
    """In order of trial number."""
    ranked: tuple[TrialRow, ...]
    """Trials that fit, best first by the first objective."""
    best: BestRow | None
    baseline: TrialRow | None
    pareto: tuple[int, ...]
    """With several objectives: trials that no other one beats in all of them."""

    @property
    def ended(self) -> tuple[TrialRow, ...]:
        """Launched trials with an outcome that stays: one that was cancelled runs again on resume."""
        passing = ("cancelled", REJECTED)
        return tuple(
            row for row in self.rows if row.state == "done" and row.outcome and row.outcome["kind"] not in passing
        )

    @property
    def rejected(self) -> tuple[TrialRow, ...]:
        """Candidates that were predicted not to fit and never launched."""
        return tuple(row for row in self.rows if row.outcome is not None and row.outcome["kind"] == REJECTED)

    @property
    def counts(self) -> Counter[str]:
        """Ended trials by outcome kind."""
        return Counter(str(row.outcome["kind"]) for row in self.ended if row.outcome is not None)

    @property
    def fit(self) -> int:
        """How many trials fit."""
        return len(self.ranked)

    @property
    def out_of_memory(self) -> int:
        """How many trials needed more memory than they may have."""
        return sum(count for kind, count in self.counts.items() if kind in OOM_KINDS)

    @property
    def closest(self) -> tuple[TrialRow, ...]:
        """Trials that ran out of memory and by how much is known, nearest to fitting first."""
        misses = [row for row in self.rows if row.shortfall_bytes is not None and row.shortfall_bytes > 0]
        return tuple(sorted(misses, key=lambda row: row.shortfall_bytes or 0))

    @property
    def winner_text(self) -> str:
        """The winner and its gain in one sentence."""
        if self.best is None:
            return f"0 of {len(self.ended)} fit." if self.ended else "No trial has ended yet."
        speed = f"trial {self.best.trial} ({self.best.label}): {self.best.tokens_per_second or 0:,.4g} tokens/s"
        if self.best.baseline_speedup is None:
            return f"{speed}."
        if self.best.is_baseline:
            return f"{speed}; the baseline itself is the fastest."
        return f"{speed}, {self.best.baseline_speedup:.2f}x the baseline."


def summarize(sweep: SweepRecord, trials: Sequence[TrialRecord], facts: Facts | None) -> Summary:
    """Everything that a report says about `trials` of `sweep`."""
    objectives = _objectives(sweep)
    rows = {record.trial: trial_row(record, sweep.state) for record in sorted(trials, key=lambda each: each.trial)}
    ranked = ranking.ranked(objectives, trials)
    baseline = next((record for record in trials if record.is_baseline), None)
    return Summary(
        sweep=sweep,
        facts=facts,
        objectives=objectives,
        rows=tuple(rows.values()),
        ranked=tuple(rows[record.trial] for record in ranked),
        best=_best_row(objectives, ranked, baseline, rows) if ranked else None,
        baseline=rows[baseline.trial] if baseline else None,
        pareto=tuple(record.trial for record in ranking.pareto_front(objectives, trials))
        if len(objectives) > 1
        else (),
    )


def _objectives(sweep: SweepRecord) -> tuple[Objective, ...]:
    stored = sweep.spec.get("objective")
    if not isinstance(stored, list):
        return (Objective(),)
    return tuple(Objective.model_validate(each) for each in stored)


def _best_row(
    objectives: Sequence[Objective],
    ranked: Sequence[TrialRecord],
    baseline: TrialRecord | None,
    rows: dict[int, TrialRow],
) -> BestRow:
    winner = rows[ranked[0].trial]
    is_speed = objectives[0].metric == "tokens_per_second"
    ties = tuple(record.trial for record in ranked[1:] if is_speed and overlaps(winner, rows[record.trial]))
    speedup = ranking.speedup(ranked[0], baseline) if baseline is not None else None
    return BestRow(**dict(winner), baseline_speedup=speedup, not_distinguishable=ties)


def overlaps(one: TrialRow, other: TrialRow) -> bool:
    """Whether the 95 % intervals of tokens/s overlap, so that neither can be called faster."""
    if one.tokens_per_second_low is None or one.tokens_per_second_high is None:
        return False
    if other.tokens_per_second_low is None or other.tokens_per_second_high is None:
        return False
    return (
        one.tokens_per_second_low <= other.tokens_per_second_high
        and other.tokens_per_second_low <= one.tokens_per_second_high
    )
