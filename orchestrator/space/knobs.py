"""Every knob, declared once: what it means, when it has an effect, and what an unset one stands for.

The order is that of the declarations; a condition reads only knobs that stand before it. Where DeepSpeed reads a
setting was checked in DeepSpeed 0.19.8: `runtime/zero/config.py`, `stage_1_and_2.py`, `stage3.py`,
`partitioned_param_coordinator.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from orchestrator.contract.config import Knobs
from orchestrator.spec.sweep import KnobValue

Point = Mapping[str, KnobValue | None]
"""Values of knobs by name; a knob that is not in it, or None, is unset."""

DEEPSPEED_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default, in elements, of `stage3_max_live_parameters`, `stage3_max_reuse_distance`, `sub_group_size`."""


class Shape(Protocol):
    """What defaults need to know of a model: `orchestrator.contract.facts.ModelFacts` has it all."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def total_parameters(self) -> int: ...

    @property
    def adaptable(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Setting:
    """What the default of an unset knob may depend on."""

    model: Shape
    on_cuda: bool


@dataclass(frozen=True)
class Knob:
    """`condition` says in words when the knob has an effect, `is_active` decides it from a point."""

    name: str
    meaning: str
    default: Callable[[Point, Setting], KnobValue]
    condition: str = "always"
    is_active: Callable[[Point], bool] = lambda point: True


def _constant(value: KnobValue) -> Callable[[Point, Setting], KnobValue]:
    return lambda point, setting: value


def _stage(*stages: int) -> Callable[[Point], bool]:
    return lambda point: point.get("zero_stage") in stages


def _is_lora(point: Point) -> bool:
    return point.get("method") == "lora"


def _hidden_squared(point: Point, setting: Setting) -> KnobValue:
    return setting.model.hidden_size**2


def _hidden_squared_even(point: Point, setting: Setting) -> KnobValue:
    return setting.model.hidden_size**2 // 2 * 2 or 2


def _live_parameters(point: Point, setting: Setting) -> KnobValue:
    return min(DEEPSPEED_LIVE_PARAMETERS, setting.model.total_parameters)


KNOBS: tuple[Knob, ...] = (
    Knob("method", "Train all weights (full) or low-rank adapters on frozen weights (lora).", _constant("full")),
    Knob("lora_rank", "Rank of the adapters.", _constant(16), "method is lora", _is_lora),
    Knob(
        "lora_targets",
        "Linear layers that get an adapter: all-linear (all but the output head) or names such as q_proj,v_proj.",
        _constant("all-linear"),
        "method is lora",
        _is_lora,
    ),
    Knob(
        "zero_stage",
        "What DeepSpeed shards over the ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.",
        _constant(0),
    ),
    Knob(
        "offload_optimizer",
        "Where the optimizer's states live and are updated.",
        _constant("none"),
        "zero_stage is 1, 2 or 3",
        _stage(1, 2, 3),
    ),
    Knob("offload_param", "Where sharded weights live between uses.", _constant("none"), "zero_stage is 3", _stage(3)),
    Knob(
        "gradient_checkpointing",
        "Keep only each layer's input and compute the layer again in the backward pass (full), or keep all (none).",
        _constant("none"),
    ),
    Knob("micro_batch", "Rows of one forward and backward pass on one rank.", _constant(1)),
    Knob(
        "precision",
        "bf16: weights and compute in bfloat16 with DeepSpeed's fp32 masters; fp32: everything in float32.",
        lambda point, setting: "bf16" if setting.on_cuda else "fp32",
    ),
    Knob("attention", "transformers' attention implementation.", _constant("sdpa")),
    Knob("optimizer", "The optimizer's update rule.", _constant("adamw")),
    Knob(
        "reduce_bucket_size",
        "Elements of gradients that are reduced at once; the buffer is allocated whole, and a larger gradient bypasses "
        "it. Unset: hidden_size squared, as transformers' `auto`.",
        _hidden_squared,
        "zero_stage is 1, 2 or 3",
        _stage(1, 2, 3),
    ),
    Knob(
        "allgather_bucket_size",
        "Elements of updated weights that are gathered at once; an even number. Unset: hidden_size squared, made even. "
        "DeepSpeed reads it only where the collective library lacks all_gather_into_tensor.",
        _hidden_squared_even,
        "zero_stage is 1 or 2",
        _stage(1, 2),
    ),
    Knob(
        "overlap_comm",
        "Reduce gradients beside the backward pass; a second reduce bucket in stages 1 and 2. Unset: DeepSpeed's "
        "default, true in stage 3 only.",
        lambda point, setting: point.get("zero_stage") == 3,
        "zero_stage is 1, 2 or 3",
        _stage(1, 2, 3),
    ),
    Knob(
        "stage3_max_live_parameters",
        "Gathered weights, in elements, that may be held at once. Unset: DeepSpeed's 1e9, at most the model's size.",
        _live_parameters,
        "zero_stage is 3",
        _stage(3),
    ),
    Knob(
        "stage3_max_reuse_distance",
        "A gathered weight is kept when it is used again within this many elements. Unset: DeepSpeed's 1e9, at most "
        "the model's size.",
        _live_parameters,
        "zero_stage is 3",
        _stage(3),
    ),
    Knob(
        "stage3_prefetch_bucket_size",
        "Elements of weights that are gathered ahead of use. Unset: 0.9 times hidden_size squared, as transformers' "
        "`auto`.",
        lambda point, setting: int(0.9 * setting.model.hidden_size**2),
        "zero_stage is 3",
        _stage(3),
    ),
    Knob(
        "stage3_param_persistence_threshold",
        "Weights of fewer elements are never sharded. Unset: 10 times hidden_size, as transformers' `auto`.",
        lambda point, setting: 10 * setting.model.hidden_size,
        "zero_stage is 3",
        _stage(3),
    ),
    Knob(
        "sub_group_size",
        "Sharded elements of one rank that the optimizer updates at once; nothing is allocated for it in advance. "
        "Unset: DeepSpeed's 1e9, at most the model's size.",
        _live_parameters,
        "zero_stage is 3",
        _stage(3),
    ),
)

LAYOUT_KNOBS: tuple[Knob, ...] = (
    Knob("devices_per_trial", "Devices of a trial, one for each rank.", _constant(1)),
    Knob("nodes", "Nodes over which a trial's ranks are spread alike.", _constant(1)),
)
"""What `resources` may search beside the knobs: it changes where a trial runs."""

BY_NAME: dict[str, Knob] = {knob.name: knob for knob in (*KNOBS, *LAYOUT_KNOBS)}


def complete(point: Point, setting: Setting) -> dict[str, KnobValue | None]:
    """`point` in canonical form: unset knobs at their defaults, knobs without an effect None, target names sorted."""
    canonical: dict[str, KnobValue | None] = {}
    for knob in KNOBS:
        value = point.get(knob.name)
        if not knob.is_active(canonical):
            value = None
        elif value is None:
            value = knob.default(canonical, setting)
        canonical[knob.name] = value
    targets = canonical["lora_targets"]
    if isinstance(targets, tuple):
        names = tuple(sorted(set(targets)))
        canonical["lora_targets"] = "all-linear" if set(names) == set(setting.model.adaptable) else names
    return canonical


def as_knobs(canonical: Point) -> Knobs:
    """The contract's form of a canonical point."""
    return Knobs.model_validate(cast(dict[str, object], dict(canonical)))
