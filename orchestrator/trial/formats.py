"""What training rows look like: the four formats, recognised by their columns, and the text of a row in each."""

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import JsonValue

from orchestrator.trial.unusable import Unusable

DataFormat = Literal["alpaca", "conversations", "messages", "text"]
Row = Mapping[str, JsonValue]
Turn = dict[str, str]
"""`role` and `content`, as chat templates want it."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
    "function": "tool",
    "developer": "system",
}
ACCEPTED = (
    "alpaca (instruction, input, output), conversations (a list of from/value), messages (a list of role/content)"
    " or a text column"
)
_TURN_COLUMNS = ("conversations", "messages")


class Unrecognised(Exception):
    """The row is in none of the formats, or its content does not fit; the text says what was found."""


def recognise(row: Row) -> DataFormat:
    """The format of one row. Raises Unrecognised."""
    present = {name for name, value in row.items() if value is not None}
    for name in _TURN_COLUMNS:
        if name in present:
            return _turn_format(name, row[name])
    if {"instruction", "output"} <= present:
        return "alpaca"
    if "text" in present:
        return "text"
    strings = [name for name in sorted(present) if isinstance(row[name], str)]
    if len(strings) == 1 and not {"instruction", "output"} & present:
        return "text"
    raise Unrecognised(f"has {', '.join(sorted(present)) or 'no values'}")


def _turn_format(name: str, value: JsonValue) -> DataFormat:
    if not isinstance(value, list) or not value:
        raise Unrecognised(f"has {name} without turns")
    first = value[0]
    if isinstance(first, dict) and {"from", "value"} <= first.keys():
        return "conversations"
    if isinstance(first, dict) and {"role", "content"} <= first.keys():
        return "messages"
    found = ", ".join(sorted(first)) if isinstance(first, dict) else type(first).__name__
    raise Unrecognised(f"has {name} whose turns hold {found}")


def recognise_all(rows: list[Row], source: str) -> DataFormat:
    """The one format of all rows. Raises Unusable that names the row which differs; rows count from 1."""
    first: DataFormat | None = None
    for number, row in enumerate(rows, start=1):
        try:
            found = recognise(row)
        except Unrecognised as error:
            raise Unusable("data.path", f"{source}: row {number} {error}; expected {ACCEPTED}") from error
        first = first or found
        if found != first:
            raise Unusable(
                "data.path", f"{source}: row 1 is {first}, row {number} is {found}; put one format in a data set"
            )
    if first is None:
        raise Unusable("data.path", f"{source} holds no rows")
    return first


def turns(row: Row, data_format: DataFormat) -> list[Turn]:
    """The turns of a conversation. Raises Unrecognised for an unknown role or a turn that is not text."""
    speaker, words = ("from", "value") if data_format == "conversations" else ("role", "content")
    name = next(each for each in _TURN_COLUMNS if row.get(each) is not None)
    listed = row[name]
    assert isinstance(listed, list)
    found = []
    for turn in listed:
        if not isinstance(turn, dict) or not isinstance(turn.get(words), str):
            raise Unrecognised(f"has a turn without a text in {words}")
        role, content = turn.get(speaker), turn[words]
        if role not in ROLES:
            raise Unrecognised(f"has a turn from {role!r}; known are {', '.join(ROLES)}")
        found.append({"role": ROLES[str(role)], "content": str(content)})
    system = row.get("system")
    if isinstance(system, str) and system and found and found[0]["role"] != "system":
        found.insert(0, {"role": "system", "content": system})
    return found


def plain_text(row: Row, data_format: DataFormat) -> str:
    """The text of a row that no chat template renders. Raises Unrecognised for a value that is not text."""
    match data_format:
        case "alpaca":
            return _alpaca_text(row)
        case "conversations" | "messages":
            return "".join(f"<|{turn['role']}|>\n{turn['content']}\n" for turn in turns(row, data_format))
        case "text":
            return _text_column(row)


def _alpaca_text(row: Row) -> str:
    parts = []
    for column, heading in (("instruction", "Instruction"), ("input", "Input"), ("output", "Response")):
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            raise Unrecognised(f"has a {type(value).__name__} in {column}, not a text")
        if value:
            parts.append(f"### {heading}:\n{value}")
    return "\n\n".join(parts)


def _text_column(row: Row) -> str:
    value = row.get("text") if row.get("text") is not None else next(each for each in row.values() if each is not None)
    if not isinstance(value, str):
        raise Unrecognised(f"has a {type(value).__name__} in its text column")
    return value


def texts(rows: list[Row], source: str, render: Callable[[Row], str]) -> list[str]:
    """`render` of every row that has any text. Raises Unusable that names the row which cannot be rendered."""
    found = []
    for number, row in enumerate(rows, start=1):
        try:
            text = render(row)
        except Unrecognised as error:
            raise Unusable("data.path", f"{source}: row {number} {error}") from error
        if text.strip():
            found.append(text)
    if not found:
        raise Unusable("data.path", f"{source} holds no text: all {len(rows)} rows are empty")
    return found
