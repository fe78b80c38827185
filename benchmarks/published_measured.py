"""What the source of a published row measured: how the run ended, bytes and tokens/s of one device."""

from dataclasses import dataclass
from typing import Literal

from benchmarks import published_cells as cells
from benchmarks.published_cells import Row
from orchestrator.contract.profile import Point
from orchestrator.contract.units import GIB

OutcomeOfRow = Literal["ran", "out_of_memory", "failed"]
_OUTCOMES: dict[str, OutcomeOfRow] = {"no": "ran", "yes": "out_of_memory", "failed": "failed"}


@dataclass(frozen=True)
class Measured:
    """What the source prints of one device. `failed`: the run made no throughput and no cause is named."""

    outcome: OutcomeOfRow
    allocated_bytes: float | None
    reserved_bytes: float | None
    device_bytes: float | None
    tokens_per_s: float | None


def outcome_of(row: Row) -> OutcomeOfRow:
    """How the run ended, by the file."""
    return _OUTCOMES.get(row["oom"], "ran")


def measured(row: Row, point: Point, *, is_whole: bool) -> Measured:
    """The figures of `row`, whose batch is `point`. Without `is_whole` they are not of one device of the run: only the
    outcome counts."""

    def gib(column: str) -> float | None:
        found = cells.number(row, column)
        return None if found is None or not is_whole else found * GIB

    return Measured(
        outcome=outcome_of(row),
        allocated_bytes=gib("peak_allocated_gib"),
        reserved_bytes=gib("peak_reserved_gib"),
        device_bytes=gib("peak_smi_gib"),
        tokens_per_s=_tokens_per_s(row, point) if is_whole else None,
    )


def _tokens_per_s(row: Row, point: Point) -> float | None:
    """Of one device. Samples and steps count only where every row has the full length; samples are of all devices."""
    stated = cells.number(row, "tokens_per_s_per_gpu")
    if stated is not None or not cells.is_full_length(row):
        return stated
    samples_per_s = cells.number(row, "samples_per_s")
    if samples_per_s is not None:
        return samples_per_s * point.sequence_tokens / (cells.whole(row, "n_gpus") or 1)
    step_s = cells.number(row, "step_time_s")
    if step_s is None:
        return None
    return point.micro_batch * point.sequence_tokens * (cells.whole(row, "grad_accum") or 1) / step_s
