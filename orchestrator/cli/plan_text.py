"""A plan for people."""

from orchestrator.cli.output import Output
from orchestrator.cli.plan_document import Plan, PlanCandidate
from orchestrator.contract.units import format_bytes, format_duration, format_hours, format_money, format_rate
from orchestrator.report.rows import odds
from orchestrator.report.tables import NOTHING, Table
from orchestrator.report.terminal import terminal_table
from orchestrator.search.cost import TrainingCost
from orchestrator.search.ranking import is_guided
from orchestrator.spec.sweep import DOLLARS, Sampler, SweepSpec

SHOWN_CANDIDATES = 12


def show_plan(plan: Plan, spec: SweepSpec, output: Output) -> None:
    """Print `plan` for people."""
    illegal = sum(plan.illegal.values())
    made_from = f"{plan.points} points: {plan.duplicates} duplicates, {illegal} illegal"
    output.show(f"{plan.name}: {len(plan.candidates)} candidates from {made_from}.")
    model, data = plan.facts.model, plan.facts.data
    output.show(
        f"Model: {model.model_type}, {model.total_parameters:,} parameters, {model.num_layers} layers. "
        f"Data: {data.rows} rows ({data.format}), {data.mean_row_tokens:.0f} tokens on average, "
        f"{data.longest_row_tokens} at most, {data.truncated_rows} cut short."
    )
    limit = "none" if plan.limit_bytes is None else format_bytes(plan.limit_bytes)
    output.show(f"Device: {plan.facts.device_name}. Memory limit per device: {limit}. {_end(plan, spec)}")
    choices = "; ".join(f"{name}: {', '.join(values)}" for name, values in plan.choices.items())
    output.show(f"{'Default choices' if plan.is_default else 'Choices'}: {choices or 'none'}.")
    if plan.sizes:
        sizes = "; ".join(
            f"{knob}: {', '.join(f'{value:,}' for value in values)}" for knob, values in plan.sizes.items()
        )
        output.show(f"Sizes in elements: {sizes}.")
    for reason, count in plan.illegal.items():
        output.show(f"Illegal ({count}): {reason}")
    for note in plan.notes:
        output.show(f"Note: {note}.")
    for line in _predicted_lines(plan):
        output.show(line)
    output.show(terminal_table(_table(plan)))


def _end(plan: Plan, spec: SweepSpec) -> str:
    """When the sweep is over."""
    budget = spec.budget
    times = [f"{plan.trials} trials"]
    times += [format_duration(budget.time)] if budget.time is not None else []
    times += [f"{budget.device_hours:g} device-hours"] if budget.device_hours is not None else []
    times += [format_money(budget.money, plan.currency or DOLLARS)] if budget.money is not None else []
    search = spec.search
    knows_gain = search is None or (search.sampler is Sampler.GUIDED and search.stop_below_gain > 0)
    early = ", earlier once no candidate is worth its trial" if knows_gain and is_guided(spec.objective) else ""
    return f"Ends after {' or '.join(times)}{early}."


def _predicted_lines(plan: Plan) -> list[str]:
    """What the predictions come to: rejected candidates with reasons, and the cost."""
    predicted = [each.predicted for each in plan.candidates if each.predicted is not None]
    if not predicted:
        return ["Nothing is predicted."]
    likely = sum(each.is_likely for each in predicted)
    rejected = sum(plan.rejected.values())
    lines = [f"Predicted, not measured: {likely} of {len(predicted)} candidates fit, {rejected} would not be launched."]
    lines += [f"Rejected ({count}): most of it {reason.replace('_', ' ')}" for reason, count in plan.rejected.items()]
    if plan.preview is not None:
        cost = plan.preview
        beside = "one after another" if cost.lanes == 1 else f"{cost.lanes} side by side on this machine"
        confirmed = f", and {cost.confirmations:,} runs that confirm the best" if cost.confirmations else ""
        money = f", {format_money(cost.money, plan.currency)}" if cost.money is not None and plan.currency else ""
        lines.append(
            f"Predicted cost: at most {cost.trials} trials of {format_duration(cost.trial_s)} on average, {beside}"
            f"{confirmed}: about {format_duration(cost.wall_s)}, {format_hours(cost.device_hours)} device-hours{money}."
        )
    return lines


def _table(plan: Plan) -> Table:
    shown = plan.candidates[:SHOWN_CANDIDATES]
    title = "Candidates" if len(shown) == len(plan.candidates) else f"The first {len(shown)} candidates"
    if any(each.predicted for each in shown):
        title += " by predicted speed; tokens/s, needs and P(fits) are predicted, not measured"
    if shown and shown[0].is_baseline:
        title += "; the baseline (b) runs first, the sampler chooses the order of the rest"
    if plan.planned_tokens is not None:
        title += f"; whole training: {plan.planned_tokens:,} tokens"
    columns = (
        "candidate", "configuration", "tokens/s", "whole training", "P(fits)", "needs", "most of it", "accumulation",
        "ranks",
    )  # fmt: skip
    rows = tuple(_row(each, plan.currency) for each in shown)
    return Table(title, columns, rows, frozenset({"candidate", "configuration", "most of it"}))


def _row(each: PlanCandidate, currency: str | None) -> tuple[str, ...]:
    predicted = each.predicted
    speed = predicted.tokens_per_second if predicted else None
    chance = predicted.probability_fits if predicted else None
    return (
        f"{each.candidate} b" if each.is_baseline else each.candidate,
        each.label,
        format_rate(speed) if speed is not None else NOTHING,
        _training(predicted.training if predicted else None, currency),
        odds(chance) if chance is not None else NOTHING,
        format_bytes(predicted.needed_bytes) if predicted else NOTHING,
        f"{predicted.binding_term.replace('_', ' ')} in {predicted.binding_phase}" if predicted else NOTHING,
        str(each.gradient_accumulation),
        str(each.world_size),
    )


def _training(training: TrainingCost | None, currency: str | None) -> str:
    if training is None:
        return NOTHING
    money = f", {format_money(training.money, currency)}" if training.money is not None and currency else ""
    return f"{format_duration(training.training_s)}{money}"
