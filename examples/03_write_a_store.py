"""Write a Store: a new medium for kvtier, here one file a record, and hold it to the contract.

``kvtier.testing.store_suite.StoreSuite`` is the contract as tests. Run them with pytest:

    pytest examples/03_write_a_store.py

To use it as a tier, name the class in your package's entry points under
``kvtier.storage_backends``; its name there is the scheme of the URL.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.errors import Corrupt
from kvtier.identity.record import HEADER_BYTES, Header, PartName, RecordId, checksum
from kvtier.testing.store_suite import StoreSuite
from kvtier.tiers.store import Capabilities, Option, Read, Status, Write


class FileStore:
    """One file a record: header, then payload; written aside and renamed, so it is whole."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    THREADS: ClassVar[int] = 4
    ALIGNMENT: ClassVar[int] = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.serial = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> FileStore:
        """Open a folder. The Tier keeps the budget: this Store is not `bounded`."""
        del capacity, options
        return cls(Path(location))

    @property
    def capabilities(self) -> Capabilities:
        """Files outlive the process."""
        return Capabilities(durable=True)

    def footprint(self, stored_bytes: int) -> int:
        """Header and payload, in whole pages."""
        return -(-(HEADER_BYTES + stored_bytes) // 4096) * 4096

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """A file is there only once it is whole."""
        return [Status.OK if self.path(name).exists() else Status.ABSENT for name in ids]

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """Read header and payload; anything short or strange is not the record."""
        return [self.read(name, buffer) for name, buffer in zip(ids, into, strict=True)]

    def read(self, name: RecordId, into: memoryview) -> Read:
        """Read one record into a buffer."""
        try:
            with self.path(name).open("rb", buffering=0) as file:
                header = Header.unpack(file.read(HEADER_BYTES))
                if len(into) < header.stored_bytes:
                    return Read(Status.FAILED)
                got = file.readinto(into[: header.stored_bytes])
        except FileNotFoundError:
            return Read(Status.ABSENT)
        except (OSError, Corrupt) as error:
            return Read(Status.CORRUPT if isinstance(error, Corrupt) else Status.FAILED)
        whole = header.id == name and got == header.stored_bytes
        return Read(Status.OK, header) if whole else Read(Status.CORRUPT)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """Write each record aside, then give it its name."""
        return [self.write(record) for record in records]

    def write(self, record: Write) -> Status:
        """Write one record."""
        header, data = record
        if len(data) < header.stored_bytes:
            return Status.FAILED
        with self.lock:
            self.serial += 1
            aside = self.folder / f"{os.getpid()}-{self.serial}.new"
        try:
            with aside.open("wb") as file:
                file.write(header.pack())
                file.write(data[: header.stored_bytes])
            aside.replace(self.path(header.id))
        except OSError:
            aside.unlink(missing_ok=True)
            return Status.FAILED
        return Status.OK

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Remove files."""
        return [self.delete(name) for name in ids]

    def delete(self, name: RecordId) -> Status:
        """Remove one file."""
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            return Status.ABSENT
        except OSError:
            return Status.FAILED
        return Status.OK

    def scan(self) -> Iterator[Header]:
        """Yield the headers of whole records, oldest first."""
        paths = sorted(self.folder.glob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
        for path in paths:
            with contextlib.suppress(OSError, Corrupt), path.open("rb") as file:
                header = Header.unpack(file.read(HEADER_BYTES))
                if path.stat().st_size == HEADER_BYTES + header.stored_bytes:
                    yield header

    def close(self) -> None:
        """Nothing is held open."""

    def path(self, name: RecordId) -> Path:
        """Keys are bytes, so their hex is a safe file name."""
        return self.folder / f"{name.hex()}.kv"


class TestFileStore(StoreSuite):
    """The contract, on this Store."""

    folder: tempfile.TemporaryDirectory[str] | None = None

    def open_store(self) -> FileStore:
        """Open it in a new folder."""
        self.folder = tempfile.TemporaryDirectory()
        return FileStore(Path(self.folder.name))

    def reopen(self) -> FileStore:
        """Open it again where it was."""
        if self.folder is None:
            raise RuntimeError("the suite opens a store before it opens it again")
        return FileStore(Path(self.folder.name))

    def teardown_method(self) -> None:
        """Close the store and remove the folder."""
        super().teardown_method()
        if self.folder is not None:
            self.folder.cleanup()


def main() -> int:
    """Write one record and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(Path(folder))
        payload = bytes(range(256)) * 16
        total = checksum(payload)
        header = Header(
            namespace=bytes(32),
            key=bytes(32),
            parent=None,
            depth=0,
            part=PartName(),
            raw_bytes=len(payload),
            stored_bytes=len(payload),
            raw_sum=total,
            stored_sum=total,
        )
        print("write:", store.write_many([Write(header, memoryview(payload))])[0].value)
        buffer = bytearray(len(payload))
        read = store.read_many([header.id], [memoryview(buffer)])[0]
        print("read:", read.status.value, "and exact" if bytes(buffer) == payload else "but wrong")
    return 0 if bytes(buffer) == payload else 1


if __name__ == "__main__":
    sys.exit(main())
