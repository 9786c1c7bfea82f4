"""Many packed headers at once, in columns: what ``Header.unpack`` says of each, for less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.identity.record import (
    HEADER_BYTES,
    MAGIC,
    MOST_BYTES,
    MOST_DEPTH,
    RECORD_VERSION,
    checksum,
)

HEADERS: Final = np.dtype(
    {
        "names": ["magic", "version", "depth", "part", "raw_bytes", "stored_bytes", "sum"],
        "formats": ["V8", "<u2", "<u4", ("<u2", 5), "<u8", "<u8", "V16"],
        "offsets": [0, 8, 12, 112, 136, 144, 240],
        "itemsize": HEADER_BYTES,
    }
)
"""The fields of a header by which it is judged, and its numbers. See record.py for the layout."""

_NAMESPACE: Final = slice(16, 48)
_KEY: Final = slice(48, 80)
_ABOVE: Final = slice(80, 112)
_PART: Final = slice(112, 122)
_ABOVE_PART: Final = slice(122, 132)


def whole(packed: Sequence[bytes]) -> NDArray[np.bool_]:
    """Say of each 256 bytes whether they are a header that ``Header.unpack`` would take."""
    heads = np.frombuffer(b"".join(packed), HEADERS)
    sums = b"".join([checksum(head[:240]) for head in packed])
    part = heads["part"]
    good: NDArray[np.bool_] = heads["magic"] == np.void(MAGIC)
    good &= heads["version"] == RECORD_VERSION
    good &= heads["sum"] == np.frombuffer(sums, "V16")
    good &= (part[:, 1] < part[:, 2]) & (part[:, 3] < part[:, 4])
    good &= heads["depth"] < MOST_DEPTH
    good &= (heads["raw_bytes"] <= MOST_BYTES) & (heads["stored_bytes"] <= MOST_BYTES)
    return good


def names_in(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the names that headers give their records. rows: headers x 256; names: x 42."""
    return np.concatenate((rows[:, _KEY], rows[:, _PART]), axis=1)


def parents_in(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the names of their parents, zeros for those without one."""
    found = np.concatenate((rows[:, _ABOVE], rows[:, _ABOVE_PART]), axis=1)
    found[~rows[:, _ABOVE].any(axis=1)] = 0
    return found


def kinds_in(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return namespace and packed part of each: headers x 42."""
    return np.concatenate((rows[:, _NAMESPACE], rows[:, _PART]), axis=1)
