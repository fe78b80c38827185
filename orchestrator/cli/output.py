"""Where words go: results to standard output, progress and hints to standard error."""

import sys
from dataclasses import dataclass, field

from pydantic import BaseModel, JsonValue, TypeAdapter
from rich.console import Console, RenderableType

_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal."""


@dataclass(frozen=True)
class Output:
    """With `as_json` standard output carries exactly one JSON document, whatever else is said."""

    as_json: bool = False
    quiet: bool = False
    stdout: Console = field(default_factory=lambda: _console(stderr=False))
    stderr: Console = field(default_factory=lambda: _console(stderr=True))

    def say(self, text: str) -> None:
        """A line of progress or a hint."""
        if not self.quiet:
            self.stderr.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, result: RenderableType) -> None:
        """A result for people; nothing with `as_json`."""
        if self.as_json:
            return
        if isinstance(result, str):
            self.stdout.print(result, markup=False, highlight=False, soft_wrap=True)
        else:
            self.stdout.print(result)

    def document(self, value: BaseModel | JsonValue) -> None:
        """The one JSON document; nothing without `as_json`."""
        if not self.as_json:
            return
        content = value.model_dump_json(indent=1) if isinstance(value, BaseModel) else _JSON.dump_json(value, indent=1)
        sys.stdout.write((content if isinstance(content, str) else content.decode()) + "\n")


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False)
