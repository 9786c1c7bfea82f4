"""``files:DIR``: one file a record, in a directory that many hosts may have mounted.

For NFS and parallel filesystems, and for any directory. A record is written beside its place,
synced and renamed, so that whoever looks finds it whole or not at all; of two writers of one
record the last one stays, and both wrote the same bytes. What is there is counted under a lock
that all hosts keep, and is never above the capacity.

Files of a store; anything else in the directory is left alone and not counted::

    format                          names this layout and its version
    usage                           what the records take, and the lock of all writers
    collection                      the lock of whoever collects there
    selftest-RANDOM                 for a moment, at opening
    KK/KEY-PART.kv                  a record: its header, then the payload; KK begins the key
    KK/KEY-PART.RANDOM.new          a record that is being written
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, Self, TypeVar

from kvtier.clock import Clock, monotonic
from kvtier.deadline import current
from kvtier.errors import ConfigError, Corrupt, Unavailable
from kvtier.events import Causes, Reporter
from kvtier.identity.record import HEADER_BYTES, KEY_BYTES, Header, RecordId
from kvtier.seams import IoPool
from kvtier.storage_backends.files_door import check_made, directory_of, prepare, refusal
from kvtier.storage_backends.files_folder import GONE, Folder
from kvtier.storage_backends.files_medium import FilesMedium
from kvtier.storage_backends.files_usage import NAME, OVERHEAD, SHELVES, Usage, footprint
from kvtier.storage_backends.scanning import headers_of
from kvtier.storage_backends.slab import NO_ROOM
from kvtier.tiers.store import Capabilities, Option, Read, Span, Status, Write, unusable

A = TypeVar("A")
T = TypeVar("T")

_IN_FLIGHT: Final = 16  # records of this process read at once: over a network each waits
_DELETE_BATCH: Final = 64  # files removed under one lock
_SCAN_BATCH: Final = 256
_KEY_HEX: Final = 2 * KEY_BYTES
_LATE: Final = TimeoutError(errno.ETIMEDOUT, "the time that was given is over")


def _durability(text: str) -> str:
    if text not in ("none", "each"):
        raise ConfigError(f"durability {text!r} is not known to files; choose none or each")
    return text


class FilesStore:
    """A durable, shared, bounded Store in a directory that any number of hosts write to.

    Calls block on the filesystem; records of a batch are read in parallel. All methods may be
    called from several threads.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "durability": Option(
            _durability,
            "each",
            "what an acknowledged record survives: none (the process) or each (a power loss)",
        )
    }
    THREADS: ClassVar[int] = 8
    PROMISES: ClassVar[Capabilities] = Capabilities(
        durable=True, shared=True, ranged=True, deadlines=True, overhead=OVERHEAD
    )
    ALIGNMENT: ClassVar[int] = 1

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """Open the directory `location`; what it lies in must be there. See Store.open."""
        durability = options.get("durability", cls.OPTIONS["durability"].default)
        return cls(directory_of(location), capacity, durability=_durability(str(durability)))

    @classmethod
    def check_made(cls, location: str) -> None:
        """Raise ConfigError where there is no such store yet: ``open`` would make one."""
        check_made(directory_of(location))

    def __init__(
        self,
        directory: Path,
        capacity: int | None,
        *,
        durability: str = "each",
        folder: Callable[[Path], Folder] = Folder,
        clock: Clock = monotonic,
    ) -> None:
        """Open a directory. capacity: bytes, of all hosts together; None for unbounded.

        folder, clock: the seams. Blocks: what is there is counted. Raises ConfigError.
        """
        self.causes = Causes()
        self._path = directory
        self._bounded = capacity is not None
        self._synced = durability == "each"
        self._report = Reporter(clock)
        if capacity is not None and capacity <= OVERHEAD:
            raise ConfigError(
                f"files capacity {capacity} B is below what its directories take, {OVERHEAD} B; "
                f"give it more"
            )
        try:
            self._folder = folder(directory)
        except OSError as error:
            raise refusal(error, directory) from error
        try:
            prepare(self._folder)
            self._usage = Usage(self._folder, capacity, clock)
        except OSError as error:
            self._folder.close()
            raise refusal(error, directory) from error
        except Unavailable as error:
            self._folder.close()
            raise ConfigError(f"{error}; stop that writer, or try again") from error
        except BaseException:
            self._folder.close()
            raise
        self._pool = IoPool("files", _IN_FLIGHT)

    @property
    def capabilities(self) -> Capabilities:
        """Durable, shared and ranged; bounded if it was given a capacity.

        Nothing is begun after its Deadline. A call that a filesystem leaves hanging, as NFS does
        while its server is away, cannot be ended by anyone.
        """
        return replace(self.PROMISES, bounded=self._bounded)

    @staticmethod
    def footprint(stored_bytes: int) -> int:
        """Return the bytes of a record's file and of its name."""
        return footprint(stored_bytes)

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. Looks at names alone: a file that was cut is found out when it is read."""
        return self._each(self._look, ids)

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store. In parallel, straight into the buffers."""
        jobs = list(zip(ids, into, strict=True))
        with self._folder.use():
            found = self._pool.each(functools.partial(self._try, self._read), jobs, _LATE)
        return [one if isinstance(one, Read) else Read(self._told(one)) for one in found]

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore. In parallel, straight into the buffers."""
        return self._each(self._span, spans)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store. One after the other, so that ancestors are there before what needs them."""
        with self._folder.use():
            found = [self._try(self._write, one) for one in records]
        return [one if isinstance(one, Status) else self._told(one, wrote=True) for one in found]

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        found: list[Status] = []
        with self._folder.use():
            for start in range(0, len(ids), _DELETE_BATCH):
                with self._usage.held():
                    lot = [self._try(self._remove, name) for name in ids[start:][:_DELETE_BATCH]]
                found += [one if isinstance(one, Status) else self._told(one) for one in lot]
        return found

    def scan(self) -> Iterator[Header]:
        """See Store. Oldest write first, as files tell the time.

        Holds about 150 bytes a record while it runs.
        """
        listed: list[tuple[float, str]] = []
        try:
            with self._folder.use():
                for shelf in SHELVES:
                    for name, _, changed in self._folder.listed(shelf):
                        if NAME.fullmatch(name) and name.startswith(shelf):
                            listed.append((changed, name))
        except OSError as error:
            raise Unavailable(f"{self._path}: {error}") from error
        listed.sort()
        lots = (
            [_id_of(name) for _, name in listed[start : start + _SCAN_BATCH]]
            for start in range(0, len(listed), _SCAN_BATCH)
        )
        yield from headers_of(lots, self._headers, str(self._path))

    def medium(self) -> FilesMedium:
        """See Collectable."""
        return FilesMedium(self._folder, self._headers, self.read_spans, self.delete_many, _id_at)

    def close(self) -> None:
        """Let calls under way finish, and close the directory. Idempotent."""
        self._pool.close()
        self._folder.close()

    # ------------------------------------------------------------------------------- one record

    def _look(self, name: RecordId) -> Status:
        size = self._folder.size(_name_of(name))
        return Status.ABSENT if size is None or size < HEADER_BYTES else Status.OK

    def _headers(self, ids: Sequence[RecordId]) -> list[Header | Status]:
        with self._folder.use():
            found = self._pool.map(functools.partial(self._try, self._header), ids)
        return [one if isinstance(one, Header) else self._told(one) for one in found]

    def _header(self, name: RecordId) -> Header:
        """Return the header of a whole record. Raises OSError and Corrupt."""
        with self._opened(name) as (descriptor, size):
            return self._begin(name, descriptor, size, [])

    def _read(self, job: tuple[RecordId, memoryview]) -> Read:
        name, into = job
        with self._opened(name) as (descriptor, size):
            wanted = size - HEADER_BYTES
            if wanted > len(into):
                self._begin(name, descriptor, size, [])
                raise OSError(errno.EMSGSIZE, f"the buffer has {len(into)} bytes, it {wanted}")
            return Read(Status.OK, self._begin(name, descriptor, size, [into[:wanted]]))

    def _begin(self, name: RecordId, descriptor: int, size: int, rest: list[memoryview]) -> Header:
        """Read a file's header, and what follows into `rest`. Raises OSError and Corrupt."""
        head = memoryview(bytearray(HEADER_BYTES))
        got = self._folder.read(descriptor, [head, *rest])
        if got < HEADER_BYTES + sum(map(len, rest)):
            raise Corrupt("the file ends before its record does")
        header = Header.unpack(head)
        if header.id != name:
            raise Corrupt("another record lies under that name")
        if size != HEADER_BYTES + header.stored_bytes:
            raise Corrupt("the file has not the length that its header says")
        return header

    def _span(self, span: Span) -> Status:
        with self._opened(span.id) as (descriptor, size):
            if span.total and size != HEADER_BYTES + span.total:
                return Status.CORRUPT
            length = sum(map(len, span.into))
            if self._folder.read(descriptor, span.into, HEADER_BYTES + span.start) < length:
                raise Corrupt("the file ends before the span does")
        return Status.OK

    @contextlib.contextmanager
    def _opened(self, name: RecordId) -> Iterator[tuple[int, int]]:
        """Open a record's file. Yields descriptor and bytes; raises Corrupt for what is none."""
        descriptor = self._folder.look(_name_of(name))
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise Corrupt("what lies under that name is no file")
            yield descriptor, found.st_size
        finally:
            os.close(descriptor)

    def _write(self, record: Write) -> Status:
        header, data = record
        taken = footprint(header.stored_bytes)
        if len(data) < header.stored_bytes or not self._usage.fits(taken):
            return Status.FAILED
        with contextlib.suppress(OSError, Corrupt):
            if self._header(header.id) == header:
                return Status.OK
        draft = self._begun(header, taken)
        if draft is None:
            return Status.FULL
        path = _name_of(header.id)
        try:
            self._fill(draft, header, data)
            with self._usage.held():
                before = self._folder.size(path)
                self._folder.rename(draft, path)
                if before is not None:
                    self._usage.give(footprint(max(0, before - HEADER_BYTES)))
        except BaseException:
            with contextlib.suppress(OSError, Unavailable), self._usage.held():
                self._folder.unlink(draft)
                self._usage.give(taken)
            raise
        if self._synced:
            self._folder.sync_names(path[:2])
        return Status.OK

    def _begun(self, header: Header, taken: int) -> str | None:
        """Count a record and make the file that it is written to; None without room for it."""
        path = _name_of(header.id)
        draft = f"{path.removesuffix('.kv')}.{secrets.token_hex(8)}.new"
        with self._usage.held():
            if not self._usage.take(taken) and not (
                self._usage.count_again() and self._usage.take(taken)
            ):
                return None
            try:
                self._make(draft, HEADER_BYTES + header.stored_bytes)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    self._folder.unlink(draft)
                self._usage.give(taken)
                raise
        return draft

    def _make(self, draft: str, length: int) -> None:
        try:
            descriptor = self._folder.change(draft, new=True)
        except FileNotFoundError:
            self._folder.make(draft[:2])
            if self._synced:
                self._folder.sync_names(".")
            descriptor = self._folder.change(draft, new=True)
        try:
            self._folder.extend(descriptor, length)
        finally:
            os.close(descriptor)

    def _fill(self, draft: str, header: Header, data: memoryview) -> None:
        descriptor = self._folder.change(draft)
        try:
            self._folder.write(descriptor, [memoryview(header.pack()), data[: header.stored_bytes]])
            if self._synced:
                self._folder.sync(descriptor)
        finally:
            os.close(descriptor)

    def _remove(self, name: RecordId) -> Status:
        """Remove a record's file. Under the lock."""
        path = _name_of(name)
        size = self._folder.size(path)
        if size is None:
            return Status.ABSENT
        self._folder.unlink(path)
        self._usage.give(footprint(max(0, size - HEADER_BYTES)))
        return Status.OK

    # -------------------------------------------------------------------------------- one batch

    def _each(self, call: Callable[[A], Status], items: Sequence[A]) -> list[Status]:
        attempt = functools.partial(self._try, call)
        with self._folder.use():
            found: list[Status | Exception] = self._pool.each(attempt, items, _LATE)
        return [one if isinstance(one, Status) else self._told(one) for one in found]

    @staticmethod
    def _try(call: Callable[[A], T], item: A) -> T | Exception:
        """Return what came of one record; errors of the filesystem are values."""
        if current().left(monotonic()) <= 0:
            return _LATE
        try:
            return call(item)
        except (OSError, Corrupt, Unavailable) as error:
            return error

    def _told(self, error: object, *, wrote: bool = False) -> Status:
        """Return the status that an error stands for, and tell the operator of it.

        wrote: by who writes, to whom nothing is there already.
        """
        if isinstance(error, OSError) and error.errno in GONE and not wrote:
            return Status.ABSENT
        self.causes.note(_cause_of(error))
        if isinstance(error, Corrupt):
            return unusable(error)
        self._report.warn(f"files:{self._path}", str(error))
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return Status.FULL
        return Status.FAILED


def _cause_of(error: object) -> str:
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "OSError")
    if isinstance(error, Unavailable) and error.__cause__ is not None:
        return _cause_of(error.__cause__)
    return error.cause if isinstance(error, Corrupt) else "lock"


def _name_of(name: RecordId) -> str:
    text = name.hex()
    return f"{text[:2]}/{text[:_KEY_HEX]}-{text[_KEY_HEX:]}.kv"


def _id_at(path: str) -> RecordId | None:
    """Return the record that a file in a shelf is, None for one that is none of ours."""
    shelf, _, name = path.partition("/")
    return _id_of(name) if NAME.fullmatch(name) and name.startswith(shelf) else None


def _id_of(name: str) -> RecordId:
    return bytes.fromhex(name[:_KEY_HEX] + name[_KEY_HEX + 1 : -3])
