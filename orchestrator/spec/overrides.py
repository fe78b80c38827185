"""Settings from the command line, `dotted.key=value`, laid over the spec before it is validated.

`train.KNOB=value` fixes a knob that the spec searches, and `search.KNOB=[..]` searches a knob that the spec fixes: the
other place gives way. A list is replaced as a whole.
"""

from collections.abc import Sequence

from pydantic import JsonValue

from orchestrator.contract.errors import SpecError
from orchestrator.spec.document import parse_document
from orchestrator.spec.places import Fault, Place, Places
from orchestrator.spec.sweep import KNOB_NAMES

_AFTER_ALL = 2**31
"""Faults of overrides are listed after those of the file."""


def apply_overrides(raw: dict[str, JsonValue], places: Places, overrides: Sequence[str]) -> list[Fault]:
    """Lay `overrides` over `raw` in order, the last one wins; the faults that were found on the way."""
    faults: list[Fault] = []
    for position, override in enumerate(overrides):
        place = Place((_AFTER_ALL, position), f"override {override}")
        dotted, equals, text = override.partition("=")
        keys = tuple(part.strip() for part in dotted.split("."))
        if not equals or not all(keys):
            faults.append(Fault(place, (), "is not of the form key=value; write e.g. budget.trials=20"))
            continue
        try:
            value = parse_document(text, Places("value")).value
        except SpecError as error:
            faults.append(Fault(place, (), _reason(error)))
            continue
        fault = _set(raw, keys, value)
        if fault:
            faults.append(Fault(place, (), fault))
            continue
        _give_way(raw, keys)
        for length in range(1, len(keys)):
            places.add(keys[:length], place)
        places.replace(keys, place)
    return faults


def _reason(error: SpecError) -> str:
    """The first fault of an override's value, without its position inside the value."""
    return str(error).split("\n")[0].partition(": ")[2]


def _set(raw: dict[str, JsonValue], keys: tuple[str, ...], value: JsonValue) -> str:
    """Set the value at `keys`, making mappings on the way; what forbids it, or nothing."""
    here = raw
    for depth, key in enumerate(keys[:-1], start=1):
        below = here.get(key)
        if below is None:
            below = here[key] = {}
        if not isinstance(below, dict):
            return f"{'.'.join(keys[:depth])} is not a mapping in the spec; override it as a whole"
        here = below
    here[keys[-1]] = value
    return ""


def _give_way(raw: dict[str, JsonValue], keys: tuple[str, ...]) -> None:
    """A knob that is set in one of `train` and `search` leaves the other."""
    if len(keys) != 2 or keys[1] not in KNOB_NAMES or keys[0] not in ("train", "search"):
        return
    other = raw.get("search" if keys[0] == "train" else "train")
    if isinstance(other, dict):
        other.pop(keys[1], None)
