"""Which model `estimate` is asked about."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.contract.config import ModelSource
from orchestrator.contract.errors import UsageError
from orchestrator.contract.profile import Profile
from orchestrator.placement.hub import hub_answers
from orchestrator.spec.catalog import closest, known

Task = Literal["causal_lm", "masked_lm", "sequence_classification", "seq2seq_lm"]
_EMBEDDING_NAMES = ("embed", "wte")


@dataclass(frozen=True)
class NamedModel:
    """A model to be traced. `note`: what the reader should know of it."""

    name: str
    source: ModelSource
    task: Task = "causal_lm"
    note: str = ""


@dataclass(frozen=True)
class TracedShape:
    """What the defaults of knobs depend on, read from a trace (`orchestrator.space.knobs.Shape`)."""

    hidden_size: int
    total_parameters: int
    adaptable: tuple[str, ...] = ()


def named_model(name: str) -> NamedModel:
    """The model of `name`: a path, a well-known id, or an id that the hub has. Raises UsageError."""
    path = Path(name).expanduser()
    if path.exists():
        return NamedModel(name, ModelSource(path=str(_config_file(path).resolve())))
    if name.startswith(("/", ".", "~")) or name.endswith(".json"):
        raise UsageError(f"--model {name}: there is no such file or folder")
    entry = known(name)
    if entry is not None:
        note = f"{entry.id}: {entry.surrogate}" if entry.surrogate else ""
        return NamedModel(entry.id, ModelSource(config=entry.config), entry.task, note)
    if "/" not in name or not hub_answers(os.environ):
        away = "" if "/" not in name else ", and the hub does not answer"
        raise UsageError(f"--model {name}: no model of this name is built in{away}{_like(name)}")
    return NamedModel(name, ModelSource(id=name))


def _config_file(path: Path) -> Path:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"--model {path}: the folder holds no config.json")
    return file


def _like(name: str) -> str:
    names = closest(name)
    return f"; did you mean {' or '.join(names)}?" if names else "; give a path to its config.json"


def traced_shape(profile: Profile) -> TracedShape:
    """The hidden size is the width of the token embedding, which has the longest axis of all embeddings."""
    base = [each for each in profile.parameters if each.numel_fixed]
    embeddings = [each for each in base if any(word in each.name for word in _EMBEDDING_NAMES)]
    widest = max(embeddings or base[:1], key=lambda each: each.largest_axis)
    total = sum(each.numel_fixed for each in base)
    return TracedShape(max(1, widest.numel_fixed // widest.largest_axis), total)
