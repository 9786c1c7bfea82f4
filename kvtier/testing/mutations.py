"""All guards that can be taken away, by name. Each shows within 300 schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from kvtier.errors import unknown
from kvtier.testing.broken_catalog import CATALOG
from kvtier.testing.broken_moves import MOVES
from kvtier.testing.mutation import Mutation

__all__ = ["MUTATIONS", "named", "removed"]

MUTATIONS: Final = {mutation.name: mutation for mutation in (*CATALOG, *MOVES)}


def named(name: str) -> Mutation:
    """Return a mutation. Raises ConfigError that names the nearest one."""
    if name not in MUTATIONS:
        raise unknown("mutation", name, MUTATIONS)
    return MUTATIONS[name]


@contextlib.contextmanager
def removed(name: str | None) -> Iterator[None]:
    """Run what is inside without a guard; with None, as it is."""
    with contextlib.nullcontext() if name is None else named(name).removed():
        yield
