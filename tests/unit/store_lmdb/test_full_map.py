"""A full index that has no room for a second one: records go for it, and nothing is ever wedged."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends import slab_recovery, slab_space
from kvtier.storage_backends.slab import Segment
from kvtier.storage_backends.slab_directory import SlabDirectory
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_index import Entry, Index, IndexFull, unpack_entry
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.testing.overrun import watched
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.testing.short_index import short_index
from kvtier.tiers.store import Status, Write

MIB = 1 << 20
CAPACITY = 8 * MIB
OK, FULL, FAILED, ABSENT = Status.OK, Status.FULL, Status.FAILED, Status.ABSENT


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    with short_index():
        yield


class Churn:
    """Writes, and deletes any record where there is no room, as a Tier does.

    said: how often each status was answered. there: by the store's word.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.said: Counter[Status] = Counter()
        self.there: list[Write] = []
        self._choose = random.Random(1)
        self._number = 0

    def fill(self) -> Self:
        """Write in lots until there is no room."""
        while self.said[FULL] == 0:
            lot = [make_record(self._number + at, 10) for at in range(100)]
            statuses = self.store.write_many(lot)
            self._number += len(lot)
            self.said.update(statuses)
            self.there += [one for one, status in zip(lot, statuses, strict=True) if status is OK]
        return self

    def go(self, turns: int) -> Counter[Status]:
        """Take so many turns; return what was said in them."""
        before = self.said.copy()
        for _ in range(turns):
            self._turn()
        return self.said - before

    def _turn(self) -> None:
        record = make_record(self._number, 10)
        self._number += 1
        status = self._write(record)
        while status is FULL and self.there:
            victim = self.there.pop(self._choose.randrange(len(self.there)))
            self.said.update(self.store.delete_many([victim.header.id]))
            status = self._write(record)
        if status is OK:
            self.there.append(record)

    def _write(self, record: Write) -> Status:
        (status,) = self.store.write_many([record])
        self.said[status] += 1
        return status

    def kept(self) -> list[Write]:
        """Return the records that are there; all of them are exact."""
        names = [record.header.id for record in self.there]
        kept = [
            record
            for record, status in zip(self.there, self.store.contains_many(names), strict=True)
            if status is OK
        ]
        assert all(is_exact(*fetch(self.store, one.header.id, 10)) for one in kept)
        return kept


