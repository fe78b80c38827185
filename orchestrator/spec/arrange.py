"""From the form that people write to the form of the models.

In YAML, knobs stand directly in `train` (fixed) and `search` (a list or a range each); the models keep them in `fixed`
and `knobs`. `objective` may be a metric's name, a mapping or a list; durations of `measure` may be written like `2m`.
"""

from dataclasses import dataclass, field

from pydantic import BaseModel, JsonValue

from orchestrator.contract.config import MeasureSettings
from orchestrator.contract.units import parse_duration
from orchestrator.spec.knobs import KnobFault, knob_choices, knob_value, whole
from orchestrator.spec.messages import show
from orchestrator.spec.places import Fault, Path, Places, did_you_mean
from orchestrator.spec.sweep import KNOB_NAMES, LAYOUT_NAMES, SearchSection, SweepSpec, TrainSection

Mapping = dict[str, JsonValue]

MINIMIZED = ("peak_memory_bytes", "peak_resident_bytes", "step_s", "eval_loss")
"""Metrics whose goal is to minimize unless the spec says otherwise."""
GOAL_WORDS: Mapping = {"max": "maximize", "min": "minimize"}
"""Short forms of a goal, as people write them."""


@dataclass
class Arranged:
    """The models' form of a spec, as far as it could be made, and what was wrong on the way."""

    value: Mapping
    faults: list[Fault] = field(default_factory=list)


def arrange(raw: Mapping, places: Places) -> Arranged:
    """The models' form of `raw`. Keys that are unknown at the top are faults; the sections' own are pydantic's to find
    except in `train` and `search`, where knobs stand beside them."""
    result = Arranged({})
    arranger = _Arranger(places, result.faults)
    for name, section in raw.items():
        if name not in SweepSpec.model_fields:
            text = f"unknown section; {did_you_mean(name, SweepSpec.model_fields)}"
            result.faults.append(places.key_fault((name,), text))
        elif section is not None or name in ("version", "name"):
            result.value[name] = arranger.section(name, section)
    arranger.one_place_a_knob(raw.get("train"), raw.get("search"), result.value.get("search"))
    return result


