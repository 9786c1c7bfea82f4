"""All guards that can be taken away, by name: those named by hand, and those found in the source.

Each named by hand shows within 300 schedules. Of those found in the source the others have a
reason why it is harmless that they do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Final

from kvtier.errors import unknown
from kvtier.testing.broken_admission import ADMISSION
from kvtier.testing.broken_catalog import CATALOG
from kvtier.testing.broken_moves import MOVES
from kvtier.testing.broken_reach import REACH
from kvtier.testing.broken_removal import REMOVAL
from kvtier.testing.guards import Guard, guards
from kvtier.testing.mutation import Mutation

_ALL: Final = (*CATALOG, *MOVES, *ADMISSION, *REACH, *REMOVAL)
MUTATIONS: Final = {mutation.name: mutation for mutation in _ALL}


def named(name: str) -> Mutation | Guard:
    """Return a mutation. Raises ConfigError that names the nearest one."""
    if name in MUTATIONS:
        return MUTATIONS[name]
    if name in guards():
        return guards()[name]
    raise unknown("mutation", name, guards() if ":" in name else MUTATIONS)


def chosen(which: str) -> list[str]:
    """Return the names that are meant by all, named, guards, a name, or a pattern with ``*``."""
    if which in ("all", "named", "guards"):
        return [*(MUTATIONS if which != "guards" else ()), *(guards() if which != "named" else ())]
    every = [*MUTATIONS, *guards()]
    matching = [name for name in every if fnmatchcase(name, which)] if "*" in which else []
    return matching or [named(which).name]


@contextlib.contextmanager
def removed(name: str | None) -> Iterator[None]:
    """Run what is inside without a guard; with None, as it is."""
    with contextlib.nullcontext() if name is None else named(name).removed():
        yield
