"""What a Store has, in columns: an optional part of a Store, for those with very many records.

A million headers as objects take longer to make than all else that an opening does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier.identity.record import RECORD_ID_BYTES, Header, PartName, RecordId
from kvtier.tiers.store import Store

_NO_PARENT = bytes(RECORD_ID_BYTES)


class Stock(NamedTuple):
    """Records in the order of ``Store.scan``, an item each.

    parents: their names one behind the other, zeros for a record without a parent. kinds: each
    namespace and part that there is; kind: which of them, int32. depths: int32. raw_bytes,
    stored_bytes: int64.
    """

    names: list[RecordId]
    parents: bytes
    kinds: list[tuple[bytes, PartName]]
    kind: NDArray[np.int32]
    depths: NDArray[np.int32]
    raw_bytes: NDArray[np.int64]
    stored_bytes: NDArray[np.int64]


@runtime_checkable
class StockedStore(Store, Protocol):
    """A Store that tells all that it has at once."""

    def stock(self) -> Stock:
        """Return what ``scan`` would yield. Blocks."""
        ...


def stock_of(headers: Iterable[Header]) -> Stock:
    """Return the same of headers. Blocks as long as they do."""
    names: list[RecordId] = []
    parents: list[RecordId] = []
    kinds: dict[tuple[bytes, PartName], int] = {}
    numbers: list[tuple[int, int, int, int]] = []
    for header in headers:
        names.append(header.id)
        parents.append(header.parent or _NO_PARENT)
        kind = kinds.setdefault((header.namespace, header.part), len(kinds))
        numbers.append((kind, header.depth, header.raw_bytes, header.stored_bytes))
    columns = np.array(numbers, np.int64).reshape(-1, 4).T
    small = columns[0].astype(np.int32), columns[1].astype(np.int32)
    return Stock(names, b"".join(parents), list(kinds), *small, columns[2], columns[3])
