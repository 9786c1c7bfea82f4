"""What the tests of the NVMe store share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.clock import monotonic
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.storage_backends.slab_pages import IndexPages
from kvtier.storage_backends.slab_repair import verify
from kvtier.testing.hands import Hands
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status, Write
from kvtier.tiers.survey import Verdict

MIB = 1 << 20
OK, ABSENT = Status.OK, Status.ABSENT
SIZES = (3000, 50_000, 200_000, 50_000)


class Opener:
    """Opens stores in one folder, looks at it from outside, and closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Hands(0.0)
        self.stores: list[LmdbSlabStore] = []

    def __call__(self, capacity: int = 16 << 20, **options: object) -> LmdbSlabStore:
        store = LmdbSlabStore(self.folder, capacity, **options)
        self.stores.append(store)
        return store

    def disk_bytes(self) -> int:
        """Return the blocks that the folder and all its files take."""
        total = self.folder.stat().st_blocks * 512
        for path in list(self.folder.iterdir()):
            try:
                total += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        return total

    def find(self, record: Write) -> tuple[Path, int]:
        """Return the file and the offset at which a record's header stands."""
        head = record.header.pack()
        for path in self.folder.glob("*.seg"):
            at = path.read_bytes().find(head)
            if at >= 0:
                return path, at
        raise AssertionError("the record is not on the disk")

    def check(self, *, repair: bool = False) -> Verdict:
        """Verify the folder."""

        def tell(text: str, done: int, count: int) -> None:
            assert text
            assert 0 <= done <= count

        return verify(self.folder, tell, monotonic, repair=repair)

    def pretend_killed(self, store: LmdbSlabStore) -> None:
        """Release what the kernel would, and nothing more."""
        store._closed = True
        store._files.close()
        store._ledger._index.close()
        store._directory.release()


class Filled:
    """A closed store of 40 records, and ways to damage it."""

    def __init__(self, opened: Opener) -> None:
        self.opened, self.folder = opened, opened.folder
        self.records = [make_record(n, SIZES[n % 4]) for n in range(40)]
        store = opened(64 * MIB, durability="each")
        assert set(store.write_many(self.records)) == {OK}
        store.close()
        self.index = self.folder / "index.lmdb"
        with IndexPages(self.index) as pages:
            self.entries = {name: entry for lot in pages.pages() for name, entry in lot}

    def check(self, *, repair: bool = False) -> Verdict:
        """Verify the folder."""
        return self.opened.check(repair=repair)

    def change(self, record: Write, **changes: Any) -> None:
        """Change a record's entry."""
        self.put(record.header.id, self.entries[record.header.id]._replace(**changes))

    def put(self, name: bytes, entry: Entry) -> None:
        index = Index(self.index, self.index.stat().st_size, synced=False)
        index.commit({name: entry})
        index.close()

    def flip(self, record: Write, offset: int) -> None:
        """Flip a bit of a record's slot."""
        path, at = self.opened.find(record)
        with path.open("r+b") as file:
            file.seek(at + offset)
            (byte,) = file.read(1)
            file.seek(at + offset)
            file.write(bytes([byte ^ 16]))

    def served(self) -> int:
        """Open the store and return how many records it serves; all that it serves is exact."""
        store = self.opened(64 * MIB)
        statuses = store.contains_many([record.header.id for record in self.records])
        for record, status in zip(self.records, statuses, strict=True):
            size = record.header.stored_bytes
            assert status is ABSENT or is_exact(*fetch(store, record.header.id, size))
        store.close()
        return statuses.count(OK)


@pytest.fixture(params=["none", "batch", "each"])
def durability(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path / "kv")
    yield opener
    for store in opener.stores:
        store.close()


@pytest.fixture
def filled(opened: Opener) -> Filled:
    """Return a closed store of 40 records, and ways to damage it."""
    return Filled(opened)
