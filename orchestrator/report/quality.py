"""What a report says about the loss on held-out rows."""

from collections.abc import Iterable

from orchestrator.contract.units import format_rate
from orchestrator.report.rows import TrialRow
from orchestrator.report.summary import Summary

EVAL_COLUMNS = ("eval loss", "cannot win")


def has_losses(summary: Summary) -> bool:
    """Whether any trial's loss was taken."""
    return any(row.eval_loss is not None for row in summary.rows)


def loss_cell(row: TrialRow) -> str | None:
    """The loss, and how far it is from the baseline's."""
    if row.eval_loss is None:
        return None
    if row.is_baseline or row.eval_loss_excess is None:
        return f"{row.eval_loss:.4f}"
    return f"{row.eval_loss:.4f} ({row.eval_loss_excess * 100:+.1f} %)"


def loss_headline(summary: Summary) -> Iterable[str]:
    """Who cannot win for its loss, or that there is nothing to compare with."""
    within = summary.eval_loss_within
    barred = [row for row in summary.ranked if row.cannot_win and row.eval_loss is not None]
    if barred and within is not None:
        fastest = max(barred, key=lambda row: row.tokens_per_second or 0.0)
        trials = "1 trial fits but cannot win" if len(barred) == 1 else f"{len(barred)} trials fit but cannot win"
        yield (
            f"{trials}: limits.eval_loss_within allows {_percent(within)} above the baseline's eval loss; the fastest"
            f" of them is trial {fastest.trial} ({fastest.label}),"
            f" {format_rate(fastest.tokens_per_second or 0)} tokens/s: {fastest.cannot_win}."
        )
    if summary.loss_warning:
        yield summary.loss_warning


def loss_note(summary: Summary) -> Iterable[str]:
    """What the figure is."""
    if not has_losses(summary):
        return
    trained = {row.trained_tokens for row in summary.rows if row.trained_tokens is not None}
    data = summary.facts.data if summary.facts is not None else None
    rows = f"{data.eval_rows} held-out rows ({data.eval_tokens} tokens)" if data is not None else "the held-out rows"
    yield (
        f"eval loss: mean cross-entropy on {rows}, in nats a token, after training on"
        f" {' or '.join(f'{tokens:,}' for tokens in sorted(trained))} tokens from the first weights on, the same rows"
        " in the same order for every trial; in brackets against the baseline's."
    )


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.3g} %"
