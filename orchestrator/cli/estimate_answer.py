"""What `estimate` says: one document for programs, a bill and a verdict for people."""

from collections.abc import Sequence

from pydantic import JsonValue

from orchestrator.cli.output import Output
from orchestrator.contract.config import Frozen, TrialConfig
from orchestrator.contract.outcome import Phase
from orchestrator.contract.units import format_bytes, format_duration
from orchestrator.placement.changes import Change
from orchestrator.placement.forecast import Forecast
from orchestrator.placement.platform import Platform
from orchestrator.predict.memory import Bill
from orchestrator.predict.terms import total
from orchestrator.report.bill import bill_tables
from orchestrator.report.rows import odds
from orchestrator.report.terminal import terminal_table

ON_THE_EDGE = (0.2, 0.8)
"""Between these odds a verdict is called so."""
SHOWN_CHANGES = 3
"""Beside the cheapest."""


class ChangeAnswer(Frozen):
    """New values of knobs and what they would do."""

    knobs: dict[str, JsonValue]
    fits: bool
    probability_fits: float | None
    needed_bytes: int
    tokens_per_second: float | None


class Answer(Frozen):
    """What is predicted for one run; nothing is measured. Bytes are of the device with the most."""

    model: str
    total_parameters: int
    """Adapters included."""
    trained_parameters: int
    device: str
    world_size: int
    gradient_accumulation: int
    config: dict[str, JsonValue]
    """Every knob; None where it has no effect beside the others."""
    fits: bool | None
    """Whether it is more likely to fit than not; None without a capacity."""
    probability_fits: float | None
    binding_phase: Phase
    binding_term: str
    peak_allocated_bytes: int
    """Highest of all phases, as `max_memory_allocated` counts it."""
    peak_reserved_bytes: tuple[int, int]
    """What PyTorch's allocator reserves: with just enough memory, and with ample memory."""
    smallest_capacity_bytes: int
    """The least that the allocator must be allowed."""
    needed_bytes: int
    """The least that the device must have: with context and communicators, on CPU with the process' own space."""
    peak_device_bytes: int
    """On the device with the memory that it has, as nvidia-smi shows it."""
    peak_host_bytes: int
    """Of one node with all its ranks."""
    disk_bytes: int
    capacity_bytes: int | None
    room_bytes: int | None
    """Capacity less `needed_bytes`."""
    tokens_per_second: float | None
    """All ranks together; None where the device's rates are not known."""
    step_s: float | None
    mfu: float | None
    hfu: float | None
    slowest_term: str | None
    """What adds most to a step."""
    bill: Bill
    excludes: tuple[str, ...]
    assumptions: tuple[str, ...]
    change: ChangeAnswer | None
    """The cheapest single change that makes it fit, else the nearest to fitting; None where it fits."""
    other_changes: tuple[ChangeAnswer, ...]
    """Other single changes that make it fit, the fastest first."""


def answer(
    *,
    model: str,
    device: str,
    knobs: dict[str, JsonValue],
    config: TrialConfig,
    sizes: tuple[int, int],
    forecast: Forecast,
    platform: Platform,
    changes: Sequence[Change],
    assumptions: tuple[str, ...],
) -> Answer:
    """The document. `knobs`: values as the user knows them; `sizes`: weights in all, and trained ones."""
    verdict, time = forecast.verdict, forecast.time
    bill = verdict.bill
    on_cuda = platform.device == "cuda"
    beside_bytes = total(bill.device_overhead)
    capacity_bytes = verdict.capacity_bytes
    return Answer(
        model=model,
        total_parameters=sizes[0],
        trained_parameters=sizes[1],
        device=device,
        world_size=config.world_size,
        gradient_accumulation=config.gradient_accumulation,
        config=knobs,
        fits=None if forecast.probability_fits is None else forecast.is_likely,
        probability_fits=forecast.probability_fits,
        binding_phase=bill.binding_phase,
        binding_term=bill.binding_term,
        peak_allocated_bytes=bill.peak_allocated_bytes,
        peak_reserved_bytes=verdict.reserved_bytes,
        smallest_capacity_bytes=verdict.smallest_capacity_bytes,
        needed_bytes=forecast.needed_bytes,
        peak_device_bytes=verdict.reserved_bytes[1] + beside_bytes if on_cuda else forecast.needed_bytes,
        peak_host_bytes=bill.peak_host_bytes,
        disk_bytes=bill.disk_bytes,
        capacity_bytes=capacity_bytes,
        room_bytes=None if capacity_bytes is None else capacity_bytes - forecast.needed_bytes,
        tokens_per_second=time.tokens_per_second if time else None,
        step_s=time.step_s if time else None,
        mfu=time.mfu if time else None,
        hfu=time.hfu if time else None,
        slowest_term=f"{time.binding.name} in {time.binding.phase}" if time else None,
        bill=bill,
        excludes=bill.excludes,
        assumptions=assumptions,
        change=_change(changes[0]) if changes else None,
        other_changes=tuple(map(_change, changes[1:])),
    )


