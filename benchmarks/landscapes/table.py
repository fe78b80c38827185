"""A landscape: every configuration of a space with its outcome, and what was predicted of it beforehand.

NAME.csv has a row a configuration, NAME.json says of what. Knobs come first, then `feasible`, `oom_kind` (`gpu`,
`host`), `tokens_per_s`, `peak_gib`, `host_gib` and the same with `prior_`. What is not known is empty.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Knobs = Mapping[str, str | int]
Floats = NDArray[np.float64]

PRIOR = ("prior_tokens_per_s", "prior_peak_gib", "prior_host_gib")


class UnreadableLandscape(Exception):
    """The file is no landscape; the text names it and what is wrong."""


@dataclass(frozen=True, eq=False)
class Landscape:
    """A table in memory. Arrays have an entry a candidate; `nan` where nothing is known.

    `facts` is NAME.json: `name`, `knobs`, `mem_limit_gib`, `host_limit_gib` (of a node), `noise` (standard deviation of
    the logarithm of one run's tokens/s), `kind` (`measured` or `simulated`) and what describes the machine.
    """

    facts: Mapping[str, Any]
    candidates: tuple[Knobs, ...]
    feasible: NDArray[np.bool_]
    oom_kinds: tuple[str, ...]
    tokens_per_s: Floats
    peak_gib: Floats
    host_gib: Floats
    prior: Mapping[str, Floats]

    @property
    def name(self) -> str:
        """Of the table."""
        return str(self.facts["name"])

    @property
    def knobs(self) -> tuple[str, ...]:
        """Their names, in the order of the table."""
        return tuple(self.facts["knobs"])

    @property
    def limits(self) -> dict[str, float]:
        """GiB of one device and of one node's host; devices; weights."""
        return {
            "peak_gib": float(self.facts["mem_limit_gib"]),
            "host_gib": float(self.facts["host_limit_gib"]),
            "n_gpus": float(self.facts.get("n_gpus", 1)),
            "params": float(self.facts.get("params", 0.0)),
        }

    @property
    def noise(self) -> float:
        """Standard deviation of log tokens/s from run to run."""
        return float(self.facts["noise"])

    @property
    def best(self) -> float:
        """Tokens/s of the fastest configuration that ran, by the table."""
        return float(self.tokens_per_s[self.feasible].max())


def landscape(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Landscape:
    """The table of `rows`, whose cells may be numbers, texts, or None and "" for what is not known.

    Raises KeyError without a column, ValueError where a number is none."""
    knobs = tuple(facts["knobs"])
    return Landscape(
        facts=facts,
        candidates=tuple({name: _value(row[name]) for name in knobs} for row in rows),
        feasible=np.array([int(row["feasible"]) == 1 for row in rows]),
        oom_kinds=tuple(row["oom_kind"] for row in rows),
        tokens_per_s=_numbers(rows, "tokens_per_s"),
        peak_gib=_numbers(rows, "peak_gib"),
        host_gib=_numbers(rows, "host_gib"),
        prior={name.removeprefix("prior_"): _numbers(rows, name) for name in PRIOR},
    )


def _value(cell: str | int) -> str | int:
    return int(cell) if isinstance(cell, str) and cell.isdigit() else cell


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> Floats:
    return np.array([float("nan") if row[name] in ("", None) else float(row[name]) for row in rows])


def read_landscape(path: Path) -> Landscape:
    """The table at `path` (NAME.csv, with NAME.json beside it). Raises UnreadableLandscape."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        found = landscape(json.loads(path.with_suffix(".json").read_text(encoding="utf-8")), rows)
    except KeyError as missing:
        raise UnreadableLandscape(f"{path}: cannot be read as a landscape: it lacks {missing}") from missing
    except (OSError, ValueError, csv.Error) as error:
        raise UnreadableLandscape(f"{path}: cannot be read as a landscape: {error}") from error
    if not found.feasible.any():
        raise UnreadableLandscape(f"{path}: no configuration in it has run")
    return found


def write_landscape(folder: Path, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `rows`, with the columns of the first, and `facts` as NAME.csv and NAME.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{facts['name']}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return path
