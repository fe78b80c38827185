"""Values of knobs as a spec writes them: one value, a list of choices, or a range."""

import functools
import json
import math
from typing import Annotated, Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from orchestrator.contract.config import Knobs
from orchestrator.spec.messages import explain, show, show_plain
from orchestrator.spec.places import did_you_mean
from orchestrator.spec.sweep import KnobValue

MAX_CHOICES = 1000
_RANGE_KEYS = ("min", "max", "scale", "step")
_ALL_LINEAR = "all-linear"


class KnobFault(ValueError):
    """A knob's value is wrong. `below` is the position or key inside the value that is."""

    def __init__(self, text: str, below: tuple[str | int, ...] = ()) -> None:
        super().__init__(text)
        self.below = below


def whole(value: JsonValue) -> JsonValue:
    """`value` as an int where it is a whole float such as `5e8`, else unchanged."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value


def knob_value(name: str, value: JsonValue) -> KnobValue:
    """The value of the knob `name`. Raises KnobFault with the mend."""
    if name == "lora_targets":
        return _lora_targets(value)
    if value is None:
        raise KnobFault("is empty; give a value or leave the knob out")
    if isinstance(value, list | dict):
        raise KnobFault(f"must be one value here, not a {'list' if isinstance(value, list) else 'mapping'}")
    number = whole(value)
    assert isinstance(number, str | bool | int | float)
    try:
        _adapter(name).validate_json(json.dumps(number), strict=True)
    except ValidationError as error:
        raise KnobFault(explain(error.errors()[0])) from error
    return number


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    field = Knobs.model_fields[name]
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation)


def _lora_targets(value: JsonValue) -> KnobValue:
    """`all-linear`, or the names of a list or of a comma-separated text, each once and sorted."""
    if value == _ALL_LINEAR:
        return _ALL_LINEAR
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise KnobFault(f"must be all-linear or names of linear layers such as 'q_proj,v_proj', not {show(value)}")
    targets = set()
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            below = (position,) if isinstance(value, list) else ()
            raise KnobFault(f"must be the name of a linear layer, not {show(name)}", below)
        targets.add(name.strip())
    if _ALL_LINEAR in targets:
        raise KnobFault("all-linear stands for every linear layer; write it alone")
    return tuple(sorted(targets))


def knob_choices(name: str, value: JsonValue) -> tuple[KnobValue, ...]:
    """The choices of the searched knob `name` from a list or a range. Raises KnobFault with the mend."""
    if isinstance(value, dict):
        return _range(name, value)
    if not isinstance(value, list):
        knob_value(name, value)
        raise KnobFault(f"must be a list of choices such as [{show_plain(value)}], or {{min: .., max: ..}}")
    if not value:
        raise KnobFault("has no choices; list at least one")
    if len(value) > MAX_CHOICES:
        raise KnobFault(f"has {len(value)} choices; list at most {MAX_CHOICES}")
    choices: list[KnobValue] = []
    for position, item in enumerate(value):
        try:
            choice = knob_value(name, item)
        except KnobFault as fault:
            raise KnobFault(str(fault), (position, *fault.below)) from fault
        if choice in choices:
            raise KnobFault(f"{show(item)} stands twice among the choices; keep one", (position,))
        choices.append(choice)
    return tuple(choices)


def _range(name: str, value: dict[str, JsonValue]) -> tuple[KnobValue, ...]:
    for key in value:
        if key not in _RANGE_KEYS:
            raise KnobFault(f"unknown key of a range; {did_you_mean(key, _RANGE_KEYS)}", (key,))
    low, high = _bound(name, value, "min"), _bound(name, value, "max")
    if low > high:
        raise KnobFault(f"min {low} is greater than max {high}; swap them", ("min",))
    scale = value.get("scale", "linear")
    if scale not in ("linear", "log2", "log10"):
        raise KnobFault(f"{show(scale)} is not one of linear, log2, log10; write one of them", ("scale",))
    if scale == "linear":
        return _linear(low, high, value.get("step", 1))
    if "step" in value:
        raise KnobFault(f"has no meaning with scale {scale}; leave it out", ("step",))
    if low == 0:
        raise KnobFault(f"0 has no place on a {scale} scale; begin at 1", ("min",))
    base = 2 if scale == "log2" else 10
    return tuple(low * base**power for power in range(math.floor(math.log(high / low, base) + 1e-9) + 1))


def _linear(low: int, high: int, step: JsonValue) -> tuple[KnobValue, ...]:
    step = whole(step)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise KnobFault(f"must be a whole number of at least 1, not {show(step)}", ("step",))
    if (high - low) // step + 1 > MAX_CHOICES:
        raise KnobFault(f"spans {(high - low) // step + 1} choices; use a larger step, or scale: log2")
    return tuple(range(low, high + 1, step))


def _bound(name: str, value: dict[str, JsonValue], key: str) -> int:
    if key not in value:
        raise KnobFault(f"a range needs {key}; write {{min: .., max: ..}}")
    try:
        bound = knob_value(name, value[key])
    except KnobFault as fault:
        raise KnobFault(str(fault), (key,)) from fault
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise KnobFault("has no order, so it has no range; write a list of choices")
    return bound
