"""Guards of the core that can be taken away, to see whether the simulation misses them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

Patch = tuple[Any, str, Any]
"""An owner, the name of one of its attributes, and what stands there instead."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One guard less. guard: what no longer holds; shows: how that may be noticed, a pattern."""

    name: str
    guard: str
    shows: str
    patches: Callable[[], Iterable[Patch]]

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Run what is inside without the guard."""
        with contextlib.ExitStack() as stack:
            for owner, attribute, instead in self.patches():
                stack.enter_context(mock.patch.object(owner, attribute, instead))
            yield


Patches = Callable[[], Iterable[Patch]]


def collector(into: list[Mutation]) -> Callable[[str, str], Callable[[Patches], Patches]]:
    """Return a decorator ``(guard, shows)`` that appends a mutation named after its function."""

    def describe(guard: str, shows: str) -> Callable[[Patches], Patches]:
        def add(patches: Patches) -> Patches:
            name = patches.__name__.replace("_", "-")
            into.append(Mutation(name, guard, shows, patches))
            return patches

        return add

    return describe
