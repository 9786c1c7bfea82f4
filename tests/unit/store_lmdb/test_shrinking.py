"""A smaller capacity at reopening, and an index larger than its slots need."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends import slab_recovery
from kvtier.storage_backends.slab import index_bytes_for
from kvtier.storage_backends.slab_index import Index
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status, Write

MIB = 1 << 20
OK = Status.OK
SMALL = 10


def filled(opened: Any, count: int) -> list[Write]:
    """Leave a closed store of 64 MiB with so many of the smallest records."""
    store = opened(64 * MIB, durability="none")
    records = [make_record(number, SMALL) for number in range(count)]
    for at in range(0, count, 500):
        assert set(store.write_many(records[at : at + 500])) == {OK}
    store.close()
    return records


def depths(store: Any) -> list[int]:
    return [header.depth for header in store.scan()]


def exact(store: Any, records: Sequence[Write]) -> bool:
    return all(is_exact(*fetch(store, one.header.id, one.header.stored_bytes)) for one in records)


def test_a_far_smaller_capacity_keeps_what_was_written_last(opened: Any) -> None:
    """The index alone is larger than that, and is made anew."""
    records = filled(opened, 6000)
    assert (opened.folder / "index.lmdb").stat().st_size > 7 * MIB
    store = opened(6 * MIB)
    assert opened.disk_bytes() <= 6 * MIB
    left = depths(store)
    assert left == list(range(6000 - len(left), 6000))
    assert len(left) * store.footprint(SMALL) > 0.7 * (6 * MIB - index_bytes_for(0))
    assert exact(store, records[-len(left) :: 7])
    assert store.write_many([make_record(9000, SMALL)]) in ([OK], [Status.FULL])
    store.close()
    again = opened(6 * MIB)
    assert depths(again)[: len(left)] == left


def test_twin_without_a_new_index_nothing_would_be_left(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(opened, 6000)
    monkeypatch.setattr(slab_recovery, "INDEX_FLOOR", 8 * MIB)
    assert depths(opened(6 * MIB)) == []


def test_what_was_written_first_goes_whatever_its_segment_is_called(opened: Any) -> None:
    """Slots of old segments are written again: age is not in the number."""
    store = opened(32 * MIB, durability="each")
    records = [make_record(number, MIB) for number in range(20)]
    assert store.write_many(records) == [OK] * 20
    assert store.delete_many([one.header.id for one in records[:5]]) == [OK] * 5
    late = [make_record(number, MIB) for number in range(100, 105)]
    assert store.write_many(late) == [OK] * 5  # into the first segments
    store.close()
    store = opened(12 * MIB)
    left = depths(store)
    assert left[-5:] == [100, 101, 102, 103, 104]
    assert left[:-5] == list(range(25 - len(left), 20))
    assert exact(store, late)


def test_an_index_of_slots_that_are_gone_gives_its_bytes_back(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = filled(opened, 3000)
    monkeypatch.setattr(Ledger, "_renew", lambda _: False)  # it would do so sooner
    store = opened(64 * MIB)
    assert set(store.delete_many([one.header.id for one in records[100:]])) == {OK}
    large = [make_record(number, 3 * MIB) for number in range(5000, 5025)]
    count = store.write_many(large).index(Status.FULL)  # the empty segments are removed for them
    store.close()
    before = (opened.folder / "index.lmdb").stat().st_size
    store = opened(80 * MIB)
    assert (opened.folder / "index.lmdb").stat().st_size < before / 2
    assert exact(store, records[:100:9])
    assert exact(store, large[:count:5])
    assert opened.disk_bytes() <= 80 * MIB


def test_what_was_left_of_a_new_index_is_removed(opened: Any) -> None:
    records = filled(opened, 50)
    draft = opened.folder / "index.lmdb.tmp"
    draft.write_bytes(b"half" * MIB)
    store = opened(64 * MIB)
    assert not draft.exists()
    assert exact(store, records)


def test_a_new_index_that_fails_leaves_the_old_one(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = filled(opened, 6000)

    def refuse(self: Index) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Index, "sync", refuse)
        with pytest.raises(ConfigError, match=r"ENOSPC .*free some space"):
            opened(12 * MIB)
    assert sorted(Path(opened.folder).glob("*.tmp")) == []
    store = opened(12 * MIB)
    left = depths(store)
    assert left == list(range(6000 - len(left), 6000))
    assert exact(store, records[-len(left) :: 9])
