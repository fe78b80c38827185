"""Validates a document against its pydantic model and tells every fault by its place in the file."""

import json
from typing import TypeVar, get_args

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.spec.messages import explain
from orchestrator.spec.places import Fault, Path, Places, did_you_mean, spec_error

Model = TypeVar("Model", bound=BaseModel)

_EXAMPLES = {
    "version": "version: 1",
    "name": "name: my-sweep",
    "model": "model: {path: checkpoint-folder}, or a config",
    "data": "data: {path: rows.jsonl, sequence_length: 1024}",
    "train": "train: {global_batch: 16, learning_rate: 1e-4}",
    "global_batch": "global_batch: 16, the rows of one optimizer step over all devices",
    "learning_rate": "learning_rate: 1e-4",
    "train_tokens": "train_tokens: 20000, after which the loss on held-out rows is taken",
    "sequence_length": "sequence_length: 1024, in tokens",
    "quality": "quality: {train_tokens: 20000, eval_rows: 32}, or leave it out",
    "confirm": "confirm: {top: 3, repeats: 2}, or confirm: {top: 0} to measure nothing again",
}
_NO_MAPPING = {"model_type", "model_attributes_type", "dict_type"}


def validate(model: type[Model], value: dict[str, JsonValue], places: Places, faults: list[Fault]) -> Model:
    """`value` as a `model`, without coercing one type into another.

    Raises SpecError with a line for each of `faults`, found before, and each of its own.
    """
    found: list[Fault] = []
    try:
        valid = model.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = [_fault(detail, places, model) for detail in details if not _follows(detail, details)]
    told = {fault.path for fault in faults}
    faults = faults + [fault for fault in found if fault.path not in told]
    if faults:
        raise spec_error(faults)
    return valid


def _follows(error: ErrorDetails, errors: list[ErrorDetails]) -> bool:
    """Whether a list seems too short only because its entries are wrong."""
    here = error["loc"]
    return error["type"] == "too_short" and any(other["loc"][: len(here)] == here != other["loc"] for other in errors)


def _fault(error: ErrorDetails, places: Places, model: type[BaseModel]) -> Fault:
    path = _written_path(error["loc"])
    if error["type"] == "missing":
        text = f"is missing; add {_EXAMPLES.get(str(path[-1]), f'{path[-1]}: VALUE')}"
        around = path[:-1]
        place = places.value(around) if around and isinstance(around[-1], int) else places.key(path)
        return Fault(place, path, text)
    if error["type"] == "extra_forbidden":
        return places.key_fault(path, f"unknown key; {did_you_mean(str(path[-1]), _keys(model, path[:-1]))}")
    if path == ("version",):
        return places.fault(path, "must be 1; write version: 1")
    example = _EXAMPLES.get(str(path[-1])) if path and error["type"] in _NO_MAPPING else None
    return places.fault(path, explain(error) + (f"; write {example}" if example else ""))


def _written_path(location: Path) -> Path:
    """The path in the file of a location in the models: knobs stand directly in their section."""
    if location[:2] in (("train", "fixed"), ("search", "knobs")):
        return (location[0], *location[2:])
    return location


def _keys(model: type[BaseModel], path: Path) -> list[str]:
    """The field names of whichever model stands at `path` inside `model`."""
    for part in path:
        if isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
