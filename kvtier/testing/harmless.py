"""Guards of the catalog that schedules do not miss soon: what does, or why nothing can.

Every reason was reviewed. A name that is not in the source any more is an error.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from kvtier.testing.guards import guards

FOUND_BY: Final = Path(__file__).with_name("found_by.txt")
"""Names of tests; below each, indented, the guards without which it fails."""

HARMLESS: Final[dict[str, tuple[str, ...]]] = {
    "nothing is named None; that it is left out is for the types": (
        "catalog.Catalog.reserve:always-c978",
    ),
    "few rows are held as many are, and sooner": (
        "index.Index.hold_all:never-e62e",
        "index.Index.hold_all:bound-54e7",
    ),
}
"""By reason: the guards of which it is true."""


@cache
def found_by() -> dict[str, str]:
    """Return for guards that schedules do not miss soon the test that fails without them."""
    found, test = {}, ""
    for line in FOUND_BY.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[line.strip()] = test
        else:
            test = line
    return found


@cache
def harmless() -> dict[str, str]:
    """Return for guards that nothing misses, the reason."""
    return {name: reason for reason, names in HARMLESS.items() for name in names}


def stale() -> list[str]:
    """Return the names in these tables that no guard in the source has."""
    return [name for name in (*found_by(), *harmless()) if name not in guards()]
