"""The space that is searched when the spec has no `search`."""

from orchestrator.spec.sweep import KnobValue, SweepSpec

_MAX_MICRO_BATCHES = 6


def default_choices(spec: SweepSpec) -> dict[str, tuple[KnobValue, ...]]:
    """Choices for every knob that the spec leaves open.

    One device: stages 0, 2 and 3, because sharding over one rank matters only with offload. Micro-batches are the
    powers of two that divide each rank's share of the global batch, at most six.
    """
    devices = spec.resources.devices_per_trial
    share = spec.train.global_batch // devices
    micro_batches = [2**power for power in range(_MAX_MICRO_BATCHES) if share % 2**power == 0]
    space: dict[str, tuple[KnobValue, ...]] = {
        "method": ("lora", "full"),
        "lora_rank": (8, 16, 64),
        "zero_stage": (0, 1, 2, 3) if devices > 1 else (0, 2, 3),
        "offload_optimizer": ("none", "cpu"),
        "offload_param": ("none", "cpu"),
        "gradient_checkpointing": ("none", "full"),
        "micro_batch": tuple(micro_batches) or (1,),
    }
    return {name: choices for name, choices in space.items() if name not in spec.train.fixed}
