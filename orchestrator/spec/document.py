"""Reads one YAML document as plain values with the place of each, strictly and within bounds.

Bounds: a regular file of at most MAX_FILE_BYTES, UTF-8, MAX_DEPTH levels, MAX_NODES values after aliases are expanded.
Refused: duplicate keys, tags, merge keys, several documents, and the words that `orchestrator.spec.scalars` refuses.
"""

import copy
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import NoReturn

import yaml
from pydantic import JsonValue

from orchestrator.spec.places import Fault, Path, Place, Places, spec_error
from orchestrator.spec.scalars import read_scalar

MAX_FILE_BYTES = 1_000_000
MAX_DEPTH = 30
MAX_NODES = 50_000

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass
class Document:
    """The values of a document and where they stand. `value` is None for an empty document."""

    text: str
    value: JsonValue
    places: Places


def read_document(path: FilePath) -> Document:
    """The document at `path`. Raises SpecError with a line for each fault."""
    places = Places(str(path))
    return parse_document(_read_text(path, places), places)


def parse_document(text: str, places: Places) -> Document:
    """The document in `text`; positions go to `places`. Raises SpecError with a line for each fault."""
    try:
        composer = _Composer(yaml.parse(text, Loader=_LOADER), places)
        value = composer.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = f"not valid YAML: {_problem(error)}; mend the line or quote the text"
        raise places.error(line, column, message) from error
    except yaml.reader.ReaderError as error:
        line, column = _position(text, error.position)
        message = f"the character {_code(error.character)} is not allowed in YAML; delete it"
        raise places.error(line, column, message) from error
    if composer.faults:
        raise spec_error(composer.faults)
    return Document(text, value, places)


def _code(character: object) -> str:
    return f"U+{character:04X}" if isinstance(character, int) else ascii(character)


def _problem(error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or "syntax error").split("\n")[0]
    if "'\\t'" in problem or "tab" in problem:
        return f"{problem} (a tab; indent with spaces)"
    return problem


def _position(text: str, offset: int) -> tuple[int, int]:
    before = text[:offset]
    return before.count("\n") + 1, offset - before.rfind("\n")


def _read_text(path: FilePath, places: Places) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise places.error(1, 1, f"is {kind}; give the path of a YAML file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise places.error(1, 1, f"cannot be read ({error.strerror}); give the path of a YAML file") from error
    except ValueError as error:
        raise places.error(1, 1, "is not a path; give the path of a YAML file") from error
    if len(content) > MAX_FILE_BYTES:
        raise places.error(1, 1, f"is larger than {MAX_FILE_BYTES} bytes; a spec names data, it does not hold it")
    return _decode(content, places)


def _decode(content: bytes, places: Places) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise places.error(1, 1, "is written in UTF-16; save it as UTF-8")
    if b"\0" in content:
        raise places.error(1, 1, "is a binary file; give the path of a YAML file in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        message = f"byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise places.error(line, column, message) from error


@dataclass
class _Composer:
    """Builds values from parser events, so that depth and size are bounded before anything is built."""

    events: Iterator[yaml.Event]
    places: Places
    faults: list[Fault] = field(default_factory=list)
    anchors: dict[str, tuple[JsonValue, int]] = field(default_factory=dict)
    nodes: int = 0

    def document(self) -> JsonValue:
        value: JsonValue = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._stop(event, (), "a second document begins; keep one document a file")
                value = self._node(next(self.events), (), 1)
        return value

    def _place(self, event: yaml.Event) -> Place:
        assert event.start_mark is not None
        return self.places.at(event.start_mark.line + 1, event.start_mark.column + 1)

    def _fault(self, event: yaml.Event, path: Path, text: str) -> None:
        self.faults.append(Fault(self._place(event), path, text))

    def _stop(self, event: yaml.Event, path: Path, text: str) -> NoReturn:
        raise spec_error([*self.faults, Fault(self._place(event), path, text)])

    def _count(self, event: yaml.Event, path: Path, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self._stop(event, path[:3], f"more than {MAX_NODES} values once aliases are expanded; write fewer")

    def _node(self, event: yaml.Event, path: Path, depth: int) -> JsonValue:
        if depth > MAX_DEPTH:
            self._stop(event, path[:3], f"nested more than {MAX_DEPTH} levels deep; write it flatter")
        self.places.values[path] = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path)
        before = self.nodes
        self._count(event, path, 1)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        if event.tag not in (None, "!"):
            self._fault(event, path, f"the tag {event.tag} is not accepted; write the plain value")
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path, depth)
        else:
            value = self._mapping(path, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before)
        return value

    def _alias(self, event: yaml.AliasEvent, path: Path) -> JsonValue:
        value, nodes = self.anchors.get(event.anchor or "", (None, 0))
        if nodes == 0:
            self._stop(event, path, f"the alias *{event.anchor} names nothing before it; write the value out")
        self._count(event, path, nodes)
        return copy.deepcopy(value)

    def _scalar(self, event: yaml.ScalarEvent, path: Path) -> JsonValue:
        if not event.implicit[0]:
            return event.value
        try:
            return read_scalar(event.value)
        except ValueError as error:
            self._fault(event, path, str(error))
            return None

    def _sequence(self, path: Path, depth: int) -> JsonValue:
        items: list[JsonValue] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items)), depth + 1))
        return items

    def _mapping(self, path: Path, depth: int) -> JsonValue:
        items: dict[str, JsonValue] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._key(event, path)
            if key in items:
                first = self.places.keys[(*path, key)].order[0]
                self._fault(event, (*path, key), f"this key stands already in line {first}; keep one of the two")
                self._node(next(self.events), (*path, key, "(second)"), depth + 1)
                continue
            self.places.keys[(*path, key)] = self._place(event)
            items[key] = self._node(next(self.events), (*path, key), depth + 1)
        return items

    def _key(self, event: yaml.Event, path: Path) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            self._stop(event, path, "a key that is a list, a mapping or an alias; write plain words as keys")
        if event.implicit[0] and event.value == "<<":
            self._fault(event, path, "merge keys (<<) are not accepted; write the keys out")
        if event.tag not in (None, "!"):
            self._fault(event, path, f"the tag {event.tag} is not accepted; write the plain key")
        return event.value
