"""The NVMe store passes the Store contract in each durability, with O_DIRECT or without."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO
from kvtier.testing.records import make_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.tiers.store import Status, Store, Write

PAGE = 4096
OK = Status.OK


class TestContract(StoreSuite):
    @pytest.fixture(autouse=True)
    def _at(self, opened: Any, durability: str) -> None:
        self.opened = opened
        self.folder = opened.folder
        self.durability = durability

    def open_store(self) -> Store:
        location, options = str(self.folder), {"durability": self.durability}
        return LmdbSlabStore.open(location, self.capacity, options)

    reopen = open_store

    def raw_corrupt(self, record: Write, how: str) -> bool:
        path, offset = self.opened.find(record)
        if how == "truncate":
            os.truncate(path, offset + PAGE + record.header.stored_bytes // 2)
            return True
        with path.open("r+b") as file:
            file.seek(offset + (20 if how == "header" else PAGE + 777))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        return True


class TestContractThroughPageCache(TestContract):
    """The same where O_DIRECT is refused."""

    def open_store(self) -> Store:
        return LmdbSlabStore(self.folder, self.capacity, durability=self.durability, io=NoDirect())

    reopen = open_store


class NoDirect(FileIO):
    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().open(path, flags)


def test_o_direct_refused_is_said_once(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(io=NoDirect())
    for number in range(3):
        assert store.write_many([make_record(number, 1000)]) == [OK]
    assert [r.message for r in caplog.records].count(
        f"{opened.folder} refuses O_DIRECT; going through the page cache"
    ) == 1
