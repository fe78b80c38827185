"""The axes of a space in the order in which a sampler asks for them, and the walk over all of their combinations."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orchestrator.space.knobs import BY_NAME, Point
from orchestrator.spec.sweep import KnobValue, SearchSection

Choice = bool | int | float | str
"""What a sampler sees of a value: sets of layer names and paired values are told as text."""


@dataclass(frozen=True)
class Dimension:
    """One searched knob, or one group of paired knobs. `entries[choice]` holds the knob values of a choice."""

    name: str
    knobs: tuple[str, ...]
    entries: dict[Choice, dict[str, KnobValue]]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All choices, in the order of the spec."""
        return tuple(self.entries)

    def is_active(self, point: Point) -> bool:
        """Whether some knob of it has an effect beside the values of `point`."""
        return any(BY_NAME[name].is_active(point) for name in self.knobs)


def as_choice(value: KnobValue) -> Choice:
    """`value` as samplers can store it."""
    return ",".join(value) if isinstance(value, tuple) else value


def dimensions(knobs: Mapping[str, tuple[KnobValue, ...]], search: SearchSection | None) -> tuple[Dimension, ...]:
    """The dimensions of the searched `knobs` and of the groups of `search.paired`, in the order of the declarations."""
    found = []
    for name, choices in knobs.items():
        entries: dict[Choice, dict[str, KnobValue]] = {as_choice(choice): {name: choice} for choice in choices}
        found.append(Dimension(name, (name,), entries))
    groups: dict[tuple[str, ...], list[dict[str, KnobValue]]] = {}
    for entry in search.paired if search else ():
        groups.setdefault(tuple(sorted(entry, key=_position)), []).append(entry)
    for names, points in groups.items():
        told: dict[Choice, dict[str, KnobValue]] = {_told(names, point): point for point in points}
        found.append(Dimension("+".join(names), names, told))
    return tuple(sorted(found, key=lambda dimension: _position(dimension.knobs[0])))


def _told(names: tuple[str, ...], point: Mapping[str, KnobValue]) -> str:
    return ",".join(f"{name}={as_choice(point[name])}" for name in names)


_POSITIONS = {knob.name: position for position, knob in enumerate(BY_NAME.values())}


def _position(name: str) -> int:
    return _POSITIONS[name]


def walk(axes: tuple[Dimension, ...], start: Point) -> Iterator[tuple[dict[str, KnobValue | None], int]]:
    """Every combination of the choices of `axes` over the values of `start`, with how many raw points it stands for.

    A dimension without an effect beside the values chosen before it is not branched on: its choices count instead.
    """
    if not axes:
        yield dict(start), 1
        return
    first, rest = axes[0], axes[1:]
    branches = list(first.entries.values())
    raw = 1
    if not any(first.is_active({**start, **entry}) for entry in branches):
        raw, branches = len(branches), branches[:1]
    for entry in branches:
        for point, count in walk(rest, {**start, **entry}):
            yield point, count * raw
