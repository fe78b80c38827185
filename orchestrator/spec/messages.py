"""Turns pydantic's errors into a sentence that says what is wrong and how to mend it."""

import json
import re
from typing import Any

from pydantic import JsonValue
from pydantic_core import ErrorDetails

_SWITCHED_OFF = {"off", "no", "false", "null", "disabled"}
_WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list such as [a, b]",
    "list_type": "a list such as [a, b]",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "finite_number": "a finite number",
}
_THOUSANDS = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def show(value: JsonValue) -> str:
    """`value` as it would be written, cut to 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= 60 else f"{text[:57]}..."


def show_plain(value: JsonValue) -> str:
    """`value` as YAML without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def explain(error: ErrorDetails) -> str:
    """What is wrong with the value of `error`, and the mend; not for unknown or missing keys."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in ("enum", "literal_error"):
        return _not_a_choice(value, str(context["expected"]))
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]:g}, not {show(value)}"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {_written(kind, value)}"
    if kind == "too_short":
        return f"has {context['actual_length']} entries; list at least {context['min_length']}"
    if kind == "string_pattern_mismatch":
        return (
            f"{show(value)} is not a name; write letters, digits, '.', '_' and '-', "
            "at most 63, beginning with a letter or digit"
        )
    return error["msg"].removeprefix("Value error, ")


def _written(kind: str, value: Any) -> str:
    if kind.startswith("bool") and isinstance(value, str):
        return f"the word {value!r}"
    if kind == "string_type" and isinstance(value, int | float):
        return f"{show(value)}; quote it: '{json.dumps(value)}'"
    if kind.startswith(("int", "float")) and isinstance(value, str):
        return show(value) + _as_number(value)
    if value is None:
        return "nothing; give a value or leave the key out"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else show(value)


def _as_number(text: str) -> str:
    """How a number with a unit of its own is written without it; empty for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([%kKmMgGbBtT])", text.strip())
    if match is None:
        return ""
    if match[2] == "%":
        return f"; write {float(match[1]) / 100:g}"
    return f"; write {match[1]}e{_THOUSANDS[match[2].lower()]}"


def _not_a_choice(value: JsonValue, expected: str) -> str:
    choices = expected.replace("'", "").replace(" or ", ", ")
    word = str(value).lower()
    if "none" in choices.split(", ") and (value is False or value is None or word in _SWITCHED_OFF):
        return f"{show(value)} is not one of {choices}; write none"
    return f"{show(value)} is not one of {choices}; write one of them"
