"""Reads a sweep spec: strict YAML, overrides, validation with the place of every fault, and absolute paths."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from orchestrator.spec.arrange import arrange
from orchestrator.spec.checks import check_spec, resolve_paths
from orchestrator.spec.document import read_document
from orchestrator.spec.overrides import apply_overrides
from orchestrator.spec.places import Places, spec_error
from orchestrator.spec.price import resolve_price
from orchestrator.spec.sweep import SweepSpec
from orchestrator.spec.validation import validate

SPEC_VERSION = 1


@dataclass(frozen=True)
class LoadedSpec:
    """A valid spec. `text` is the file as written, `notes` are remarks for the user that are no faults."""

    spec: SweepSpec
    text: str
    path: Path
    overrides: tuple[str, ...]
    notes: tuple[str, ...]
    places: Places = field(repr=False)

    def locate(self, dotted: str) -> str:
        """Where the value at `dotted` (e.g. `search.lora_targets`) was written: `file:line:col: dotted`, for faults
        that show only once the model or the data are looked at."""
        return f"{self.places.value(tuple(dotted.split('.'))).label}: {dotted}"


def load_spec(
    path: Path, overrides: Sequence[str] = (), allow_remote_code: bool = False, for_elsewhere: bool = False
) -> LoadedSpec:
    """The spec at `path` with `overrides` (`key=value`) laid over it.

    Relative paths in the file mean its own folder when they exist there, else the working directory; in overrides it is
    the other way round. A spec `for_elsewhere` may name absolute paths that are not on this machine.
    `model.trust_remote_code: true` needs `allow_remote_code` too. Raises SpecError with one line a fault:
    `file:line:col: dotted.place: what is wrong; the mend`.
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
    faults += resolve_paths(arranged.value, places, path, overridden, for_elsewhere)
    faults += resolve_price(arranged.value, places, path, overridden)
    spec = validate(SweepSpec, arranged.value, places, faults)
    faults = check_spec(spec, places, allow_remote_code)
    if faults:
        raise spec_error(faults)
    return LoadedSpec(spec, document.text, path, tuple(overrides), _notes(spec), places)


def _check_version(raw: dict[str, JsonValue], places: Places) -> None:
    version = raw.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > SPEC_VERSION:
        release = importlib.metadata.version("brimful")
        text = (
            f"version {version} is newer than version {SPEC_VERSION}, the newest that brimful {release} reads; "
            f"upgrade brimful to a release that reads version {version}, or write version: {SPEC_VERSION}"
        )
        raise spec_error([places.fault(("version",), text)])


def _notes(spec: SweepSpec) -> tuple[str, ...]:
    if spec.search is None:
        return ("the spec has no search section: the default space for the model and the devices is searched",)
    return ()
