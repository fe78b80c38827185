"""Reads a sweep spec: strict YAML, overrides, validation with the place of every fault, and absolute paths."""

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.contract.config import MeasureSettings
from orchestrator.spec.arrange import arrange
from orchestrator.spec.checks import check_spec, resolve_paths
from orchestrator.spec.document import read_document
from orchestrator.spec.messages import explain
from orchestrator.spec.overrides import apply_overrides
from orchestrator.spec.places import Fault, Places, did_you_mean, spec_error
from orchestrator.spec.places import Path as DottedPath
from orchestrator.spec.sweep import (
    BudgetSection,
    DataSection,
    LimitsSection,
    ModelSection,
    Objective,
    ResourcesSection,
    SearchSection,
    SweepSpec,
    TrackingSection,
    TrainSection,
)

SPEC_VERSION = 1

_SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "search": SearchSection,
    "objective": Objective,
    "limits": LimitsSection,
    "resources": ResourcesSection,
    "measure": MeasureSettings,
    "budget": BudgetSection,
    "tracking": TrackingSection,
}


@dataclass(frozen=True)
class LoadedSpec:
    """A valid spec. `text` is the file as written, `notes` are remarks for the user that are no faults."""

    spec: SweepSpec
    text: str
    path: Path
    overrides: tuple[str, ...]
    notes: tuple[str, ...] = ()


def load_spec(path: Path, overrides: Sequence[str] = (), allow_remote_code: bool = False) -> LoadedSpec:
    """The spec at `path` with `overrides` (`key=value`) laid over it.

    Relative paths in the file mean its own folder when they exist there, else the working directory; in overrides it is
    the other way round. `model.trust_remote_code: true` needs `allow_remote_code` too. Raises SpecError with one line a
    fault: `file:line:col: dotted.place: what is wrong; the mend`.
    """
    document = read_document(path)
    places = document.places
    raw = document.value
    if raw is None:
        raise places.error(1, 1, "is empty; begin with the spec that `brimful init` writes")
    if not isinstance(raw, dict):
        raise places.error(1, 1, "is not a mapping of sections; begin with the spec that `brimful init` writes")
    faults = apply_overrides(raw, places, overrides)
    _check_version(raw, places)
    arranged = arrange(raw, places)
    faults += arranged.faults
    overridden = {override.partition("=")[0].strip() for override in overrides}
    faults += resolve_paths(arranged.value, places, path, overridden)
    spec = _validate(arranged.value, places, faults)
    if spec is None or faults:
        raise spec_error(faults)
    faults += check_spec(spec, places, allow_remote_code)
    if faults:
        raise spec_error(faults)
    return LoadedSpec(spec, document.text, path, tuple(overrides), _notes(spec))


def _check_version(raw: dict[str, JsonValue], places: Places) -> None:
    version = raw.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > SPEC_VERSION:
        release = importlib.metadata.version("brimful")
        text = (
            f"version {version} is newer than version {SPEC_VERSION}, the newest that brimful {release} reads; "
            f"upgrade brimful to a release that reads version {version}, or write version: {SPEC_VERSION}"
        )
        raise spec_error([places.fault(("version",), text)])


def _validate(value: dict[str, JsonValue], places: Places, faults: list[Fault]) -> SweepSpec | None:
    """The spec, or None with what is wrong added to `faults`."""
    try:
        return SweepSpec.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        found = [_fault(detail, places) for detail in error.errors(include_url=False)]
    known = {fault.path for fault in faults}
    faults += [fault for fault in found if fault.path not in known]
    return None


def _fault(error: ErrorDetails, places: Places) -> Fault:
    path = _written_path(error["loc"])
    if error["type"] == "missing":
        return Fault(places.key(path), path, f"is missing; add {_example(path)}")
    if error["type"] == "extra_forbidden":
        return places.key_fault(path, f"unknown key; {did_you_mean(str(path[-1]), _keys_beside(path))}")
    if path == ("version",):
        return places.fault(path, f"must be {SPEC_VERSION}; write version: {SPEC_VERSION}")
    return places.fault(path, explain(error))


def _written_path(location: DottedPath) -> DottedPath:
    """The path in the file of a location in the models: knobs stand directly in their section."""
    if location[:2] in (("train", "fixed"), ("search", "knobs")):
        return (location[0], *location[2:])
    return location


def _keys_beside(path: DottedPath) -> list[str]:
    section = _SECTIONS.get(str(path[0]))
    return list(section.model_fields) if section else list(SweepSpec.model_fields)


_EXAMPLES = {
    "version": "version: 1",
    "name": "name: my-sweep",
    "model": "model: {path: checkpoint-folder}, or a config",
    "data": "data: {path: rows.jsonl, sequence_length: 1024}",
    "train": "train: {global_batch: 16, learning_rate: 1e-4}",
    "global_batch": "global_batch: 16, the rows of one optimizer step over all devices",
    "learning_rate": "learning_rate: 1e-4",
    "sequence_length": "sequence_length: 1024, in tokens",
}


def _example(path: DottedPath) -> str:
    return _EXAMPLES.get(str(path[-1]), f"{path[-1]}: VALUE")


def _notes(spec: SweepSpec) -> tuple[str, ...]:
    if spec.search is None:
        return ("the spec has no search section: the default space for the model and the devices is searched",)
    return ()
