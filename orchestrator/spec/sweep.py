"""The sweep spec, version 1: what a user asks for, validated at birth."""

import itertools
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from orchestrator.contract.config import Frozen, Knobs, Layout, MeasureSettings, TrainSettings
from orchestrator.contract.units import parse_duration, parse_size

KnobValue = bool | int | float | str | tuple[str, ...]
DOLLARS = "USD"
"""The currency of cluster profiles, and of a spec that names none."""


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


def _currency(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch("[A-Z]{3}", value):
        raise ValueError(f"{value!r} is not a currency; write its three capital letters, like USD or EUR")
    return value


def _count_of(unit: str, example: str, other: str) -> BeforeValidator:
    """Refuses text where a number of `unit` is asked for."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"{value!r} is not a number of {unit}; write {example}, or {other}")
        return value

    return BeforeValidator(check)


def _counts(value: Any) -> Any:
    """One whole number, or a tuple of several that are searched."""
    if isinstance(value, str | bool | float | dict):
        raise ValueError(f"must be a whole number, not {value!r}; to search it, a list such as [1, 2, 4]")
    if not isinstance(value, list | tuple):
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be at least 1, not {value}")
        return value
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 1:
            raise ValueError(f"must list whole numbers of at least 1, not {item!r}")
    if not value or len(set(value)) < len(value):
        raise ValueError("must list different numbers, at least one")
    return value[0] if len(value) == 1 else tuple(value)


ANY_DEVICES = ("auto", "cpu", "cuda")
"""Words of `resources.device` that name no kind of GPU."""


def _exactly_one(sources: dict[str, object]) -> None:
    """Raise ValueError unless exactly one of `sources` is given."""
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        said = "none is given" if not given else f"{' and '.join(given)} are given"
        raise ValueError(f"needs exactly one of {', '.join(sources)}, and {said}; keep one")


Bytes = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Seconds = Annotated[float, BeforeValidator(_duration), Field(gt=0)]
Counts = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)],
    BeforeValidator(_counts),
]


class ModelSection(Frozen):
    """Exactly one of `config`, `path` and `id`."""

    config: dict[str, JsonValue] | None = None
    path: str | None = None
    id: str | None = None
    revision: str | None = None
    weights: Literal["random", "pretrained"] | None = None
    """None: pretrained for a checkpoint folder or hub id, random for a bare config."""
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSection":
        _exactly_one({"config": self.config, "path": self.path, "id": self.id})
        if self.config is not None and self.weights == "pretrained":
            raise ValueError("a config holds no pretrained weights; write weights: random, or name a path or id")
        return self


class DataSection(Frozen):
    """Exactly one of `path` and `id`."""

    path: str | None = None
    id: str | None = None
    split: str = "train"
    tokenizer: str | None = None
    sequence_length: int = Field(ge=2)
    packing: bool = False
    max_rows: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> "DataSection":
        _exactly_one({"path": self.path, "id": self.id})
        return self


STOP_BELOW_GAIN = 0.003
"""A third of a percent is less than runs of one configuration differ by; `guided_stop` of `benchmarks.strategies` shows
what a stop at this figure costs and saves on recorded landscapes."""


class Sampler(StrEnum):
    """Who proposes the next candidate: Brimful's own search, a sampler of Optuna, or chance."""

    GUIDED = "guided"
    TPE = "tpe"
    GP = "gp"
    RANDOM = "random"
    GRID = "grid"


class SearchSection(Frozen):
    """`knobs` maps each searched knob to its choices, ranges already expanded."""

    sampler: Sampler = Sampler.GUIDED
    seed: int = 0
    baseline: dict[str, KnobValue] | None = None
    paired: tuple[dict[str, KnobValue], ...] = ()
    knobs: dict[str, tuple[KnobValue, ...]] = {}
    stop_below_gain: float = Field(default=STOP_BELOW_GAIN, ge=0, lt=1)
    """The sweep ends when no candidate is expected to be faster than the best by more than this share, unless the
    planned training says what a gain is worth; 0: a small gain never ends it."""


class TrainSection(TrainSettings):
    """Settings that stay the same over the sweep; `fixed` maps each fixed knob to its value.

    The length of the whole training that the user plans, in one of two ways: tokens without padding, or passes over
    the data. No trial trains for so long.
    """

    fixed: dict[str, KnobValue] = {}
    planned_tokens: (
        Annotated[int, _count_of("tokens", "it like 2e9", "planned_epochs for passes over the data"), Field(gt=0)]
        | None
    ) = None
    planned_epochs: (
        Annotated[float, _count_of("passes over the data", "it like 3", "planned_tokens like 2e9"), Field(gt=0)] | None
    ) = None

    @model_validator(mode="after")
    def _one_length(self) -> "TrainSection":
        if self.planned_tokens is not None and self.planned_epochs is not None:
            raise ValueError("planned_tokens and planned_epochs both say how long the training is; keep one")
        return self


class Objective(Frozen):
    """A metric and where it should go."""

    metric: Literal[
        "tokens_per_second",
        "peak_memory_bytes",
        "peak_resident_bytes",
        "mfu",
        "step_s",
        "eval_loss",
        "tokens_per_second_per_device",
    ] = "tokens_per_second"
    goal: Literal["maximize", "minimize"] = "maximize"


class LimitsSection(Frozen):
    """`device_memory` per device, `host_memory` per node, `headroom` of device memory that a winner must leave.

    A candidate is not launched when it is predicted not to fit with more than `reject_probability`; 1: all are.
    A trial whose eval loss is above the baseline's by more than the fraction `eval_loss_within` can't win.
    """

    device_memory: Bytes | None = None
    host_memory: Bytes | None = None
    headroom: Annotated[int, BeforeValidator(_size), Field(ge=0)] = 0
    reject_probability: float = Field(default=0.95, ge=0.5, le=1)
    eval_loss_within: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _room_is_left(self) -> "LimitsSection":
        if self.device_memory is not None and self.headroom >= self.device_memory:
            raise ValueError("headroom is all of device_memory or more, so nothing could fit; lower headroom")
        return self


class ResourcesSection(Frozen):
    """Devices of each trial, and over how many nodes they are spread (None: as few as hold them); several of either
    are searched.

    `device` is a kind of GPU by its key in `orchestrator.spec.hardware`, or one of ANY_DEVICES. `price_per_device_hour`
    is in `currency`, which every sum of money of the sweep is in too.
    """

    devices_per_trial: Counts = 1
    nodes: Counts | None = None
    device: str = "auto"
    max_concurrent_trials: int | None = Field(default=None, ge=1)
    price_per_device_hour: float | None = Field(default=None, gt=0)
    currency: Annotated[str, BeforeValidator(_currency)] = DOLLARS

    @model_validator(mode="after")
    def _nodes_share_alike(self) -> "ResourcesSection":
        if not self.layouts:
            wanted = ", ".join(map(str, self.world_sizes))
            nodes = ", ".join(map(str, self.node_counts))
            raise ValueError(
                f"devices_per_trial {wanted} is not divisible by nodes {nodes}; "
                "each node of a trial gives the same number of devices"
            )
        return self

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Every number of devices that a trial may have, in the order of the spec."""
        found = self.devices_per_trial
        return found if isinstance(found, tuple) else (found,)

    @property
    def node_counts(self) -> tuple[int | None, ...]:
        """Every number of nodes that a trial may have, in the order of the spec."""
        return self.nodes if isinstance(self.nodes, tuple) else (self.nodes,)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout of a trial in which each node gives the same number of devices."""
        both = itertools.product(self.world_sizes, self.node_counts)
        return tuple(Layout(size, nodes) for size, nodes in both if nodes is None or size % nodes == 0)

    @property
    def searched(self) -> dict[str, tuple[int, ...]]:
        """The choices of what is searched, by name."""
        return {name: choices for name in LAYOUT_NAMES if isinstance(choices := getattr(self, name), tuple)}


class ConfirmSection(Frozen):
    """How many of the best are measured again before a winner is declared, and how often each; 0: none."""

    top: int = Field(default=3, ge=0)
    repeats: int = Field(default=2, ge=0)


class MeasureSection(MeasureSettings):
    """How a trial measures, whether it ends as soon as it can't beat the best so far, and what is measured again."""

    racing: bool = True
    confirm: ConfirmSection = ConfirmSection()


class BudgetSection(Frozen):
    """The sweep ends when any of them is used up. A trial counts once however often it is retried."""

    trials: int | None = Field(default=None, ge=1)
    time: Seconds | None = None
    device_hours: float | None = Field(default=None, gt=0)
    money: float | None = Field(default=None, gt=0)
    """In `resources.currency`, at `resources.price_per_device_hour`."""


class TrackingSection(Frozen):
    """MLflow. `uri` None: a SQLite store under the home folder."""

    enabled: bool = True
    uri: str | None = None
    experiment: str = "brimful"


class SweepSpec(Frozen):
    """A whole spec."""

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    description: str = ""
    model: ModelSection
    data: DataSection
    train: TrainSection
    search: SearchSection | None = None
    objective: tuple[Objective, ...] = (Objective(),)
    limits: LimitsSection = LimitsSection()
    resources: ResourcesSection = ResourcesSection()
    measure: MeasureSection = MeasureSection()
    budget: BudgetSection = BudgetSection()
    tracking: TrackingSection = TrackingSection()

    @model_validator(mode="after")
    def _one_place_a_knob(self) -> "SweepSpec":
        if self.search is not None:
            twice = sorted(self.train.fixed.keys() & self.search.knobs.keys())
            if twice:
                raise ValueError(f"{', '.join(twice)} stands in both train and search; a knob is fixed or searched")
        return self


KNOB_NAMES = tuple(Knobs.model_fields)
LAYOUT_NAMES = ("devices_per_trial", "nodes")
"""Words of `resources` that may be searched; a baseline may name them too."""
