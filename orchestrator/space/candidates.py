"""From a spec and the preflight's facts to the finite list of candidates, with reasons for what is left out."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.contract.config import Layout, TrialConfig
from orchestrator.contract.errors import SpecError
from orchestrator.contract.facts import Facts
from orchestrator.space.defaults import default_choices
from orchestrator.space.dimensions import Choice, Dimension, dimensions, walk
from orchestrator.space.knobs import BY_NAME, Point, Setting, as_knobs, complete
from orchestrator.space.label import label
from orchestrator.space.trials import TrialBuilder
from orchestrator.spec.sweep import LAYOUT_NAMES, KnobValue, ResourcesSection, SweepSpec

MAX_POINTS = 5_000
"""Of more points than this, knobs without an effect left out, some are drawn instead of all listed: what is listed is
predicted and weighed anew for each trial."""
DRAWN_POINTS = 600
"""How many are drawn then, unless the budget allows a quarter as many trials or more."""
DRAWN_FOR_A_TRIAL = 4
"""How many are drawn for each trial of a larger budget, so that the search has a choice to the end."""


@dataclass(frozen=True)
class Candidate:
    """One runnable configuration. `id` is the config's content hash, `label` its short name for people."""

    id: str
    label: str
    config: TrialConfig
    is_baseline: bool = False


@dataclass(frozen=True)
class Illegal:
    """A point that cannot be run, with the arithmetic or the names that say why."""

    reason: str


@dataclass(frozen=True)
class Space:
    """All candidates, the baseline first, and what was left out.

    `raw_points` is the product of all choices, the baseline not counted: each is a candidate, a duplicate of one, or
    illegal, unless `is_sampled`, where only some points were drawn. `illegal` counts distinct points by reason.
    """

    candidates: tuple[Candidate, ...]
    dimensions: tuple[Dimension, ...]
    raw_points: int
    duplicates: int
    illegal: Counter[str]
    is_sampled: bool
    is_default: bool
    """The spec has no `search`: these are Brimful's own choices."""
    notes: tuple[str, ...]
    _resolver: "_Resolver" = field(repr=False)
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Candidates that are not to be tried: why, by id."""
    _refused: Mapping[Layout, str] = field(default_factory=dict, repr=False)

    @property
    def choices(self) -> dict[str, tuple[Choice, ...]]:
        """Choices by dimension, in the order in which a define-by-run sampler must ask for them."""
        return {dimension.name: dimension.choices for dimension in self.dimensions}

    @property
    def has_refused(self) -> bool:
        """Whether the cluster cannot place some of it."""
        return bool(self._refused)

    @property
    def baseline(self) -> Candidate | None:
        """The user's present configuration, when the spec names one."""
        return next((candidate for candidate in self.candidates if candidate.is_baseline), None)

    def is_active(self, name: str, chosen: Mapping[str, Choice]) -> bool:
        """Whether the dimension `name` has an effect beside the choices made for the dimensions before it."""
        dimension = next(dimension for dimension in self.dimensions if dimension.name == name)
        point = self._resolver.point(chosen)
        return any(dimension.is_active({**point, **entry}) for entry in dimension.entries.values())

    def without(self, reasons: Mapping[str, str]) -> "Space":
        """This space without the candidates that `reasons` names by id."""
        kept = tuple(candidate for candidate in self.candidates if candidate.id not in reasons)
        return replace(self, candidates=kept, left_out={**self.left_out, **reasons})

    def refusing(self, layouts: Mapping[Layout, str]) -> "Space":
        """This space without the candidates of `layouts`: they are illegal for the reason that it gives."""
        space = replace(self, _refused={**self._refused, **layouts})
        reasons = {each.id: layouts[each.config.layout] for each in self.candidates if each.config.layout in layouts}
        kept = tuple(candidate for candidate in self.candidates if candidate.id not in reasons)
        return replace(space, candidates=kept, illegal=self.illegal + Counter(reasons.values()))

    def including(self, points: Iterable[Mapping[str, Choice]]) -> "Space":
        """This space with the candidates of `points` (choices by dimension) as well, as far as they are legal and new.

        Raises KeyError for a choice that does not exist.
        """
        listed = {candidate.id: candidate for candidate in self.candidates}
        for chosen in points:
            outcome = self.resolve(chosen)
            if isinstance(outcome, Candidate):
                listed.setdefault(outcome.id, outcome)
        return replace(self, candidates=tuple(listed.values()))

    def resolve(self, chosen: Mapping[str, Choice]) -> Candidate | Illegal:
        """The candidate of `chosen` (choices by dimension; knobs that are missing take their defaults).

        Choices that mean the same run give the same candidate. Raises KeyError for a choice that does not exist.
        """
        outcome = self._resolver.candidate(self._resolver.point(chosen))
        reason = self._refused.get(outcome.config.layout) if isinstance(outcome, Candidate) else None
        return Illegal(reason) if reason is not None else outcome

    def choices_of(self, candidate: Candidate) -> dict[str, Choice] | None:
        """Choices that resolve to `candidate`, active dimensions only; None for a baseline outside of the choices."""
        chosen: dict[str, Choice] = {}
        for dimension in self.dimensions:
            if not self.is_active(dimension.name, chosen):
                continue
            match = self._resolver.matching(dimension, candidate.config)
            if match is None:
                return None
            chosen[dimension.name] = match
        return chosen


