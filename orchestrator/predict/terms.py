"""Bytes by term of the bill, and what an engine adds to a model in each phase."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Terms = dict[str, int]
"""Bytes by term of the bill."""


@dataclass(frozen=True)
class EngineTerms:
    """What an engine holds for a model. Device terms are those of the rank with the most, host terms those of a node.

    `resident` stands from the end of the first optimizer step on (optimizers make their states in their first step).
    `load` and `init` are whole, at the highest moment of those phases; `step` and `between` come on top of `resident`:
    the highest moment of the optimizer step, and what stays from one micro-step to the next when gradients accumulate.
    A model's buffers, activations and the process itself are in none of them.
    """

    resident: Terms
    load: Terms
    init: Terms
    step: Terms
    between: Terms = field(default_factory=dict)
    host: Terms = field(default_factory=dict)
    host_load: Terms = field(default_factory=dict)
    """While the model is loaded; the other host terms do not yet exist then."""
    host_init: Terms = field(default_factory=dict)
    """Beside `host` while the engine is built."""
    disk_bytes: int = 0
    """Of a node, with NVMe offload."""


def total(terms: Terms) -> int:
    """Sum of all terms."""
    return sum(terms.values())


def add(*parts: Terms) -> Terms:
    """The sum, term by term; terms of no bytes are left out."""
    result: Terms = {}
    for part in parts:
        for name, size_bytes in part.items():
            result[name] = result.get(name, 0) + size_bytes
    return {name: size_bytes for name, size_bytes in result.items() if size_bytes}


def greater(*moments: Terms) -> Terms:
    """The moment with the greatest sum."""
    return max((add(moment) for moment in moments), key=total)


def largest(sizes: Iterable[int]) -> int:
    """The greatest, 0 when there is none."""
    return max(sizes, default=0)
