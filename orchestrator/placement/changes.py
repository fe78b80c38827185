"""Single changes of a run's configuration that would make it fit, those that cost the least speed first."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.contract.config import Checkpointing, Knobs, Method, TrialConfig
from orchestrator.placement.forecast import Forecast, Forecaster
from orchestrator.placement.tracing import Untraceable
from orchestrator.spec.sweep import KnobValue

_SMALL_BUCKET = 16_000_000
"""Elements; DeepSpeed's own example for little memory is 5e7."""


@dataclass(frozen=True)
class Change:
    """One change and what it would do. `knobs` are the new values, a condition that a knob needs included."""

    knobs: Mapping[str, KnobValue]
    forecast: Forecast

    @property
    def fits(self) -> bool:
        """More likely than not."""
        return self.forecast.is_likely


def helpful_changes(
    config: TrialConfig, forecaster: Forecaster, build: Callable[[Mapping[str, KnobValue]], TrialConfig | None]
) -> list[Change]:
    """The changes that fit, those with the most tokens/s first; where none fits, the nearest alone.

    `build` makes the configuration with new values of knobs, None where that cannot be run.
    """
    built = [(change, build(change)) for change in single_changes(config.knobs, config.world_size)]
    possible = [(change, changed) for change, changed in built if changed is not None and changed != config]
    with suppress(Untraceable):
        forecaster.prepare(changed for _, changed in possible)
    changes = []
    for change, changed in possible:
        with suppress(Untraceable):
            changes.append(Change(change, forecaster.forecast(changed)))
    fitting = [change for change in changes if change.fits]
    if fitting:
        return sorted(fitting, key=lambda change: (-change.forecast.tokens_per_second, change.forecast.needed_bytes))
    return sorted(changes, key=lambda change: change.forecast.needed_bytes)[:1]


def single_changes(knobs: Knobs, world_size: int) -> list[dict[str, KnobValue]]:
    """Every change that may save memory, each of one knob (with the stage that an offload needs)."""
    changes: list[dict[str, KnobValue]] = []
    if knobs.gradient_checkpointing is not Checkpointing.FULL:
        changes.append({"gradient_checkpointing": "full"})
    micro_batch = knobs.micro_batch
    while micro_batch > 1:
        micro_batch //= 2
        changes.append({"micro_batch": micro_batch})
    if world_size > 1:
        changes += [{"zero_stage": stage} for stage in range(knobs.zero_stage + 1, 4)]
    stages: dict[str, KnobValue] = {} if knobs.zero_stage else {"zero_stage": 2}
    changes.append({**stages, "offload_optimizer": "cpu"})
    stages = {} if knobs.zero_stage == 3 else {"zero_stage": 3}
    changes.append({**stages, "offload_param": "cpu"})
    if knobs.method is Method.FULL:
        changes.append({"method": "lora"})
    if (knobs.reduce_bucket_size or 0) > _SMALL_BUCKET:
        changes.append({"reduce_bucket_size": _SMALL_BUCKET})
    if (knobs.stage3_prefetch_bucket_size or 0) > _SMALL_BUCKET:
        changes.append({"stage3_prefetch_bucket_size": _SMALL_BUCKET})
    if knobs.attention != "sdpa":
        changes.append({"attention": "sdpa"})
    return changes