def build_space(spec: SweepSpec, facts: Facts, threads_per_rank: int = 1) -> Space:
    """The space of `spec`, over every layout of `spec.resources`.

    Raises SpecError when the baseline is illegal.
    """
    searched = spec.search.knobs if spec.search is not None else default_choices(spec)
    axes = dimensions({**searched, **spec.resources.searched}, spec.search)
    fixed = _fixed(spec, axes)
    resolver = _Resolver(fixed, facts, axes, TrialBuilder(spec, facts, threads_per_rank), spec.resources)
    draws = max(DRAWN_POINTS, DRAWN_FOR_A_TRIAL * (spec.budget.trials or 0))
    points, is_sampled = _points(axes, fixed, spec.search.seed if spec.search else 0, draws)
    baseline = _baseline(spec, resolver.first_point(), resolver)
    raw_points = math.prod(len(axis.entries) for axis in axes)
    seen: dict[int, Candidate | Illegal] = {}
    drawn = 0
    for point, count in points:
        drawn += count
        outcome = resolver.candidate(point)
        seen.setdefault(id(outcome), outcome)
    illegal = Counter(outcome.reason for outcome in seen.values() if isinstance(outcome, Illegal))
    candidates = [outcome for outcome in seen.values() if isinstance(outcome, Candidate)]
    if baseline is not None:
        candidates = [baseline, *(candidate for candidate in candidates if candidate.id != baseline.id)]
    return Space(
        candidates=tuple(candidates),
        dimensions=axes,
        raw_points=raw_points,
        duplicates=drawn - len(seen),
        illegal=illegal,
        is_sampled=is_sampled,
        is_default=spec.search is None,
        notes=_notes(axes, seen.values(), raw_points, drawn if is_sampled else 0),
        _resolver=resolver,
    )


def _fixed(spec: SweepSpec, axes: tuple[Dimension, ...]) -> dict[str, KnobValue]:
    """The fixed knobs. A method that is named nowhere is lora where a knob of lora is named, else full."""
    named = {*spec.train.fixed, *(name for axis in axes for name in axis.knobs)}
    if "method" in named:
        return dict(spec.train.fixed)
    method = "lora" if named & {"lora_rank", "lora_targets"} else "full"
    return {**spec.train.fixed, "method": method}


def _points(
    axes: tuple[Dimension, ...], fixed: dict[str, KnobValue], seed: int, draws: int
) -> tuple[Iterable[tuple[Point, int]], bool]:
    """All points with their counts, or `draws` of more than MAX_POINTS; and whether they were drawn."""
    points = list(itertools.islice(walk(axes, fixed), MAX_POINTS + 1))
    if len(points) <= MAX_POINTS:
        return points, False
    draw = random.Random(seed)
    columns = [_evenly(tuple(axis.entries.values()), draws, draw) for axis in axes]
    return [(_merged(fixed, entries), 1) for entries in zip(*columns, strict=True)], True


def _evenly(entries: tuple[dict[str, KnobValue], ...], draws: int, draw: random.Random) -> list[dict[str, KnobValue]]:
    """Each entry as often as any other, in an order of chance."""
    column = [entries[number % len(entries)] for number in range(draws)]
    draw.shuffle(column)
    return column


def _merged(fixed: Mapping[str, KnobValue], entries: Iterable[Mapping[str, KnobValue]]) -> Point:
    point: dict[str, KnobValue] = dict(fixed)
    for entry in entries:
        point.update(entry)
    return point


