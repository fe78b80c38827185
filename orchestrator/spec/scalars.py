"""What an unquoted YAML word means: YAML 1.2 numbers and booleans; what other readers read otherwise is refused."""

import math
import re

Scalar = bool | int | float | str | None

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_OTHER_BASE = re.compile(r"[-+]?0[xob][0-9a-fA-F]+")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9]){1,2}(\.[0-9]*)?")
_UNDERSCORED = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_MAX_DIGITS = 64


def read_scalar(text: str) -> Scalar:
    """The value of the plain (unquoted) scalar `text`. Raises ValueError, with the mend, for what must not be guessed.

    `yes`, `no`, `on` and `off` are words, as in YAML 1.2; whether a word is allowed is the field's to say.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number; write a finite one, or quote it when text is meant")
    _refuse_ambiguous(text)
    if _FLOAT.fullmatch(text):
        return _number(text)
    return text


def _number(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} characters; write at most {_MAX_DIGITS}")
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number; write a smaller one")
    return number


def _refuse_ambiguous(text: str) -> None:
    if _LEADING_ZERO.fullmatch(text):
        plain = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", text)
        raise ValueError(f"{text} has a leading zero, which some readers take as octal; write {plain}, or quote it")
    if _OTHER_BASE.fullmatch(text):
        raise ValueError(f"{text} is not a decimal number; write {_decimal(text)}")
    if _SEXAGESIMAL.fullmatch(text):
        raise ValueError(f"{text} is read as a base-60 number by some readers; write {_duration(text)}, or quote it")
    if _UNDERSCORED.fullmatch(text):
        raise ValueError(f"{text} has underscores; write {text.replace('_', '')}")


def _decimal(text: str) -> str:
    try:
        return str(int(text, 0))
    except ValueError:
        return "a decimal number"


def _duration(text: str) -> str:
    parts = [int(float(part)) for part in text.lstrip("+-").split(":")]
    total_s = 0
    for part in parts:
        total_s = total_s * 60 + part
    units = "".join(f"{part}{unit}" for part, unit in zip(parts, "hms"[3 - len(parts) :], strict=True))
    return f"{total_s}s or {units}"
