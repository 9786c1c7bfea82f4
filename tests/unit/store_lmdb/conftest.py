"""What the tests of the NVMe store share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.tiers.store import Write


class Clock:
    """A clock that stands until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Opener:
    """Opens stores in one folder, looks at it from outside, and closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
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

    def pretend_killed(self, store: LmdbSlabStore) -> None:
        """Release what the kernel would, and nothing more."""
        store._closed = True
        store._files.close()
        store._ledger._index.close()
        store._directory.release()


@pytest.fixture(params=["none", "batch", "each"])
def durability(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path / "kv")
    yield opener
    for store in opener.stores:
        store.close()
