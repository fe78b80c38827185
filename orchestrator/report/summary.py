"""A sweep as a whole: who won, by how much, what fits, what does not and by how much it misses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.contract.facts import Facts
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.contract.units import format_rate
from orchestrator.placement.quarantine import ExcludedNode, excluded_nodes
from orchestrator.report.rows import TrialRow, trial_row
from orchestrator.search import ranking
from orchestrator.search.cost import Price, SweepCost, price_of, sweep_cost
from orchestrator.search.quality import lossy
from orchestrator.search.reported import reported
from orchestrator.spec.sweep import LimitsSection, Objective, ResourcesSection

OOM_KINDS = frozenset({"oom_device", "oom_host", "over_limit"})
"""Outcomes that say: needs more memory than it may have."""
REJECTED = "rejected"


class BestRow(TrialRow):
    """The winner's row and what it gains."""

    baseline_speedup: float | None = None
    """Winner's tokens/s over the baseline's; None when no baseline was given or it has no speed."""
    not_distinguishable: tuple[int, ...] = ()
    """Trials whose 95 % interval of tokens/s overlaps the winner's, all of them confirmed like it, or none."""
    cost: SweepCost | None = None
    """What the sweep has cost and what the winner saves."""


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
    cost: SweepCost
    eval_loss_within: float | None = None
    """How far a winner's eval loss may be above the baseline's, as a fraction of it."""
    excluded: tuple[ExcludedNode, ...] = ()
    """Nodes that fail what others pass, with what was seen there."""

    @property
    def node_warnings(self) -> tuple[str, ...]:
        """A line for each excluded node."""
        return tuple(
            f"Node {each.node} gets no more trials while others can hold them: {'; '.join(each.evidence[:2])}."
            for each in self.excluded
        )

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
    def not_launched(self) -> int:
        """How many candidates are predicted not to fit: those in `rejected`, and those too sure to be proposed."""
        return len(self.rejected) + sum(self.sweep.left_out.values())

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
    def is_speed_first(self) -> bool:
        """Whether the highest tokens/s come before all else."""
        return ranking.is_speed_first(self.objectives)

    @property
    def winner_text(self) -> str:
        """The winner and its gain in one sentence."""
        if self.best is None and self.ranked:
            return f"{self.fit} of {len(self.ended)} fit, but none of them may win: {self.ranked[0].cannot_win}."
        if self.best is None:
            return f"0 of {len(self.ended)} fit." if self.ended else "No trial has ended yet."
        speed = f"trial {self.best.trial} ({self.best.label}): {format_rate(self.best.tokens_per_second or 0)} tokens/s"
        if self.best.baseline_speedup is None:
            return f"{speed}."
        if self.best.is_baseline:
            return f"{speed}; the baseline itself is the best."
        return f"{speed}, {self.best.baseline_speedup:.2f}x the baseline."

    @property
    def loss_warning(self) -> str:
        """Says so when the baseline has ended without the loss that all others should be held against."""
        baseline = self.baseline
        if self.eval_loss_within is None or baseline is None or baseline.eval_loss is not None:
            return ""
        if baseline.trial not in {row.trial for row in self.ended} and baseline not in self.rejected:
            return ""
        return (
            f"limits.eval_loss_within compares nothing: the baseline (trial {baseline.trial}) has no eval loss"
            f" ({baseline.summary}), so every trial that fits may win; give a baseline that runs."
        )


def summarize(sweep: SweepRecord, trials: Sequence[TrialRecord], facts: Facts | None) -> Summary:
    """Everything that a report says about `trials` of `sweep`."""
    objectives = _objectives(sweep)
    figures = reported(trials)
    rows = {
        record.trial: trial_row(record, sweep.state, figures.get(record.trial))
        for record in sorted(trials, key=lambda each: each.trial)
    }
    within = _eval_loss_within(sweep)
    ranked = ranking.ranked(objectives, trials, within)
    baseline = next((record for record in trials if record.is_baseline), None)
    rows |= _against_loss(rows, baseline, lossy(within, trials))
    may_win = bool(ranked) and not rows[ranked[0].trial].cannot_win
    alike = ranking.tied(objectives, trials, ranked[0]) if may_win else set()
    ties = tuple(each.trial for each in ranked if each.trial in alike and not rows[each.trial].cannot_win)
    cost = sweep_cost(trials, ranked[0] if may_win else None, baseline, _price(sweep), sweep.planned_tokens)
    best = _best_row(rows[ranked[0].trial], ties, rows[baseline.trial] if baseline else None) if may_win else None
    return Summary(
        sweep=sweep,
        facts=facts,
        objectives=objectives,
        rows=tuple(rows.values()),
        ranked=tuple(rows[record.trial] for record in ranked),
        best=best.model_copy(update={"cost": cost}) if best is not None else None,
        baseline=rows[baseline.trial] if baseline else None,
        pareto=tuple(record.trial for record in ranking.pareto_front(objectives, trials, within))
        if len(objectives) > 1
        else (),
        cost=cost,
        eval_loss_within=within,
        excluded=excluded_nodes(trials),
    )


def _price(sweep: SweepRecord) -> Price | None:
    resources = sweep.spec.get("resources")
    return price_of(ResourcesSection.model_validate(resources)) if isinstance(resources, dict) else None


def _eval_loss_within(sweep: SweepRecord) -> float | None:
    limits = sweep.spec.get("limits")
    return LimitsSection.model_validate(limits).eval_loss_within if isinstance(limits, dict) else None


def _against_loss(
    rows: Mapping[int, TrialRow], baseline: TrialRecord | None, barred: Mapping[int, float | None]
) -> dict[int, TrialRow]:
    """The rows with their loss against the baseline's, those of `barred` with why they cannot win."""
    baseline_loss = rows[baseline.trial].eval_loss if baseline is not None else None
    found = {}
    for number, row in rows.items():
        excess = row.eval_loss / baseline_loss - 1 if row.eval_loss is not None and baseline_loss else None
        found[number] = row.model_copy(
            update={"eval_loss_excess": excess, "cannot_win": _why_barred(barred[number]) if number in barred else ""}
        )
    return found


def _why_barred(excess: float | None) -> str:
    return (
        "slower than the best, no eval loss taken"
        if excess is None
        else f"eval loss {excess * 100:.1f} % above the baseline's"
    )


def _objectives(sweep: SweepRecord) -> tuple[Objective, ...]:
    stored = sweep.spec.get("objective")
    if not isinstance(stored, list):
        return (Objective(),)
    return tuple(Objective.model_validate(each) for each in stored)


def _best_row(
    winner: TrialRow,
    ties: tuple[int, ...],
    baseline: TrialRow | None,
) -> BestRow:
    speed = winner.tokens_per_second
    slow = baseline.tokens_per_second if baseline is not None else None
    return BestRow(**dict(winner), baseline_speedup=speed / slow if speed and slow else None, not_distinguishable=ties)
