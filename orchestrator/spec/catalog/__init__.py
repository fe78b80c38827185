"""The shapes of well-known models, built in: a model by its name of the hub becomes a config without network.

The rows are in `models.json`; a row holds what decides shapes, not rotary bases or token ids.
"""

from collections import defaultdict
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter

from orchestrator.contract.config import Frozen, ModelSource

_ROWS = "models.json"
_LIKENESS = 0.7
"""difflib's ratio; below it a name is another model's rather than a slip."""


class CatalogEntry(Frozen):
    """One shape, known under `id` and `aliases`: fine-tuned, quantised and mirrored models of the same shape."""

    model_config = ConfigDict(strict=True)

    id: str
    aliases: tuple[str, ...] = ()
    task: Literal["causal_lm", "masked_lm", "sequence_classification", "seq2seq_lm"] = "causal_lm"
    """The head that `parameters` counts."""
    config: dict[str, JsonValue]
    """transformers' config: `model_type` and what decides shapes."""
    parameters: int = Field(ge=1)
    """Weights, tied ones once, without adapters."""
    parameters_source: Literal["hub", "card", "log", "computed"]
    """`hub`: the checkpoint's own count (safetensors); `card`: its authors print it; `log`: others print it;
    `computed`: follows from the config, no published figure found."""
    note: str = ""
    """What the count leaves out or assumes."""
    surrogate: str | None = None
    """Why another architecture of the same shape stands in; None: `config` is the model's own."""

    @property
    def names(self) -> tuple[str, ...]:
        """`id` and `aliases`."""
        return (self.id, *self.aliases)


@cache
def entries() -> tuple[CatalogEntry, ...]:
    """All rows, by family."""
    text = files(__name__).joinpath(_ROWS).read_bytes()
    return TypeAdapter(tuple[CatalogEntry, ...]).validate_json(text)


def known(name: str) -> CatalogEntry | None:
    """The row of `name`: an id, an alias, or the last part of either where only one shape has it.

    Case does not matter, nor `_` for `-`.
    """
    rows = _spellings().get(_plain(name), {})
    return next(iter(rows.values())) if len(rows) == 1 else None


def closest(name: str, limit: int = 3) -> tuple[str, ...]:
    """Ids of the rows whose names look most like `name`, the best first; empty when none does."""
    spellings, plain = _spellings(), _plain(name)
    matches = [
        match
        for asked in (plain, _last(plain))
        for match in get_close_matches(asked, spellings, n=4 * limit, cutoff=_LIKENESS)
    ]
    return tuple(dict.fromkeys(row for match in matches for row in spellings[match]))[:limit]


def hint(name: str) -> str:
    """What to add to the message that `name` cannot be had from the hub; empty when nothing here is like it."""
    if known(name) is not None:
        return "; its shape is built in, so model.weights: random needs no network"
    names = closest(name)
    return f"; well-known names like it: {', '.join(names)}" if names else ""


def weightless(source: ModelSource) -> ModelSource:
    """`source` for work that needs no weights: a known id becomes its config, so that the hub is not asked.

    Unchanged when the id is unknown, pinned to a revision, or allowed to bring its own code: only the hub has those.
    """
    entry = known(source.id) if source.id is not None else None
    if entry is None or source.revision is not None or source.trust_remote_code:
        return source
    return ModelSource(config=entry.config, weights="random")


@cache
def _spellings() -> Mapping[str, Mapping[str, CatalogEntry]]:
    """Every name and last part of a name, with the rows that it may mean by their ids."""
    rows: dict[str, dict[str, CatalogEntry]] = defaultdict(dict)
    for entry in entries():
        for name in map(_plain, entry.names):
            rows[name][entry.id] = rows[_last(name)][entry.id] = entry
    return rows


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")
