"""Keeps answers of pure functions of large immutable things, so that candidates that share a part share its price."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Same:
    """Equal only to itself: comparing a profile's arrays would cost more than is saved. Keeps its object alive, so
    that no other gets the same identity."""

    __slots__ = ("object",)

    def __init__(self, of: object) -> None:
        self.object = of

    def __hash__(self) -> int:
        return id(self.object)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.object is other.object


def remembered(identities: int, size: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The latest `size` answers are kept. The first `identities` arguments are told apart by identity, the others by
    value; all are positional. Answers are shared: they must not be changed."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @lru_cache(maxsize=size)
        def answer(*keys: Hashable) -> R:
            arguments = (key.object if isinstance(key, _Same) else key for key in keys)
            return function(*arguments)  # type: ignore[call-arg, arg-type]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            assert not kwargs, "remembered by position"
            return answer(*map(_Same, args[:identities]), *args[identities:])

        return call

    return decorate