def _baseline(spec: SweepSpec, first: dict[str, KnobValue], resolver: "_Resolver") -> Candidate | None:
    """The candidate of `search.baseline` laid over the fixed knobs and each first choice."""
    if spec.search is None or spec.search.baseline is None:
        return None
    point = {**first, **spec.search.baseline}
    candidate = resolver.candidate(point, is_baseline=True)
    if isinstance(candidate, Illegal):
        raise SpecError(f"search.baseline: cannot be run: {candidate.reason}; mend the baseline or train.global_batch")
    return candidate


def _notes(
    axes: tuple[Dimension, ...], outcomes: Iterable[Candidate | Illegal], raw_points: int, drawn: int
) -> tuple[str, ...]:
    notes = []
    effective: set[str] = set()
    for outcome in outcomes:
        if isinstance(outcome, Candidate):
            effective |= {name for name, value in outcome.config.knobs if value is not None}
            effective |= set(LAYOUT_NAMES)
    for name in (name for axis in axes for name in axis.knobs):
        if effective and name not in effective:
            notes.append(f"{name} has no effect in any candidate: it needs that {BY_NAME[name].condition}")
    if drawn:
        notes.append(
            f"{raw_points} points are too many to list: {drawn} were drawn with search.seed, every choice as often"
        )
    return tuple(notes)


class _Resolver:
    """Makes candidates of points and remembers them, so that one run is one candidate."""

    def __init__(
        self,
        fixed: dict[str, KnobValue],
        facts: Facts,
        axes: tuple[Dimension, ...],
        builder: TrialBuilder,
        resources: ResourcesSection,
    ) -> None:
        self._resources = resources
        self._fixed = fixed
        self._axes = {axis.name: axis for axis in axes}
        self._searched = frozenset(name for axis in axes for name in axis.knobs)
        self._setting = Setting(facts.model, facts.device == "cuda")
        self._adaptable = frozenset(facts.model.adaptable)
        self._builder = builder
        self._known: dict[tuple[object, ...], Candidate | Illegal] = {}

    def point(self, chosen: Mapping[str, Choice]) -> dict[str, KnobValue]:
        point: dict[str, KnobValue] = dict(self._fixed)
        for name, choice in chosen.items():
            point.update(self._axes[name].entries[choice])
        return point

    def first_point(self) -> dict[str, KnobValue]:
        return self.point({axis.name: axis.choices[0] for axis in self._axes.values()})

    def candidate(self, point: Point, is_baseline: bool = False) -> Candidate | Illegal:
        canonical, layout = complete(point, self._setting), self._layout(point)
        key = (*canonical.values(), *layout)
        if key not in self._known:
            self._known[key] = self._make(canonical, layout, is_baseline)
        return self._known[key]

    def _layout(self, point: Point) -> Layout:
        world_size = point.get("devices_per_trial") or self._resources.world_sizes[0]
        nodes = point.get("nodes") or self._resources.node_counts[0]
        assert isinstance(world_size, int)
        assert nodes is None or isinstance(nodes, int)
        return Layout(world_size, nodes)

    def _make(self, canonical: dict[str, KnobValue | None], layout: Layout, is_baseline: bool) -> Candidate | Illegal:
        reason = self._builder.why_illegal(canonical, layout) or self._missing_targets(canonical["lora_targets"])
        if reason:
            return Illegal(reason)
        knobs = as_knobs(canonical)
        identity, config = self._builder.build(knobs, layout)
        return Candidate(identity, label(canonical, self._searched, identity, layout), config, is_baseline)

    def _missing_targets(self, targets: KnobValue | None) -> str:
        names = targets if isinstance(targets, tuple) else ()
        missing = [name for name in names if name.rpartition(".")[2] not in self._adaptable]
        if not missing:
            return ""
        return f"lora_targets {', '.join(missing)}: the model's linear layers are {', '.join(sorted(self._adaptable))}"

    def matching(self, dimension: Dimension, config: TrialConfig) -> Choice | None:
        """The first choice whose values, where they have an effect, are those of `config`."""
        values = dict(config.knobs)
        place = {"devices_per_trial": config.world_size, "nodes": config.nodes}
        for choice, entry in dimension.entries.items():
            if all({**values, **place}[name] == value for name, value in entry.items()):
                return choice
        if dimension.name in place:
            return None
        for choice, entry in dimension.entries.items():
            if complete({**values, **entry}, self._setting) == values:
                return choice
        return None
