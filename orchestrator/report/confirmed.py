"""What a report says about runs that were repeated, ties, and figures that hang on luck."""

from collections.abc import Iterable

from orchestrator.contract.record import SweepState
from orchestrator.contract.units import format_rate
from orchestrator.report.rows import TrialRow
from orchestrator.report.summary import Summary
from orchestrator.search.ranking import TIE

CONFIRM_COLUMNS = ("runs", "in search")
_SHOWN_TIES = 5


def has_confirmations(summary: Summary) -> bool:
    """Whether any trial was measured again."""
    return any(row.confirmation_runs for row in summary.rows)


def confirm_headline(summary: Summary) -> Iterable[str]:
    """How sure the winner is, whom it cannot be told from, and who lost when it was measured again."""
    best = summary.best
    if best is not None and best.confirmation_runs:
        times = "once" if best.confirmation_runs == 1 else f"{best.confirmation_runs} times"
        yield (
            f"Confirmed: measured {times} again after the search, which had found "
            f"{format_rate(best.search_tokens_per_second or 0)} tokens/s."
        )
        if summary.sweep.state in (SweepState.STOPPED, SweepState.INTERRUPTED):
            yield "The confirmation has not come to its end; `brimful resume` goes on with it."
        baseline = summary.baseline
        if baseline is not None and baseline.tokens_per_second is not None and not baseline.confirmation_runs:
            yield (
                "The baseline was not measured again: the gain is against its tokens/s in the search, where trials may"
                " have run side by side."
            )
    elif best is not None and summary.sweep.state is not SweepState.RUNNING and summary.is_speed_first:
        yield "Not confirmed: its tokens/s are the search's, and the highest of many is likely a little too high."
    if best is not None and best.not_distinguishable:
        tie = "" if len(summary.objectives) > 1 else f"; within {TIE * 100:.0f} % the larger headroom wins"
        yield f"Not distinguishable from it (95 % intervals overlap): {trials(best.not_distinguishable)}{tie}."
    for row in summary.rows:
        if row.failed_confirmation:
            yield f"Trial {row.trial} ({row.label}) ran in the search but cannot win: {row.summary}."
    thrashing = tuple(row.trial for row in summary.ranked if row.is_thrashing)
    if thrashing:
        yield (
            f"Thrashing, so ranked behind the others: {trials(thrashing)}. There memory is so short that speed hangs on"
            " luck."
        )


def confirm_notes(summary: Summary) -> Iterable[str]:
    """What the figures are."""
    if has_confirmations(summary):
        yield (
            "Confirmed trials: tokens/s, step time, MFU and HFU are the mean of the runs after the search alone, one"
            " after another and in turns; the interval holds what runs differ by, pooled over the confirmed trials"
            " (Student's t); peak memory is the highest of all runs. In search: what the search measured."
        )
    raced = sum(row.raced_out for row in summary.rows)
    if raced:
        those = "1 trial" if raced == 1 else f"{raced} trials"
        yield (
            f"{those} ended early: after measure.min_steps steps or more the 95 % interval lay below that of the"
            " best so far. Such figures are less sure."
        )


def confirm_cells(row: TrialRow) -> tuple[str | None, str | None]:
    """How often the trial was measured again, and the search's tokens/s."""
    if not row.confirmation_runs or row.search_tokens_per_second is None:
        return None, None
    return str(row.confirmation_runs), format_rate(row.search_tokens_per_second)


def trials(numbers: tuple[int, ...]) -> str:
    """The first few of the numbers in words."""
    if len(numbers) == 1:
        return f"trial {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:_SHOWN_TIES])
    more = f" and {len(numbers) - _SHOWN_TIES} more" if len(numbers) > _SHOWN_TIES else ""
    return f"trials {shown}{more}"
