"""The index read without LMDB: the same entries, while they change and where pages are torn."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import Corrupt
from kvtier.storage_backends import slab_pages
from kvtier.storage_backends.slab import INDEX_FLOOR
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.storage_backends.slab_pages import IndexPages, Torn

PAGE = 4096


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index.lmdb", INDEX_FLOOR, synced=False)
    yield made
    made.close()


def name(number: int) -> bytes:
    return random.Random(number).randbytes(42)


def entry(sequence: int) -> Entry:
    return Entry(1, sequence % 97, sequence, random.Random(sequence).randbytes(256))


def everything(pages: IndexPages, step: int = 2048) -> dict[bytes, Entry]:
    return {key: found for lot in pages.pages(step) for key, found in lot}


def test_an_empty_index_has_no_entries(index: Index, tmp_path: Path) -> None:
    with IndexPages(tmp_path / "index.lmdb") as pages:
        assert pages.count == 0
        assert everything(pages) == {}
        assert pages.find(name(1)) is None


@pytest.mark.parametrize("seed", range(3))
def test_what_lmdb_holds_is_read(index: Index, tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    holds: dict[bytes, Entry] = {}
    with IndexPages(tmp_path / "index.lmdb") as pages:
        for sequence in range(1, 1200):
            key = name(choose.randrange(900))
            change = None if choose.random() < 0.4 else entry(sequence)
            index.commit({key: change})
            if change is None:
                holds.pop(key, None)
            else:
                holds[key] = change
            if sequence % 200 == 0:
                assert pages.count == len(holds)
                assert everything(pages, step=choose.choice((1, 7, 10_000))) == holds
                assert {key: pages.find(key) for key in holds} == holds
                assert pages.find(b"\0" * 42) is None
        assert sorted(holds) == [key for lot in pages.pages(50) for key, _ in lot]


class Busy:
    """Commits to the index while its pages are read: all names get the same new sequence."""

    def __init__(self, index: Index, names: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self.index, self.names, self.sequence, self.left = index, names, 1, 0
        self.pread = os.pread
        self.commit()
        monkeypatch.setattr(slab_pages.os, "pread", self.read)

    def commit(self) -> None:
        self.index.commit(dict.fromkeys(self.names, entry(self.sequence)))
        self.sequence += 1

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        if size == PAGE and self.left:
            self.left -= 1
            self.commit()
        return self.pread(descriptor, size, offset)


@pytest.fixture
def busy(index: Index, monkeypatch: pytest.MonkeyPatch) -> Busy:
    return Busy(index, [name(number) for number in range(100)], monkeypatch)  # one transaction


def sequences(pages: IndexPages) -> set[int]:
    """Return the sequences of one lot; where one transaction was read there is one."""
    lot = next(iter(pages.pages(10_000)))
    assert len(lot) == 100
    return {found.sequence for _, found in lot}


def test_a_lot_is_of_one_transaction_whatever_is_committed(busy: Busy, tmp_path: Path) -> None:
    with IndexPages(tmp_path / "index.lmdb") as pages:
        for commits in (1, 2, 3, 5, 9, 17):
            busy.left = commits
            assert len(sequences(pages)) == 1
            assert busy.left == 0


def test_twin_without_the_second_look_transactions_are_mixed(
    busy: Busy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IndexPages, "_unharmed", lambda *_: True)
    with IndexPages(tmp_path / "index.lmdb") as pages:
        mixed = 0
        for commits in (3, 5, 9, 17):
            busy.left = commits
            try:
                mixed += len(sequences(pages)) != 1
            except (Corrupt, AssertionError):
                mixed += 1
        assert mixed


def test_a_file_that_is_replaced_is_noticed(index: Index, tmp_path: Path) -> None:
    with IndexPages(tmp_path / "index.lmdb") as pages:
        assert not pages.replaced
        (tmp_path / "index.lmdb").rename(tmp_path / "elsewhere")
        assert pages.replaced
        (tmp_path / "index.lmdb").write_bytes(b"another")
        assert pages.replaced


@pytest.fixture
def filled(index: Index, tmp_path: Path) -> tuple[Path, dict[bytes, Entry]]:
    holds = {name(number): entry(number) for number in range(2000)}
    index.commit(holds)
    return tmp_path / "index.lmdb", holds


def test_torn_pages_lose_what_is_under_them_only(filled) -> None:
    path, holds = filled
    with IndexPages(path) as pages:
        meta = pages.latest()
    choose = random.Random(5)
    image = path.read_bytes()
    hurt = 0
    for _ in range(250):
        damaged = bytearray(image)
        # Half of the flips hit what holds a page together: its header and where its nodes are.
        at = choose.randrange(2, meta.last + 1) * PAGE + choose.randrange(choose.choice((48, PAGE)))
        damaged[at] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        torn: set[Torn] = set()
        with IndexPages(path) as pages:
            lots = [one for lot in pages.pages(torn=torn) for one in lot]
        found = dict(lots)
        assert len(found) == len(lots)
        # A flip in an entry is for its checksums to find: here it is another entry or name.
        differ = [key for key, one in found.items() if holds.get(key) != one]
        assert len(differ) <= 1
        if torn:
            hurt += 1
            with IndexPages(path) as pages, pytest.raises(Corrupt, match="page "):
                list(pages.pages())
        else:
            assert len(found) == len(holds)
    assert hurt > 20


@pytest.mark.parametrize(
    ("length", "said"), [(0, "truncated"), (100, "truncated"), (PAGE + 9, "truncated")]
)
def test_a_file_that_is_cut_is_refused(filled, length: int, said: str) -> None:
    path, _ = filled
    os.truncate(path, length)
    with pytest.raises(Corrupt, match=said):
        IndexPages(path)


def test_garbage_is_refused(tmp_path: Path) -> None:
    for seed in range(20):
        (tmp_path / "x").write_bytes(random.Random(seed).randbytes(3 * PAGE))
        with pytest.raises(Corrupt, match="invalid"):
            IndexPages(tmp_path / "x")


def test_pages_that_form_a_ring_end(filled) -> None:
    path, _ = filled
    with IndexPages(path) as pages:
        meta = pages.latest()
    assert meta.levels > 1
    data = bytearray(path.read_bytes())
    at = meta.root * PAGE
    for node in range((int.from_bytes(data[at + 12 : at + 14], "little") - 16) // 2):
        pointer = at + 16 + 2 * node
        begin = at + int.from_bytes(data[pointer : pointer + 2], "little")
        data[begin : begin + 4] = meta.root.to_bytes(4, "little")
    path.write_bytes(data)
    torn: set[Torn] = set()
    with IndexPages(path) as pages:
        assert list(pages.pages(torn=torn)) == []
    assert {one.page for one in torn} == {meta.root}
