"""Guards of the catalog that schedules do not miss: what does, or why nothing can.

Every entry was reviewed. One that is not in the source any more is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from kvtier.testing.guards import guards

__all__ = ["FOUND_BY", "HARMLESS", "found_by", "harmless", "stale"]

FOUND_BY: Final[dict[str, tuple[str, ...]]] = {}
"""By test: the guards without which it fails."""

HARMLESS: Final[dict[str, tuple[str, ...]]] = {}
"""By reason: the guards of which it is true."""


@cache
def found_by() -> dict[str, str]:
    """Return for guards that only a test misses, that test."""
    return {name: test for test, names in FOUND_BY.items() for name in names}


@cache
def harmless() -> dict[str, str]:
    """Return for guards that nothing misses, the reason."""
    return {name: reason for reason, names in HARMLESS.items() for name in names}


def stale() -> list[str]:
    """Return the names in these tables that no guard in the source has."""
    return [name for name in (*found_by(), *harmless()) if name not in guards()]
