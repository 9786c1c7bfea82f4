"""``memory:NAME``: records in this process's own memory, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

from kvtier.identity.record import HEADER_BYTES, Header, RecordId
from kvtier.storage_backends.scratch import copy
from kvtier.tiers.store import Capabilities, Option, Read, Status, Write


class MemoryStore:
    """A Store that forgets everything when it is closed. Thread-safe; nothing blocks.

    A record is copied in once and never changed, so a reader needs no lock while it copies out.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    THREADS: ClassVar[int] = 2
    ALIGNMENT: ClassVar[int] = 1

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """Open an empty store; `location` only tells it from others in messages."""
        del options
        return cls(location, capacity)

    def __init__(self, name: str = "", capacity: int | None = None) -> None:
        """Open an empty store of `capacity` bytes, None for no bound."""
        self.name = name
        self._capacity = capacity
        self._guard = threading.Lock()
        self._records: dict[RecordId, tuple[Header, memoryview]] = {}  # in order of writing
        self._used = 0

    @property
    def capabilities(self) -> Capabilities:
        """Bounded if it was given a capacity."""
        return Capabilities(bounded=self._capacity is not None)

    def footprint(self, stored_bytes: int) -> int:
        """Return the payload and what its header would take."""
        return stored_bytes + HEADER_BYTES

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Say for each record OK or ABSENT."""
        return [Status.OK if name in self._records else Status.ABSENT for name in ids]

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """Fill each buffer with a record."""
        return [self._read(name, buffer) for name, buffer in zip(ids, into, strict=True)]

    def _read(self, name: RecordId, into: memoryview) -> Read:
        found = self._records.get(name)
        if found is None:
            return Read(Status.ABSENT)
        header, data = found
        if len(into) < header.stored_bytes:
            return Read(Status.FAILED)
        copy(into[: header.stored_bytes], data)
        return Read(Status.OK, header)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """Keep a copy of each record."""
        return [self._write(record.header, record.data) for record in records]

    def _write(self, header: Header, data: memoryview) -> Status:
        size = self.footprint(header.stored_bytes)
        if len(data) < header.stored_bytes or (
            self._capacity is not None and size > self._capacity
        ):
            return Status.FAILED
        with self._guard:
            old = self._records.get(header.id)
            if old is not None and old[0] == header:
                return Status.OK
            if self._capacity is not None and self._used + size > self._capacity:
                return Status.FULL
            self._used += size  # before the copy, so that copies under way are counted
        kept = memoryview(bytearray(header.stored_bytes))
        copy(kept, data[: header.stored_bytes])
        with self._guard:
            self._forget(header.id)
            self._records[header.id] = header, kept.toreadonly()
        return Status.OK

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Forget records: OK or ABSENT."""
        with self._guard:
            return [Status.OK if self._forget(name) else Status.ABSENT for name in ids]

    def _forget(self, name: RecordId) -> bool:
        found = self._records.pop(name, None)
        if found is not None:
            self._used -= self.footprint(found[0].stored_bytes)
        return found is not None

    def scan(self) -> Iterator[Header]:
        """Yield the headers, oldest write first, as they were at the first step."""
        with self._guard:
            headers = [header for header, _ in self._records.values()]
        yield from headers

    def close(self) -> None:
        """Forget everything. Idempotent."""
        with self._guard:
            self._records.clear()
            self._used = 0
