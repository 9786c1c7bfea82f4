"""All that a store has, in columns: what listing it would yield, whatever stands in its index."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvtier.errors import Corrupt, MisuseError
from kvtier.identity import headers
from kvtier.identity.headers import whole
from kvtier.identity.record import HEADER_BYTES, Header, checksum
from kvtier.storage_backends import slab_stock
from kvtier.storage_backends.slab_index import Index
from kvtier.testing.records import make_record
from kvtier.tiers.stock import Stock, StockedStore, stock_of
from kvtier.tiers.store import Status

OK = Status.OK


def same(one: Stock, other: Stock) -> bool:
    """Say whether two are of the same records, in the same order."""
    kinds = [[stock.kinds[kind] for kind in stock.kind.tolist()] for stock in (one, other)]
    return kinds[0] == kinds[1] and all(
        np.array_equal(mine, others) if isinstance(mine, np.ndarray) else mine == others
        for name, mine, others in zip(Stock._fields, one, other, strict=True)
        if name not in ("kinds", "kind")
    )


def listed(store: Any) -> bool:
    return same(store.stock(), stock_of(store.scan()))


@pytest.fixture(autouse=True)
def small_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few records take several lots."""
    monkeypatch.setattr(slab_stock, "_LOT", 7)


def test_it_is_what_a_scan_yields(opened: Any, durability: str) -> None:
    store = opened(durability=durability, clock=opened.clock)
    assert isinstance(store, StockedStore)
    assert listed(store)
    assert store.stock().names == []
    choose = random.Random(durability)
    records = [make_record(number, choose.choice((10, 5000, 70_000))) for number in range(60)]
    for number, record in enumerate(choose.sample(records, 60)):
        assert store.write_many([record]) == [OK]
        if number % 4 == 3:  # under batch, what is not committed yet stands before the index
            store.delete_many([choose.choice(records).header.id])
            assert listed(store)
        if number == 30:
            opened.clock.now += 2.0
    assert len(store.stock().names) > 40
    store.close()
    again = opened(durability=durability)
    assert listed(again)
    again.close()
    with pytest.raises(MisuseError, match="is closed"):
        again.stock()


def test_what_is_no_record_is_not_in_it(filled: Any) -> None:
    """As `scan` passes it over: a header with a flipped bit, another's header, another length."""
    first, second, third = (filled.records[number] for number in range(3))
    head = bytearray(first.header.pack())
    head[130] ^= 1
    filled.change(first, head=bytes(head))
    filled.change(second, head=first.header.pack())
    index = Index(filled.index, filled.index.stat().st_size, synced=False)
    with index._env.begin(write=True) as txn:
        txn.put(third.header.id, b"short")
        txn.put(b"another name", txn.get(filled.records[3].header.id))
    index.close()
    store = filled.opened(64 << 20)
    assert listed(store)
    assert len(store.stock().names) == len(filled.records) - 3


def test_twin_without_looking_at_checksums_it_would_be(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = bytearray(filled.records[0].header.pack())
    head[130] ^= 1
    filled.change(filled.records[0], head=bytes(head))
    monkeypatch.setattr(slab_stock, "whole", lambda packed: np.ones(len(packed), np.bool_))
    assert not listed(filled.opened(64 << 20))


# ---- headers in columns


def taken(head: bytes) -> bool:
    try:
        Header.unpack(head)
    except Corrupt:
        return False
    return True


def summed(head: bytes) -> bytes:
    return head[: HEADER_BYTES - 16] + checksum(head[: HEADER_BYTES - 16])


def test_many_headers_are_judged_as_one_is() -> None:
    choose = random.Random(5)
    heads = []
    for number in range(400):
        head = bytearray(make_record(number, 100).header.pack())
        for _ in range(choose.choice((0, 1, 1, 3))):
            head[choose.choice((choose.randrange(256), choose.randrange(8, 16)))] ^= choose.choice(
                (1, 16, 128)
            )
        if choose.random() < 0.5:  # impossible fields under a checksum that is right
            for at in choose.sample((8, 15, 113, 114, 116, 118, 120, 141, 150), 2):
                head[at] = choose.choice((0, 1, 255))
            head[:] = summed(bytes(head))
        heads.append(bytes(head))
    expected = [taken(head) for head in heads]
    assert whole(heads).tolist() == expected
    assert 40 < sum(expected) < 360
    assert whole([]).tolist() == []


def test_fields_in_columns_are_those_of_headers() -> None:
    records = [make_record(number, 10 + number) for number in range(20)]
    rows = np.frombuffer(b"".join(one.header.pack() for one in records), np.uint8)
    rows = rows.reshape(-1, HEADER_BYTES)
    names = headers.names_in(rows).tobytes()
    parents = headers.parents_in(rows).tobytes()
    assert names == b"".join(one.header.id for one in records)
    assert parents == b"".join(one.header.parent or bytes(42) for one in records)