def patched(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    monkeypatch.setattr(f"kvtier.storage_backends.slab_space.{name}", value)


@pytest.fixture
def wedged(opened: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Churn]:
    """Return one whose index is full, and for which nothing goes."""
    churn = Churn(opened(CAPACITY, durability="each")).fill()
    with monkeypatch.context() as patch:
        patched(patch, "by_age", lambda *_: [])
        while FAILED not in churn.said:
            churn.go(10)
        yield churn


def test_it_makes_room_by_itself_and_loses_little(opened: Any, durability: str) -> None:
    churn = Churn(opened(CAPACITY, durability=durability))
    inodes = set()
    with watched(opened.folder, 0.01) as samples:
        churn.fill()
        for _ in range(6):
            said = churn.go(100)
            assert (said[OK] >= 100, said[FAILED]) == (True, 0)
            inodes.add((opened.folder / "index.lmdb").stat().st_ino)
            assert len(churn.kept()) > 650, "of 800"
    assert max(samples) <= CAPACITY
    assert len(inodes) > 2, "it was made anew again and again"
    kept = churn.kept()
    churn.store.close()
    churn.store = opened(CAPACITY, durability=durability)
    churn.there = kept
    assert len(churn.kept()) == len(kept)


def test_twin_without_that_it_is_wedged_for_good(wedged: Churn) -> None:
    wedged.go(200)
    said = wedged.go(200)
    assert wedged.there == []
    assert said[OK] == 0


def test_one_that_was_wedged_heals_with_the_next_write(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what waits for its deletion everything may go."""
    churn = Churn(opened(CAPACITY, durability="none")).fill()
    with monkeypatch.context() as patch:
        patched(patch, "by_age", lambda *_: [])
        while FAILED not in churn.said:
            churn.go(10)
        churn.go(20)
        assert churn.there == []
    said = churn.go(900)
    assert (said[OK] >= 900, said[FAILED]) == (True, 0)
    assert len(churn.kept()) > 650


def test_what_was_written_last_is_not_what_goes(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    churn = Churn(opened(CAPACITY, durability="none")).fill()
    gone: list[bytes] = []
    remove = SegmentFiles.remove

    def noted(files: SegmentFiles, segment: Segment) -> None:
        before = dict(churn.store._ledger._index.lot(b"", 10_000))
        gone.extend(
            name for name, value in before.items() if unpack_entry(value).segment == segment.number
        )
        remove(files, segment)

    monkeypatch.setattr(SegmentFiles, "remove", noted)
    while not gone:
        churn.go(1)
    order = [record.header.id for record in churn.there]
    places = sorted(order.index(name) for name in gone if name in order)
    assert places
    assert places[-1] < 0.8 * len(order)
    assert churn.store.contains_many(order[-20:]) == [OK] * 20


# ---- while it is read and written


def still_there_with_readers(opened: Any) -> bool:
    """Say whether the first segments are there after long churn, all of whose slots are read."""
    churn = Churn(opened(CAPACITY, durability="none")).fill()
    ledger = churn.store._ledger
    pinned = ledger.pin([record.header.id for record in churn.there[:100]])
    numbers = {segment.number for segment, _ in pinned}
    churn.go(1200)
    return numbers <= ledger._slabs.segments.keys()


def test_a_segment_with_a_reader_does_not_go(opened: Any) -> None:
    assert still_there_with_readers(opened)


def test_twin_without_a_look_at_its_readers_it_does(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "is_at_rest", lambda *_: True)
    assert not still_there_with_readers(opened)


def said_before_the_new_one(opened: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Return how many of all records are there once some have gone, before the new index is.

    As `contains_many` has it, as `scan` has it, as a writer is told, and as they can be read.
    """
    churn = Churn(opened(CAPACITY, durability="each")).fill()
    store, said = churn.store, []
    made = slab_space.renewed

    def renewed(*arguments: Any, **options: Any) -> Any:
        names = [record.header.id for record in churn.there]
        _, there = store._ledger.look(names, [record.header.pack() for record in churn.there])
        contained = store.contains_many(names)
        read = [is_exact(*fetch(store, name, 10)) for name in names]
        scanned = len({header.id for header in store.scan()} & set(names))
        if not all(read):
            said.append((contained.count(OK), scanned, len(there), read.count(True)))
        return made(*arguments, **options)

    patched(monkeypatch, "renewed", renewed)
    while not said:
        churn.go(1)
    return said[0]


def test_what_has_gone_is_not_there_before_the_new_index_is(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_before_the_new_one(opened, monkeypatch)
    assert said[0] > 0
    assert len(set(said)) == 1


def test_twin_by_the_old_one_alone_it_is(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_still_there", lambda _, entries: entries)
    *said, read = said_before_the_new_one(opened, monkeypatch)
    assert min(said) > read


# ---- on a disk that has no room, or fails


def refuses(times: int) -> Callable[..., Any]:
    """Return what makes an index anew, but only after so many refusals of the disk."""
    left = [times]
    made = slab_space.renewed

    def renewed(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return made(*arguments, **options)

    return renewed


def test_on_a_full_disk_more_goes(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, "renewed", refuses(3))
    said = Churn(opened(CAPACITY, durability="none")).fill().go(600)
    assert (said[OK] >= 600, said[FAILED]) == (True, 0)


def test_twin_without_that_writes_fail(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, "renewed", refuses(3))
    patched(monkeypatch, "NO_ROOM", ())
    assert Churn(opened(CAPACITY, durability="none")).fill().go(600)[FAILED] > 0


def said_while_the_name_is_not_synced(opened: Any, monkeypatch: pytest.MonkeyPatch) -> set[Status]:
    """Return what is said of writes once a full index was made anew on such a disk."""
    churn = Churn(opened(CAPACITY, durability="each")).fill()
    made: list[None] = []
    renew = Ledger._renew

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def noted(ledger: Ledger, *arguments: Any) -> bool:
        made.append(None)
        monkeypatch.setattr(SlabDirectory, "sync", failing)
        return renew(ledger, *arguments)

    monkeypatch.setattr(Ledger, "_renew", noted)
    while not made:
        before = churn.said.copy()
        churn.go(1)
    return set(churn.said - before)


def test_nothing_is_acknowledged_before_the_new_ones_name_is_on_the_disk(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FAILED in said_while_the_name_is_not_synced(opened, monkeypatch)


def test_twin_it_would_be(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentFiles, "renamed", lambda _: None)
    assert FAILED not in said_while_the_name_is_not_synced(opened, monkeypatch)


# ---- at the next opening


@pytest.fixture
def brimful(opened: Any) -> Churn:
    """Return one that was killed, and whose index is full of entries that lead nowhere."""
    churn = Churn(opened(CAPACITY, durability="each")).fill()
    opened.pretend_killed(churn.store)
    path = opened.folder / "index.lmdb"
    index = Index(path, path.stat().st_size, synced=False)
    choose, failed = random.Random(3), 0
    while failed < 50:
        try:
            index.commit({choose.randbytes(42): Entry(9999, 0, 1, bytes(256))})
        except IndexFull:
            failed += 1
        else:
            failed = 0
    index.close()
    return churn


def test_a_full_index_with_entries_that_lead_nowhere_opens(opened: Any, brimful: Churn) -> None:
    brimful.store = opened(CAPACITY, durability="each")
    assert opened.disk_bytes() <= CAPACITY
    assert len(brimful.kept()) > 0.95 * len(brimful.there)
    assert brimful.go(10)[OK] >= 10


def test_twin_without_room_for_it_it_is_refused(
    opened: Any, brimful: Churn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert brimful.there
    monkeypatch.setattr(slab_recovery, "SPARE_BYTES", 0)
    with pytest.raises(ConfigError, match="is full"):
        opened(CAPACITY, durability="each")
