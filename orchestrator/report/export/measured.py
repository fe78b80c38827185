"""The trial that an export reproduces, and what its ranks really ran with."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, JsonValue

from orchestrator.contract.config import TrialConfig
from orchestrator.contract.errors import UsageError
from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Measurement
from orchestrator.contract.record import SweepRecord, TrialRecord
from orchestrator.contract.units import format_bytes, format_rate
from orchestrator.search.reported import Reported, reported


class Resolved(BaseModel):
    """The part of `Measurement.resolved` that exports are made of."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    deepspeed: dict[str, JsonValue]
    optimizer: dict[str, JsonValue]
    lora: dict[str, JsonValue] | None = None
    environment: dict[str, str] = {}


@dataclass(frozen=True)
class MeasuredTrial:
    """A trial with numbers, of the sweep `sweep`."""

    sweep: SweepRecord
    record: TrialRecord
    measurement: Measurement
    figures: Reported
    """What is reported of the trial: of its confirmation where it has one."""
    resolved: Resolved
    versions: dict[str, str]
    rows: str
    """The folder of the prepared rows, which may have moved since the trial."""

    @property
    def config(self) -> TrialConfig:
        """What the trial was asked to run."""
        return self.record.config

    @property
    def nodes(self) -> int:
        """Nodes that the ranks were spread over alike; 1 where a node had more of them than another."""
        seen = {node for attempt in self.record.attempts[-1:] for node in attempt.nodes}
        nodes = self.config.nodes or len(seen) or 1
        return nodes if self.config.world_size % nodes == 0 else 1

    def header(self) -> list[str]:
        """Where the files come from and what was measured, a line each."""
        measurement, config, figures = self.measurement, self.config, self.figures
        again = f", in {figures.runs} runs after the search" if figures.runs else ""
        limit = "" if measurement.limit_bytes is None else f" of {format_bytes(measurement.limit_bytes)} allowed"
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return [
            f"Exported by brimful {self.versions.get('brimful', '')}: sweep {self.sweep.name} ({self.sweep.sweep_id}),"
            f" trial {self.record.trial} ({self.record.label}), candidate {self.record.candidate}.",
            f"Measured {format_rate(figures.tokens_per_second)} tokens/s without padding"
            f" (95 % interval {format_rate(figures.tokens_per_second_low)} to"
            f" {format_rate(figures.tokens_per_second_high)}{again})"
            f" and a peak of {format_bytes(figures.peak_memory_bytes)}{limit} per rank"
            f" on {config.world_size} x {measurement.device_name}{self._spread()}.",
            *self._eval_loss(),
            f"Global batch {config.train.global_batch} = micro-batch {config.knobs.micro_batch}"
            f" x accumulation {config.gradient_accumulation} x {config.world_size} ranks.",
            f"Versions: {versions}. Other versions may run at another speed or need other memory.",
        ]

    def _spread(self) -> str:
        return "" if self.nodes == 1 else f", {self.config.world_size // self.nodes} on each of {self.nodes} nodes"

    def _eval_loss(self) -> list[str]:
        measurement = self.measurement
        if measurement.eval_loss is None:
            return []
        return [
            f"Eval loss {measurement.eval_loss:.4f} nats a token after training on {measurement.trained_tokens:,}"
            f" tokens, over {measurement.eval_tokens:,} tokens of held-out rows, which are not among the rows here."
        ]


def measured_trial(
    sweep: SweepRecord, record: TrialRecord, records: Sequence[TrialRecord], facts: Facts | None, brimful_version: str
) -> MeasuredTrial:
    """`record`, one of the sweep's `records`, ready for export. Raises UsageError when it did not run to its end."""
    if record.measurement is None:
        raise UsageError(
            f"trial {record.trial} of {sweep.name} did not run to its end, so there is nothing measured to export; "
            f"`brimful trials {sweep.name}` lists those that did"
        )
    data = record.config.data
    is_known = facts is not None and facts.data.digest == data.digest
    return MeasuredTrial(
        rows=facts.data.directory if facts is not None and is_known else data.directory,
        sweep=sweep,
        record=record,
        measurement=record.measurement,
        figures=reported(records)[record.trial],
        resolved=Resolved.model_validate(record.measurement.resolved),
        versions={**(facts.versions if facts else {}), "brimful": brimful_version},
    )
