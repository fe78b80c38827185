"""The plots of the HTML report."""

from collections import defaultdict
from collections.abc import Mapping

import pandas  # noqa: F401  # plotly looks for it by name, also while another thread (MLflow's) is importing it
import plotly.graph_objects as go

from orchestrator.contract.units import MIB
from orchestrator.report.rows import TrialRow
from orchestrator.report.summary import OOM_KINDS, Summary

_COLOURS = {"fits": "#2a7f62", "needs more memory": "#c0392b", "ended otherwise": "#7f8c8d"}


def figures(summary: Summary) -> Mapping[str, go.Figure]:
    """Every plot that the trials allow, by its title."""
    plots: dict[str, go.Figure] = {}
    if any(row.tokens_per_second for row in summary.rows):
        plots["Speed against memory"] = speed_against_memory(summary)
        plots["Best so far"] = best_so_far(summary)
    searched = searched_knobs(summary)
    if searched:
        plots["Results by knob"] = results_by_knob(summary, searched)
    return plots


def searched_knobs(summary: Summary) -> tuple[str, ...]:
    """Knobs that took more than one value among the ended trials."""
    values = defaultdict(set)
    for row in summary.ended:
        for knob, value in row.config.items():
            values[knob].add(str(value))
    return tuple(knob for knob, seen in values.items() if len(seen) > 1)


def speed_against_memory(summary: Summary) -> go.Figure:
    """Each trial that ran: peak memory in MiB against tokens/s, with the limit as a line."""
    figure = go.Figure()
    for group in _COLOURS:
        rows = [row for row in summary.ended if _group(row) == group and row.tokens_per_second is not None]
        if not rows:
            continue
        figure.add_scatter(
            x=[(row.peak_memory_bytes or 0) / MIB for row in rows],
            y=[row.tokens_per_second for row in rows],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [(row.tokens_per_second_high or 0) - (row.tokens_per_second or 0) for row in rows],
                "arrayminus": [(row.tokens_per_second or 0) - (row.tokens_per_second_low or 0) for row in rows],
            },
            text=[f"trial {row.trial}: {row.label}" for row in rows],
            mode="markers",
            name=group,
            marker={"color": _COLOURS[group]},
        )
    limits = {row.limit_bytes for row in summary.rows if row.limit_bytes is not None}
    for limit_bytes in sorted(limits):
        figure.add_vline(x=limit_bytes / MIB, line_dash="dash", annotation_text="limit")
    figure.update_layout(xaxis_title="peak memory of the largest rank (MiB)", yaxis_title="tokens/s without padding")
    return figure


def best_so_far(summary: Summary) -> go.Figure:
    """The fastest trial that fits, after each ended trial."""
    numbers, speeds, best = [], [], 0.0
    for row in summary.ended:
        if _group(row) == "fits":
            best = max(best, row.tokens_per_second or 0.0)
        if best:
            numbers.append(row.trial)
            speeds.append(best)
    figure = go.Figure()
    figure.add_scatter(x=numbers, y=speeds, mode="lines+markers", line_shape="hv", name="best that fits")
    figure.update_layout(xaxis_title="trial", yaxis_title="tokens/s without padding")
    return figure


def results_by_knob(summary: Summary, knobs: tuple[str, ...]) -> go.Figure:
    """For each value of each searched knob: how many trials fit, ran out of memory, or ended otherwise."""
    figure = go.Figure()
    bars = sorted({(knob, str(row.config[knob])) for row in summary.ended for knob in knobs})
    for group, colour in _COLOURS.items():
        counts = [
            sum(1 for row in summary.ended if str(row.config[knob]) == value and _group(row) == group)
            for knob, value in bars
        ]
        axis = [[knob for knob, _ in bars], [value for _, value in bars]]
        figure.add_bar(x=axis, y=counts, name=group, marker_color=colour)
    figure.update_layout(barmode="stack", yaxis_title="trials")
    return figure


def _group(row: TrialRow) -> str:
    kind = row.outcome["kind"] if row.outcome is not None else ""
    if kind == "ok":
        return "fits"
    return "needs more memory" if kind in OOM_KINDS else "ended otherwise"
