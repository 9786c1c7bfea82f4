"""NVMe stores whose index becomes full, as too little is charged for a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from kvtier.storage_backends import slab, slab_index, slab_recovery

_FLOOR: Final = 40 * slab.PAGE
_SHORT: Final = (
    (slab, "SLOT_CHARGE", 380),  # a little more than a slot takes in pages that are full
    (slab, "INDEX_FLOOR", _FLOOR),
    (slab_recovery, "INDEX_FLOOR", _FLOOR),
    (slab_index, "_MIN_OPERATIONS", 4),
)


@contextlib.contextmanager
def short_index() -> Iterator[None]:
    """Let the stores of this process, and those that they are opened again by, be such."""
    before = [(module, name, vars(module)[name]) for module, name, _ in _SHORT]
    for module, name, value in _SHORT:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
