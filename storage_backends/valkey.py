"""``valkey://HOST:PORT/DATABASE``: records in a Valkey or Redis server, one string a record.

The name of a key is ``kvtier:``, the chunk key and the part, both in hex; its value is the record's
header and then its bytes. SET and GET of a string are atomic: a record is there whole or not at
all. What the server evicts by itself, or forgets when it restarts, is a miss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, TypeVar

from kvtier.clock import monotonic
from kvtier.errors import ConfigError, Corrupt, Unavailable, Unreachable
from kvtier.events import Causes, Reporter
from kvtier.identity.record import HEADER_BYTES, KEY_BYTES, Header, RecordId
from kvtier.seams import IoPool
from kvtier.storage_backends.scanning import headers_of
from kvtier.storage_backends.valkey_link import BrokenError, Link, Place, Reply
from kvtier.storage_backends.valkey_links import Links, UnfitError
from kvtier.storage_backends.valkey_service import (
    CREDENTIALS,
    KEY,
    Server,
    Settings,
    cause_of,
    connector,
    explain,
    meet,
    parse_location,
    parse_tls,
    refused,
    status_of,
    unreached,
    weather,
)
from kvtier.tiers.store import Capabilities, Option, Read, Status, Write
from kvtier.units import format_bytes, parse_timeout

A = TypeVar("A")
T = TypeVar("T")

_LINKS: Final = 8  # connections of one process that are kept
_LOT: Final = 4  # records of one batch for a connection, at least
_LOOK_FIRST: Final = 64 << 10  # a SET of more bytes is worth a look whether it is there already
_SCAN_COUNT: Final = 256
_CHARGE: Final = 256  # the key, the entry of it, and what the allocator rounds up
_KEY_HEX: Final = 2 * KEY_BYTES
_NAME_CHARACTERS: Final = len(KEY) + _KEY_HEX + 1 + 20


class ValkeyStore:
    """A Store on one Valkey or Redis server, shared by all that know it.

    User and password come from the environment only, KVTIER_VALKEY_USER and
    KVTIER_VALKEY_PASSWORD. Calls block on the network, no request longer than the timeouts.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = MappingProxyType(
        {
            "timeout": Option(parse_timeout, 5.0, "longest time of one request, with its bytes"),
            "connect_timeout": Option(parse_timeout, 1.0, "longest wait for a connection"),
            "tls": Option(parse_tls, "no", "no, yes, or a file with the authorities to trust"),
        }
    )
    THREADS: ClassVar[int] = 4
    PROMISES: ClassVar[Capabilities] = Capabilities(shared=True, self_evicting=True, deadlines=True)
    ALIGNMENT: ClassVar[int] = 1
    CREDENTIALS: ClassVar[str] = CREDENTIALS

    @classmethod
    def open(
        cls, location: str, capacity: int | None, options: Mapping[str, object]
    ) -> ValkeyStore:
        """Open ``//host:port/database``, and see that it can be used. See Store.open."""
        place = parse_location(location)
        settings = Settings.read(options, cls.OPTIONS)
        links = Links(connector(place, settings), _LINKS)
        try:
            with links.borrowed() as link:
                server = meet(link, place)
        except weather as error:
            links.close()
            kind = Unreachable if unreached(error) else ConfigError
            raise kind(f"cannot use {place}: {explain(error)}") from error
        except BaseException:
            links.close()
            raise
        return cls(links, place, server, capacity)

    def __init__(self, links: Links, place: Place, server: Server, capacity: int | None) -> None:
        self.causes = Causes()
        self._links = links
        self._place = place
        self._evicts = server.evicts
        self._report = Reporter(monotonic)
        self._pool = IoPool("valkey", _LINKS)
        limit = server.maxmemory
        if limit == 0:
            self._report.warn(str(place), "it has no maxmemory: give it one, or it may be killed")
        elif limit is not None and (capacity is None or limit < capacity):
            self._report.warn(
                str(place), f"its maxmemory, {format_bytes(limit)}, is below the capacity"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Shared; self-evicting unless the server says that it never evicts. The Tier counts."""
        return replace(self.PROMISES, self_evicting=self._evicts)

    @staticmethod
    def footprint(stored_bytes: int) -> int:
        """Return the bytes of key and value, and what the server needs to keep them."""
        return HEADER_BYTES + stored_bytes + _CHARGE

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. Headers and lengths are asked for, in one round trip for each few."""
        found = self._run(ids, _ask_header, _take_header)
        # What is not whole is not there.
        return [Status.ABSENT if one is Status.CORRUPT else one for one in self._settle(found)]

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store. Straight into the buffers, over several connections."""
        jobs = [_Job(name, buffer) for name, buffer in zip(ids, into, strict=True)]
        found = self._run(jobs, _ask_record, _take_record)
        return [
            Read(status, one if isinstance(one, Header) else None)
            for status, one in zip(self._settle(found), found, strict=True)
        ]

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store. One after the other, so that ancestors are there before what needs them."""
        unfit = UnfitError("there are fewer bytes than a header says")
        found: list[object] = [unfit] * len(records)
        whole = [at for at, one in enumerate(records) if len(one.data) >= one.header.stored_bytes]
        large = [at for at in whole if records[at].header.stored_bytes > _LOOK_FIRST]
        silent: list[Exception] = []
        names = [records[at].header.id for at in large]
        for at, one in zip(large, self._run(names, _ask_header, _take_header, silent), strict=True):
            if one == records[at].header:
                found[at] = one
        left = [at for at in whole if found[at] is unfit]
        jobs = [records[at] for at in left]
        told = self._run(jobs, _send_record, _take_word, silent, lots=1)
        for at, word in zip(left, told, strict=True):
            found[at] = word
        return self._settle(found)

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        found = self._run(ids, _ask_removal, _take_word)
        counts = (None if one == 0 else one for one in found)
        return self._settle(list(counts))

    def scan(self) -> Iterator[Header]:
        """See Store. In no order; a record that comes or goes meanwhile may be among them."""
        yield from headers_of(self._listed(), self._headers, str(self._place))

    def _listed(self) -> Iterator[list[RecordId]]:
        seen: set[bytes] = set()
        cursor = b""
        while cursor != b"0":
            page = self._page(cursor or b"0")
            names = [name for name in page.names if name not in seen]
            seen.update(names)
            for start in range(0, len(names), _SCAN_COUNT):
                yield names[start : start + _SCAN_COUNT]
            cursor = page.cursor

    def _headers(self, names: Sequence[RecordId]) -> list[Header | Status]:
        found = self._run(names, _ask_header, _take_header)
        both = zip(found, self._settle(found), strict=True)
        return [one if isinstance(one, Header) else status for one, status in both]

    def close(self) -> None:
        """Let calls under way finish, and end the connections. Idempotent."""
        self._pool.close()
        self._links.close()

    def _page(self, cursor: bytes) -> _Page:
        def ask(link: Link, _: None) -> None:
            link.send("SCAN", cursor, "MATCH", f"{KEY}*", "COUNT", str(_SCAN_COUNT))

        (said,) = self._run([None], ask, lambda link, _: link.reply())
        if isinstance(said, Exception):
            self._settle([said])
            raise Unavailable(f"{self._place}: {explain(said)}")
        return _page_of(said)

    # ------------------------------------------------------------------------------ one batch

    def _run(
        self,
        items: Sequence[A],
        ask: Callable[[Link, A], None],
        take: Callable[[Link, A], T],
        silent: list[Exception] | None = None,
        lots: int = _LINKS,
    ) -> list[T | Exception]:
        """Ask for each item, several on their way at a time; return replies, or the errors.

        Once the server has left one unanswered, what was not asked yet is not asked.
        """
        count = min(lots, -(-len(items) // _LOT))
        if not count:
            return []
        quiet = [] if silent is None else silent
        run = functools.partial(self._links.converse, ask=ask, take=take, silent=quiet)
        shares = [items[start::count] for start in range(count)]
        late: list[T | Exception] = [TimeoutError("its turn came too late")] * len(shares[0])
        parts = self._pool.each(run, shares, late) if count > 1 else [run(shares[0])]
        return [parts[at % count][at // count] for at in range(len(items))]

    def _settle(self, found: Sequence[object]) -> list[Status]:
        """Return the status of each result. Raises Unavailable if the server refused them all."""
        errors = [one for one in found if isinstance(one, Exception)]
        for error in errors:
            self.causes.note(cause_of(error))
        if errors and len(errors) == len(found) and all(map(refused, errors)):
            raise Unavailable(f"{self._place}: {explain(errors[0])}") from errors[0]
        for error in errors:
            self._report.warn(str(self._place), explain(error))
        return [_status_of(one) for one in found]


class _Job(NamedTuple):
    """A record to read."""

    name: RecordId
    into: memoryview


class _Page(NamedTuple):
    """Some of our keys, and where the server is to go on."""

    cursor: bytes
    names: list[RecordId]


def _status_of(one: object) -> Status:
    if isinstance(one, Exception):
        return status_of(one)
    return Status.ABSENT if one is None else Status.OK


# ------------------------------------------------------------------------------------ one record


def _ask_header(link: Link, name: RecordId) -> None:
    link.send("STRLEN", _key(name))
    link.send("GETRANGE", _key(name), "0", str(HEADER_BYTES - 1))


def _take_header(link: Link, name: RecordId) -> Header | None:
    length, head = link.replies(2)
    if not isinstance(length, int) or not isinstance(head, bytes):
        raise BrokenError("a reply of another kind than was asked for")
    return _checked(name, memoryview(head), length) if length else None


def _ask_record(link: Link, job: _Job) -> None:
    link.send("GET", _key(job.name))


def _take_record(link: Link, job: _Job) -> Header | None:
    length = link.bulk()
    if length is None:
        return None
    head = memoryview(bytearray(min(length, HEADER_BYTES)))
    link.fill(head)
    rest = length - len(head)
    fits = rest <= len(job.into)
    if fits:
        link.fill(job.into[:rest])
    else:
        link.skip(rest)
    link.end()
    header = _checked(job.name, head, length)
    if not fits:
        raise UnfitError(f"the buffer has {len(job.into)} bytes, the record {rest}")
    return header


def _send_record(link: Link, record: Write) -> None:
    header, data = record
    body = [memoryview(header.pack()), data[: header.stored_bytes]]
    link.send("SET", _key(header.id), body)


def _ask_removal(link: Link, name: RecordId) -> None:
    link.send("DEL", _key(name))


def _take_word(link: Link, _: object) -> Reply:
    return link.reply()


def _checked(name: RecordId, head: memoryview, length: int) -> Header:
    """Return the header of a whole record. Raises Corrupt."""
    header = Header.unpack(head)
    if header.id != name:
        raise Corrupt("another record lies under that name")
    if length != HEADER_BYTES + header.stored_bytes:
        raise Corrupt("the value has not the length that its header says")
    return header


def _page_of(said: object) -> _Page:
    if not isinstance(said, list) or len(said) != len(_Page._fields):
        raise Unavailable("SCAN was not answered with a page")
    cursor, keys = said
    if not isinstance(cursor, bytes) or not isinstance(keys, list):
        raise Unavailable("SCAN was not answered with a page")
    return _Page(cursor, [name for key in keys if (name := _id_of(key)) is not None])


def _key(name: RecordId) -> str:
    text = name.hex()
    return f"{KEY}{text[:_KEY_HEX]}-{text[_KEY_HEX:]}"


def _id_of(key: object) -> RecordId | None:
    """Return the record that a key is of, None for a key that is none of ours."""
    if not isinstance(key, bytes) or len(key) != _NAME_CHARACTERS:
        return None
    try:
        name = bytes.fromhex(key[len(KEY) :].decode("ascii").replace("-", "", 1))
    except ValueError:
        return None
    return name if _key(name).encode() == key else None
