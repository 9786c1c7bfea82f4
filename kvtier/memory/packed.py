"""Slots packed: as plain bytes, which leases keep, messages carry and grants write down.

Three runs of unsigned 64-bit numbers, little-endian: all offsets, all lengths, all serials.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvtier.errors import ProtocolError
from kvtier.memory.arena import Slot

SLOT_BYTES: Final = 24


def pack_slots(slots: Iterable[Slot]) -> bytes:
    """Return slots packed."""
    columns = zip(*slots, strict=True)
    return b"".join([struct.pack(f"<{len(column)}Q", *column) for column in columns])


def unpack_slots(data: bytes) -> list[Slot]:
    """Return slots that were packed. Raises ProtocolError for half of one."""
    if len(data) % SLOT_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no slots")
    columns = np.frombuffer(data, "<u8").reshape(3, -1)
    rows = zip(*columns.tolist(), strict=True)
    return list(map(tuple.__new__, itertools.repeat(Slot), rows))  # no Python frame for each


def packed_bytes(data: bytes) -> int:
    """Return the bytes of all slots that were packed."""
    count = len(data) // SLOT_BYTES
    return int(np.frombuffer(data, "<u8", count, 8 * count).sum())
