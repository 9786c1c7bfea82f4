"""The files store keeps the Store contract, in each durability."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.identity.record import HEADER_BYTES
from kvtier.storage_backends.files import FilesStore
from kvtier.testing.store_suite import StoreSuite
from kvtier.tiers.store import Write


class TestContract(StoreSuite):
    durability = "each"

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "kv"

    def open_store(self) -> FilesStore:
        options = {"durability": self.durability}
        return FilesStore.open(str(self.folder), self.capacity, options)

    reopen = open_store

    def raw_corrupt(self, record: Write, how: str) -> bool:
        name = record.header.id.hex()
        path = self.folder / name[:2] / f"{name[:64]}-{name[64:]}.kv"
        if how == "truncate":
            os.truncate(path, HEADER_BYTES + record.header.stored_bytes // 2)
            return True
        with path.open("r+b") as file:
            file.seek(20 if how == "header" else HEADER_BYTES + 777)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return True


class TestContractWithoutSync(TestContract):
    durability = "none"
