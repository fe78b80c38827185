"""Where a value of a document was written, and what is wrong with it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.contract.errors import SpecError

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the document."""


@dataclass(frozen=True, order=True)
class Place:
    """`label` is `file:line:col`, or `override key=value` for a value from the command line. `order` sorts faults."""

    order: tuple[int, int]
    label: str


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a document, with the mend."""

    place: Place
    path: Path
    text: str

    def line(self) -> str:
        """`file:line:col: dotted.place: what is wrong; the mend`, on one line."""
        dotted = dotted_path(self.path)
        repeated = not dotted or self.place.label.startswith(f"override {dotted}=")
        message = self.text if repeated else f"{dotted}: {self.text}"
        return " ".join(f"{self.place.label}: {message}".split())


@dataclass
class Places:
    """Positions of a document's keys and values. `source` is the document's name in messages."""

    source: str
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)

    def at(self, line: int, column: int) -> Place:
        """The place of 1-based `line` and `column`."""
        return Place((line, column), f"{self.source}:{line}:{column}")

    def value(self, path: Path) -> Place:
        """Where the value at `path`, or the nearest written value around it, begins."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.values:
                return self.values[path[:length]]
        return self.at(1, 1)

    def key(self, path: Path) -> Place:
        """Where the key at `path`, or the nearest written key around it, begins."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.keys:
                return self.keys[path[:length]]
        return self.at(1, 1)

    def add(self, path: Path, place: Place) -> None:
        """Let `path` be written at `place` unless it stands in the document."""
        self.keys.setdefault(path, place)
        self.values.setdefault(path, place)

    def replace(self, path: Path, place: Place) -> None:
        """Let `path` and all below it be written at `place`."""
        for table in (self.keys, self.values):
            for known in [known for known in table if known[: len(path)] == path]:
                del table[known]
            table[path] = place

    def fault(self, path: Path, text: str) -> Fault:
        """A fault of the value at `path`."""
        return Fault(self.value(path), path, text)

    def key_fault(self, path: Path, text: str) -> Fault:
        """A fault of the key at `path`, or of a key that is missing there."""
        return Fault(self.key(path), path, text)

    def error(self, line: int, column: int, text: str) -> SpecError:
        """The error of one fault of the whole document, seen at `line` and `column`."""
        return spec_error([Fault(self.at(line, column), (), text)])


def dotted_path(path: Path) -> str:
    """`search.micro_batch[2]` for `("search", "micro_batch", 2)`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def spec_error(faults: Iterable[Fault]) -> SpecError:
    """The error with one line a fault, in the order of the document."""
    ordered = sorted(set(faults), key=lambda fault: (fault.place, dotted_path(fault.path), fault.text))
    return SpecError("\n".join(fault.line() for fault in ordered))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The mend for an unknown `word`: the nearest known one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    near = near or [name for name in names if name.startswith(word.lower())]
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(names)}"
