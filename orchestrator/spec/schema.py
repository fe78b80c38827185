"""The JSON Schema of the YAML form of a spec, for editors. `python -m orchestrator.spec.schema` prints it.

It is published as `docs/sweep-v1.schema.json`. It is as strict as a schema can be about single values; what holds
between values (a knob stands in one place, batches divide) is `orchestrator.spec.load`'s to say.
"""

import json
from typing import Any

from pydantic import JsonValue, TypeAdapter

from orchestrator.contract.config import Knobs, MeasureSettings
from orchestrator.spec.arrange import GOAL_WORDS
from orchestrator.spec.hardware import BY_KEY
from orchestrator.spec.sweep import ANY_DEVICES, KNOB_NAMES, LAYOUT_NAMES, Objective, SweepSpec

SCHEMA_ID = "sweep-v1.schema.json"

Schema = dict[str, JsonValue]

_SIZE: Schema = {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]?[Bb]|[KMGTkmgt][Ii]?[Bb]?)?\s*$"}
_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?[smhd])+$"}


def spec_schema() -> Schema:
    """The schema, in draft 2020-12."""
    schema: Schema = SweepSpec.model_json_schema()
    definitions = _mapping(schema["$defs"])
    definitions |= {f"knob_{name}": _knob(name) for name in KNOB_NAMES}
    definitions["point"] = {
        "type": "object",
        "properties": {name: _reference(name) for name in KNOB_NAMES},
        "additionalProperties": False,
    }
    _knobs_in_place(definitions, "TrainSection", "fixed", {name: _reference(name) for name in KNOB_NAMES})
    _knobs_in_place(definitions, "SearchSection", "knobs", {name: _choices(name) for name in KNOB_NAMES})
    search = _properties(definitions, "SearchSection")
    knobs = _mapping(definitions["point"])
    counts: Schema = {name: {"type": "integer", "minimum": 1} for name in LAYOUT_NAMES}
    search["baseline"] = {**knobs, "properties": {**_mapping(knobs["properties"]), **counts}}
    search["paired"] = {"type": "array", "items": {"$ref": "#/$defs/point", "minProperties": 2}}
    limits, budget = _properties(definitions, "LimitsSection"), _properties(definitions, "BudgetSection")
    for name in limits.keys() - {"reject_probability", "eval_loss_within"}:
        limits[name] = _or_text(limits[name], _SIZE)
    budget["time"] = _or_text(budget["time"], _DURATION)
    resources = _properties(definitions, "ResourcesSection")
    resources["price_per_device_hour"] = _or_text(resources["price_per_device_hour"], {"type": "string"})
    _mapping(resources["device"])["enum"] = [*ANY_DEVICES, *BY_KEY]
    measure = _properties(definitions, "MeasureSection")
    for name in MeasureSettings.model_fields:
        if name.endswith("_s"):
            measure[name] = _or_text(measure[name], _DURATION)
    goal = _mapping(_properties(definitions, "Objective")["goal"])
    goal["enum"] = [*_listed(goal["enum"]), *GOAL_WORDS]
    _mapping(schema["properties"])["objective"] = _objective()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}


def _mapping(value: JsonValue) -> Schema:
    assert isinstance(value, dict)
    return value


def _listed(value: JsonValue) -> list[JsonValue]:
    assert isinstance(value, list)
    return value


def _properties(definitions: Schema, name: str) -> Schema:
    return _mapping(_mapping(definitions[name])["properties"])


def _reference(knob: str) -> Schema:
    return {"$ref": f"#/$defs/knob_{knob}"}


def _knobs_in_place(definitions: Schema, section: str, home: str, knobs: Schema) -> None:
    """Let `knobs` stand directly in a section instead of in `home`."""
    properties = _properties(definitions, section)
    del properties[home]
    properties |= knobs


def _knob(name: str) -> Schema:
    """One value of a knob."""
    if name == "lora_targets":
        names: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
        return {"anyOf": [{"type": "string", "minLength": 1}, names]}
    schema = _mapping(Knobs.model_json_schema()["properties"][name])
    schema = {key: value for key, value in schema.items() if key not in ("default", "title")}
    if "$ref" in schema:
        return _enumeration(name)
    options = schema.get("anyOf")
    if isinstance(options, list):
        told = [option for option in options if option != {"type": "null"}]
        return _enumeration(name) if "$ref" in _mapping(told[0]) else _mapping(told[0])
    return schema


def _enumeration(name: str) -> Schema:
    annotation: Any = Knobs.model_fields[name].annotation
    schema: Schema = TypeAdapter(annotation).json_schema()
    definitions = _mapping(schema.get("$defs", {}))
    enumeration = _mapping(next(iter(definitions.values()), schema))
    return {"enum": enumeration["enum"]}


def _choices(name: str) -> Schema:
    """The choices of a searched knob: a list, or a range where values have an order."""
    value = _reference(name)
    listed: Schema = {"type": "array", "items": value, "minItems": 1}
    if _knob(name).get("type") != "integer" and name != "zero_stage":
        return listed
    span: Schema = {
        "type": "object",
        "properties": {
            "min": value,
            "max": value,
            "scale": {"enum": ["linear", "log2", "log10"]},
            "step": {"type": "integer", "minimum": 1},
        },
        "required": ["min", "max"],
        "additionalProperties": False,
    }
    return {"anyOf": [listed, span]}


def _or_text(number: JsonValue, text: Schema) -> JsonValue:
    return {"anyOf": [number, text]}


def _objective() -> Schema:
    properties = Objective.model_json_schema()["properties"]
    metric = {"enum": properties["metric"]["enum"]}
    one: Schema = {"anyOf": [metric, {"$ref": "#/$defs/Objective"}]}
    return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


if __name__ == "__main__":
    print(json.dumps(spec_schema(), indent=1))
