"""All records of an open slab store, in columns: read lot by lot, in the order of the index."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.identity.headers import HEADERS, kinds_in, names_in, parents_in, whole
from kvtier.identity.record import HEADER_BYTES, KEY_BYTES, RECORD_ID_BYTES, PartName, RecordId
from kvtier.storage_backends.slab_index import VALUE_BYTES, WHERE, pack_entry
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.tiers.stock import Stock

_LOT: Final = 1 << 14
_NAME: Final = f"V{RECORD_ID_BYTES}"
_PART: Final = struct.Struct("<5H")
_Lot = list[tuple[RecordId, bytes]]


class _Columns:
    """What was read, lot by lot."""

    def __init__(self) -> None:
        self.names: list[RecordId] = []
        self._parents: list[NDArray[np.void]] = []
        self._numbers: list[tuple[NDArray[np.generic], ...]] = []
        self._kinds: dict[bytes, int] = {}

    def add(self, lot: _Lot) -> None:
        """Take entries whose headers are whole, and their names'; others are no records."""
        lot = [one for one in lot if len(one[1]) == VALUE_BYTES and len(one[0]) == RECORD_ID_BYTES]
        values = np.frombuffer(b"".join([value for _, value in lot]), np.uint8)
        rows = values.reshape(-1, VALUE_BYTES)[:, WHERE.itemsize :]
        names = np.frombuffer(b"".join([name for name, _ in lot]), np.uint8)
        good = whole([value[WHERE.itemsize :] for _, value in lot])
        good &= (names_in(rows) == names.reshape(-1, RECORD_ID_BYTES)).all(axis=1)
        rows = rows[good]
        self.names += [lot[at][0] for at in np.flatnonzero(good).tolist()]
        self._parents.append(parents_in(rows).view(_NAME).ravel())
        heads = np.ascontiguousarray(rows).view(HEADERS).ravel()
        where = values.view([("where", WHERE), ("head", f"V{HEADER_BYTES}")])["where"][good]
        kinds, number = self._kinds, self._kinds.setdefault
        of = kinds_in(rows).view(_NAME).ravel().tolist()
        kind = np.array([number(one, len(kinds)) for one in of], np.int32)
        columns = heads["depth"], heads["raw_bytes"], heads["stored_bytes"]
        self._numbers.append((where["sequence"], kind, *columns))

    def stock(self) -> Stock:
        """Return all of it, oldest write first."""
        sequence, kind, depth, raw, stored = (
            np.concatenate(column) for column in zip(*self._numbers, strict=True)
        )
        order = np.argsort(sequence, kind="stable")
        return Stock(
            [self.names[at] for at in order.tolist()],
            np.concatenate(self._parents)[order].tobytes(),
            [(one[:KEY_BYTES], PartName(*_PART.unpack(one[KEY_BYTES:]))) for one in self._kinds],
            kind[order],
            depth.astype(np.int32)[order],
            raw.astype(np.int64)[order],
            stored.astype(np.int64)[order],
        )


def stock(ledger: Ledger) -> Stock:
    """Return what a store has. Blocks: a million records take about 2 s, and 300 MiB meanwhile."""
    fresh = ledger.changes()  # before the rest: meanwhile they may be committed
    columns = _Columns()
    columns.add([(name, pack_entry(entry)) for name, entry in fresh.items() if entry])
    after = b""
    while lot := ledger.lot(after, _LOT):
        after = lot[-1][0]
        columns.add([one for one in lot if one[0] not in fresh] if fresh else lot)
    return columns.stock()
