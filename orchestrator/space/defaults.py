"""The space that is searched when the spec has no `search`."""

from orchestrator.spec.sweep import KnobValue, SweepSpec

_MAX_MICRO_BATCHES = 6


def default_choices(spec: SweepSpec) -> dict[str, tuple[KnobValue, ...]]:
    """Choices for every knob that the spec leaves open.

    One device: stages 0, 2 and 3, because sharding over one rank matters only with offload. Micro-batches are the
    powers of two that divide each rank's share of the global batch, at most six; where the number of devices is
    searched, that with any of them.
    """
    devices = max(spec.resources.world_sizes)
    shares = [
        spec.train.global_batch // size for size in spec.resources.world_sizes if spec.train.global_batch % size == 0
    ]
    powers = [2**power for power in range(_MAX_MICRO_BATCHES)]
    micro_batches = [power for power in powers if any(share % power == 0 for share in shares)]
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