@dataclass
class _Arranger:
    places: Places
    faults: list[Fault]

    def section(self, name: str, section: JsonValue) -> JsonValue:
        if name == "objective":
            return self.objective(section)
        if not isinstance(section, dict):
            return whole(section)
        match name:
            case "train":
                return self.train(section)
            case "search":
                return self.search(section)
            case "measure":
                return self.measure(section)
            case "data" | "resources" | "budget" | "limits":
                return {key: _whole_each(value) for key, value in section.items()}
            case _:
                return section

    def train(self, section: Mapping) -> JsonValue:
        settings, knobs = self._split("train", section, TrainSection, "fixed")
        fixed: Mapping = {}
        for name, value in knobs.items():
            if isinstance(value, list | dict) and name != "lora_targets":
                self._fault(("train", name), f"is fixed here, so it takes one value; move choices to search.{name}")
            else:
                self._take(fixed, name, ("train", name), value)
        return {**{key: whole(value) for key, value in settings.items()}, "fixed": fixed}

    def search(self, section: Mapping) -> JsonValue:
        settings, knobs = self._split("search", section, SearchSection, "knobs")
        choices: Mapping = {}
        for name, value in knobs.items():
            try:
                choices[name] = _as_json(knob_choices(name, value))
            except KnobFault as fault:
                self._fault(("search", name, *fault.below), str(fault))
        settings = {key: whole(value) for key, value in settings.items()}
        baseline = settings.get("baseline")
        if isinstance(baseline, dict):
            settings["baseline"] = self._baseline(baseline)
        if isinstance(settings.get("paired"), list):
            settings["paired"] = self._paired(settings["paired"])
        return {**settings, "knobs": choices}

    def _baseline(self, entry: Mapping) -> JsonValue:
        """A point that may say its layout too."""
        layout: Mapping = {}
        for name in LAYOUT_NAMES:
            value = whole(entry.get(name, 1))
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                text = f"must be a whole number of at least 1, not {show(value)}"
                self._fault(("search", "baseline", name), text)
            elif name in entry:
                layout[name] = value
        knobs = {name: value for name, value in entry.items() if name not in LAYOUT_NAMES}
        point = self._point(("search", "baseline"), knobs)
        assert isinstance(point, dict)
        return {**point, **layout}

    def one_place_a_knob(self, train: JsonValue, search: JsonValue, arranged: JsonValue) -> None:
        """A knob that stands in `train` and in `search` is a fault, and leaves the arranged search."""
        if not (isinstance(train, dict) and isinstance(search, dict) and isinstance(arranged, dict)):
            return
        knobs = arranged["knobs"]
        assert isinstance(knobs, dict)
        for name in search:
            if name in train and name in KNOB_NAMES:
                text = f"stands in train and in search; keep train.{name} to fix it or search.{name} to search it"
                self.faults.append(self.places.key_fault(("search", name), text))
                knobs.pop(name, None)

    def _paired(self, entries: JsonValue) -> JsonValue:
        assert isinstance(entries, list)
        points: list[JsonValue] = []
        for position, entry in enumerate(entries):
            path = ("search", "paired", position)
            if not isinstance(entry, dict):
                self._fault(path, f"must be a mapping of knobs to values, not {show(entry)}")
                continue
            if len(entry) < 2:
                self._fault(path, "pairs fewer than two knobs; write at least two, or search the knob by itself")
            points.append(self._point(path, entry))
        return points

    def _point(self, path: Path, entry: JsonValue) -> JsonValue:
        assert isinstance(entry, dict)
        point: Mapping = {}
        for name, value in entry.items():
            if name in KNOB_NAMES:
                self._take(point, name, (*path, name), value)
            else:
                self._unknown((*path, name), KNOB_NAMES, "knob")
        return point

    def objective(self, value: JsonValue) -> JsonValue:
        entries = value if isinstance(value, list) else [value]
        if not isinstance(value, list):
            self._restate(("objective",), ("objective", 0), value)
        if not entries:
            self._fault(("objective",), "names no metric; leave it out for tokens_per_second")
        return [self._one_objective(entry) for entry in entries]

    def _one_objective(self, entry: JsonValue) -> JsonValue:
        if not isinstance(entry, dict):
            entry = {"metric": entry}
        metric = entry.get("metric", "tokens_per_second")
        goal = entry.get("goal", "minimize" if metric in MINIMIZED else "maximize")
        return {"metric": metric, **entry, "goal": GOAL_WORDS.get(goal, goal) if isinstance(goal, str) else goal}

    def _restate(self, written: Path, stands: Path, value: JsonValue) -> None:
        """Let the entries of the mapping at `written` be found under `stands` too."""
        if isinstance(value, dict):
            for key in value:
                self.places.values[(*stands, key)] = self.places.value((*written, key))
                self.places.keys[(*stands, key)] = self.places.key((*written, key))

    def measure(self, section: Mapping) -> JsonValue:
        settings: Mapping = {}
        for key, value in section.items():
            settings[key] = (
                {name: whole(each) for name, each in value.items()} if isinstance(value, dict) else whole(value)
            )
            if key.endswith("_s") and key in MeasureSettings.model_fields and isinstance(value, str):
                try:
                    settings[key] = parse_duration(value)
                except ValueError as error:
                    self._fault(("measure", key), str(error))
                    del settings[key]
        return settings

    def _split(self, name: str, section: Mapping, model: type[BaseModel], home: str) -> tuple[Mapping, Mapping]:
        """The settings and the knobs of a section; anything else is a fault."""
        known = [key for key in model.model_fields if key != home]
        settings: Mapping = {}
        knobs: Mapping = {}
        for key, value in section.items():
            if key in known:
                settings[key] = value
            elif key in KNOB_NAMES:
                knobs[key] = value
            else:
                self._unknown((name, key), [*known, *KNOB_NAMES], "key")
        return settings, knobs

    def _take(self, into: Mapping, name: str, path: Path, value: JsonValue) -> None:
        try:
            into[name] = _as_json(knob_value(name, value))
        except KnobFault as fault:
            self._fault((*path, *fault.below), str(fault))

    def _fault(self, path: Path, text: str) -> None:
        self.faults.append(self.places.fault(path, text))

    def _unknown(self, path: Path, known: list[str] | tuple[str, ...], what: str) -> None:
        self.faults.append(self.places.key_fault(path, f"unknown {what}; {did_you_mean(str(path[-1]), known)}"))


def _whole_each(value: JsonValue) -> JsonValue:
    return [whole(item) for item in value] if isinstance(value, list) else whole(value)


def _as_json(value: object) -> JsonValue:
    if isinstance(value, tuple):
        return [_as_json(item) for item in value]
    assert isinstance(value, str | bool | int | float)
    return value