def _change(change: Change) -> ChangeAnswer:
    forecast = change.forecast
    return ChangeAnswer(
        knobs=dict(change.knobs),
        fits=change.fits,
        probability_fits=forecast.probability_fits,
        needed_bytes=forecast.needed_bytes,
        tokens_per_second=forecast.time.tokens_per_second if forecast.time else None,
    )


def show(result: Answer, output: Output) -> None:
    """The bill, the verdict, the speed and what would help."""
    output.show(_headline(result))
    for table in bill_tables(result.bill):
        output.show(terminal_table(table))
    for line in (*_memory_lines(result), _verdict(result), *_speed_lines(result), *_change_lines(result)):
        output.show(line)
    output.show(f"Assumed: {'; '.join(result.assumptions)}.")
    output.show(f"Left out: {', '.join(result.excludes)}.")


def _headline(result: Answer) -> str:
    ranks = "1 device" if result.world_size == 1 else f"{result.world_size} devices"
    set_knobs = ", ".join(f"{name} {_value(value)}" for name, value in result.config.items() if value is not None)
    return (
        f"{result.model} on {ranks} ({result.device}): {result.total_parameters:,} parameters, "
        f"{result.trained_parameters:,} trained. Predicted, not measured.\nKnobs: {set_knobs}."
    )


def _value(value: JsonValue) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _memory_lines(result: Answer) -> list[str]:
    low_bytes, high_bytes = result.peak_reserved_bytes
    reserved = f"; {format_bytes(low_bytes)} to {format_bytes(high_bytes)} reserved by the allocator"
    if high_bytes == low_bytes:
        reserved = f"; {format_bytes(low_bytes)} reserved by the allocator" if result.device != "cpu" else ""
    most = f"in {_words(result.binding_phase)}, most of it {_words(result.binding_term)}"
    lines = [
        f"Peak of one device: {format_bytes(result.peak_allocated_bytes)} allocated, {most}{reserved}; "
        f"{format_bytes(result.peak_device_bytes)} on the device.",
        f"Host memory of one node: {format_bytes(result.peak_host_bytes)}, in {_words(result.bill.host_phase)}.",
    ]
    return lines + ([f"Disk of one node: {format_bytes(result.disk_bytes)}."] if result.disk_bytes else [])


def _verdict(result: Answer) -> str:
    needs = f"needs at least {format_bytes(result.needed_bytes)} of device memory"
    if result.capacity_bytes is None or result.probability_fits is None or result.room_bytes is None:
        return f"Verdict: {needs}; give --device-memory to have it judged."
    low, high = ON_THE_EDGE
    word = "fits" if result.fits else "does not fit"
    if low < result.probability_fits < high:
        word = f"on the edge, {'more' if result.fits else 'less'} likely than not to fit"
    room = f"{format_bytes(abs(result.room_bytes))} {'left' if result.room_bytes >= 0 else 'short'}"
    return (
        f"Verdict: {word} (probability {odds(result.probability_fits)}): {needs} of "
        f"{format_bytes(result.capacity_bytes)}, {room}."
    )


def _speed_lines(result: Answer) -> list[str]:
    if result.tokens_per_second is None or result.step_s is None or result.mfu is None:
        return ["Speed: not predicted, the device's rates are not known."]
    return [
        f"Speed, predicted, not measured: {result.tokens_per_second:,.0f} tokens/s, MFU {result.mfu * 100:.1f} %, "
        f"{_duration(result.step_s)} a step; {_words(result.slowest_term or '')} takes most."
    ]


def _change_lines(result: Answer) -> list[str]:
    if result.fits is not False:
        return []
    change = result.change
    if change is None:
        return ["No single change of a knob would help."]
    if not change.fits:
        return [f"No single change makes it fit; the nearest is {_change_text(change)}."]
    lines = [f"Cheapest single change that makes it fit: {_change_text(change)}."]
    return lines + [f"Or: {_change_text(other)}." for other in result.other_changes[:SHOWN_CHANGES]]


def _change_text(change: ChangeAnswer) -> str:
    what = " with ".join(f"{name} {_value(value)}" for name, value in reversed(change.knobs.items()))
    speed = f", {change.tokens_per_second:,.0f} tokens/s" if change.tokens_per_second is not None else ""
    sure = f" (probability {odds(change.probability_fits)}{speed})" if change.probability_fits is not None else ""
    return f"{what}: needs {format_bytes(change.needed_bytes)}{sure}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _duration(duration_s: float) -> str:
    return format_duration(duration_s) if duration_s >= 1 else f"{duration_s * 1000:.0f} ms"
