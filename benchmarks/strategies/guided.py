"""Brimful's sampler, as `benchmarks.search_factory` builds it."""

from typing import Any

from benchmarks import search_factory
from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Result


class FactoryStrategy:
    """A sampler of `benchmarks.search_factory` as a Strategy."""

    first_launches = 0

    def __init__(self, sampler: search_factory.Asked) -> None:
        self._sampler = sampler

    def ask(self) -> int | None:
        """See Strategy."""
        return self._sampler.ask()

    def tell(self, candidate: int, result: Result) -> None:
        """See Strategy."""
        self._sampler.tell(
            candidate,
            {
                "ok": result.is_ok,
                "oom": result.oom,
                "tokens_per_s": result.tokens_per_s if result.is_ok else None,
                "peak_gib": result.peak_gib if result.is_ok else None,
                "host_gib": result.host_gib if result.is_ok else None,
            },
        )


def guided(landscape: Landscape, seed: int) -> FactoryStrategy:
    """To its budget."""
    return FactoryStrategy(search_factory.guided(*_parts(landscape, seed)))


def guided_stop(landscape: Landscape, seed: int) -> FactoryStrategy:
    """Until the expected gain is below what ends a sweep."""
    return FactoryStrategy(search_factory.guided_stop(*_parts(landscape, seed)))


def _parts(landscape: Landscape, seed: int) -> tuple[Any, Any, Any, Any, int]:
    prior = {name: values.copy() for name, values in landscape.prior.items()}
    return [dict(each) for each in landscape.candidates], list(landscape.knobs), prior, dict(landscape.limits), seed
