"""Brimful's sampler, as `benchmarks.search_factory` builds it."""

from typing import Any

from benchmarks import search_factory
from benchmarks.landscapes.table import Landscape
from benchmarks.strategies.play import Result


class _Asked:
    """The factory's object as a Strategy."""

    first_launches = 0

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def ask(self) -> int | None:
        """See Strategy."""
        candidate = self._sampler.ask()
        return None if candidate is None else int(candidate)

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


def asking(sampler: search_factory.Asked) -> _Asked:
    """A sampler of `benchmarks.search_factory` as a Strategy."""
    return _Asked(sampler)


def guided(landscape: Landscape, seed: int) -> _Asked:
    """To its budget."""
    return _Asked(search_factory.guided(*_parts(landscape, seed)))


def guided_stop(landscape: Landscape, seed: int) -> _Asked:
    """Until the expected gain is small."""
    return _Asked(search_factory.guided_stop(*_parts(landscape, seed)))


def _parts(landscape: Landscape, seed: int) -> tuple[Any, Any, Any, Any, int]:
    prior = {name: values.copy() for name, values in landscape.prior.items()}
    return [dict(each) for each in landscape.candidates], list(landscape.knobs), prior, dict(landscape.limits), seed
