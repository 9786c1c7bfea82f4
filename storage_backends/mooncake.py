"""``mooncake://MASTER:PORT``: records in a Mooncake Store, the memory of many hosts as one pool.

The name of an object is ``kvtier:``, the chunk key and the part, both in hex; it holds the record's
header and then its bytes, which go between its owner and our buffers without a copy here. What the
pool evicts, or loses with an owner, is a miss.

Every client of it listens on all interfaces, and asks nobody who he is: on trusted networks only.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from kvtier.clock import monotonic
from kvtier.errors import ConfigError, Corrupt, StoreError, Unavailable, Unreachable
from kvtier.events import Causes, Reporter
from kvtier.identity.record import HEADER_BYTES, KEY_BYTES, Header, RecordId
from kvtier.storage_backends.scanning import headers_of
from kvtier.tiers.store import Capabilities, Option, Read, Status, Write, unusable
from kvtier.units import parse_bytes

_KEY: Final = "kvtier:"
_KEY_HEX: Final = 2 * KEY_BYTES
_NAME: Final = re.compile(r"kvtier:([0-9a-f]{64})-([0-9a-f]{20})")
_PORT: Final = 50051
_ADMIN_PORT: Final = 9003
_CONNECT_SECONDS: Final = 2.0
_LOCAL_BUFFER: Final = 16 << 20
_STRIPES: Final = 64
_READS: Final = 4  # of an object whose length changes between look and read

# What its calls return, as tried with release 0.3.13.
_ABSENT: Final = -704
_UNREADY: Final = -703  # it is being written, or removed
_UNFIT: Final = -600
_FULL: Final = -200
_WORDS: Final = {
    _FULL: "no room",
    _UNFIT: "a buffer and an object do not fit together",
    -706: "it is being read",
    -800: "its owner does not answer",
    -900: "the master does not answer",
}
_UNREACHABLE: Final = (-800, -900)
_REMEDY: Final = "start mooncake_master there, or correct its address"
_INSTALL: Final = (
    "pip install mooncake-transfer-engine-non-cuda, and from the system libibverbs1 libnuma1 "
    "libcurl4 libnl-3-200 libnl-route-3-200"
)


class PoolError(StoreError):
    """What a call of the client library returned instead of a length or 0."""

    def __init__(self, code: int) -> None:
        super().__init__(_WORDS.get(code, f"error {code}"))
        self.code = code


class _Place(NamedTuple):
    host: str
    port: int
    admin: str


def _parse_port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ConfigError(f"{text!r} is not the number of a port")
    return int(text)


def _parse_segment(text: str) -> int:
    return 0 if text == "0" else parse_bytes(text)


class MooncakeStore:
    """A Store on a Mooncake Store by TCP, shared by all that know its master.

    Calls block on the network for as long as the client library does: a read of an owner that is
    gone ends at once, a write without a master after about five seconds.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = MappingProxyType(
        {
            "segment": Option(_parse_segment, 0, "memory that this process adds to the pool"),
            "host": Option(str, "", "this host's address for the others; empty: as seen there"),
            "admin_port": Option(_parse_port, _ADMIN_PORT, "port at which the master lists keys"),
        }
    )
    THREADS: ClassVar[int] = 4
    PROMISES: ClassVar[Capabilities] = Capabilities(shared=True, self_evicting=True)
    ALIGNMENT: ClassVar[int] = 1

    @classmethod
    def open(
        cls, location: str, capacity: int | None, options: Mapping[str, object]
    ) -> MooncakeStore:
        """Join the pool of the master at ``//host:port``. See Store.open."""
        del capacity  # its Tier counts
        given = {name: options.get(name, one.default) for name, one in cls.OPTIONS.items()}
        place = _place_of(location, int(str(given["admin_port"])))
        here = str(given["host"]) or _reach(place)
        client = _client()
        where = f"{place.host}:{place.port}"
        segment = int(str(given["segment"]))
        # No engine, no metadata server: clients find each other through the master.
        code = client.setup(here, "P2PHANDSHAKE", segment, _LOCAL_BUFFER, "tcp", "", where)
        if code:
            raise ConfigError(
                f"cannot join the pool of mooncake://{where} as {here}: {PoolError(code)}; is "
                f"host= an address of this host, and is there room for a segment of {segment} B?"
            )
        return cls(client, place)

    def __init__(self, client: Any, place: _Place) -> None:
        self.causes = Causes()
        self._client = client
        self._place = place
        self._report = Reporter(monotonic)
        self._guard = threading.Lock()
        self._closed = False
        # A removal does not wait for readers, and the memory may be another object's then. Here
        # it does; what another process removes is found out by the checksum.
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        # Ranges are read into registered memory only.
        self._head = memoryview(bytearray(HEADER_BYTES))
        client.register_buffer(_address(self._head), HEADER_BYTES)

    @property
    def capabilities(self) -> Capabilities:
        """Shared and self-evicting. The Tier counts the bytes."""
        return self.PROMISES

    @staticmethod
    def footprint(stored_bytes: int) -> int:
        """Return the size of the object in bytes."""
        return HEADER_BYTES + stored_bytes

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. One question to the master for all."""
        if not ids:
            return []
        codes = self._open().batch_is_exist([_key(name) for name in ids])
        told = [PoolError(code) if code < 0 else bool(code) for code in codes]
        return self._settle([one if isinstance(one, PoolError) else one or None for one in told])

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store. Straight into the buffers."""
        found: list[object] = []
        for name, buffer in zip(ids, into, strict=True):
            found.append(self._try(self._read, name, buffer))
        return [
            Read(status, one if isinstance(one, Header) else None)
            for status, one in zip(self._settle(found), found, strict=True)
        ]

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store. One after the other, so that ancestors are there before what needs them."""
        return self._settle([self._try(self._write, record) for record in records])

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        return self._settle([self._try(self._remove, name) for name in ids])

    def scan(self) -> Iterator[Header]:
        """See Store. In no order; the master's list of keys is asked for."""
        url = f"http://{self._place.admin}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=_CONNECT_SECONDS) as answer:
                listed = answer.read().decode("ascii", "replace")
        except (OSError, urllib.error.URLError) as error:
            raise Unavailable(f"{url}: {error}; name the master's port by admin_port=") from error
        found = (_NAME.fullmatch(line.strip()) for line in listed.splitlines())
        names = [bytes.fromhex(one[1] + one[2]) for one in found if one is not None]
        yield from headers_of([names] if names else [], self._headers, url)

    def _headers(self, names: Sequence[RecordId]) -> list[Header | Status]:
        found = [self._try(self._header, name) for name in names]
        both = zip(found, self._settle(found), strict=True)
        return [one if isinstance(one, Header) else status for one, status in both]

    def close(self) -> None:
        """Leave the pool, and take this process's segment out of it. Idempotent; may block."""
        with self._guard:
            closed, self._closed = self._closed, True
        if not closed:
            self._client.close()

    # ------------------------------------------------------------------------------- one record

    def _header(self, name: RecordId) -> Header | None:
        """Return the header of a record. Raises Corrupt and PoolError."""
        key = _key(name)
        size = self._size(key)
        if size is None:
            return None
        if size < HEADER_BYTES:
            raise Corrupt("the object is shorter than a header")
        with self._guard:
            asked = ([_address(self._head)], [[key]], [[[0]]], [[[0]]], [[[HEADER_BYTES]]])
            [[[code]]] = self._client.get_into_ranges(*asked)
            head = bytes(self._head)
        if code in (_ABSENT, _UNREADY):
            return None
        if code < 0:
            raise PoolError(code)
        return _checked(name, head, size)

    def _size(self, key: str) -> int | None:
        size = int(self._open().get_size(key))
        if size in (_ABSENT, _UNREADY):
            return None
        if size < 0:
            raise PoolError(size)
        return size

    def _read(self, name: RecordId, into: memoryview) -> Header | None:
        key = _key(name)
        with self._stripe(name):
            size = self._size(key)
            for _ in range(_READS):
                if size is None:
                    return None
                code, head = self._read_sized(key, size, into)
                if code >= 0:
                    return _checked(name, head, size)
                before, size = size, self._size(key)
                if size == before:
                    break
        if code in (_ABSENT, _UNREADY):
            return None
        if code == _UNFIT:
            self._header(name)
        raise PoolError(code)

    def _read_sized(self, key: str, size: int, into: memoryview) -> tuple[int, bytes]:
        """Read an object of so many bytes: what the library says, and the header."""
        rest = size - HEADER_BYTES
        if not 0 <= rest <= len(into):
            return _UNFIT, b""
        head = memoryview(bytearray(HEADER_BYTES))
        buffers = [head, into[:rest]] if rest else [head]
        [code] = self._client.batch_get_into_multi_buffers([key], *_placed(buffers))
        return int(code), bytes(head)

    def _stripe(self, name: RecordId) -> threading.Lock:
        return self._stripes[name[0] % _STRIPES]

    def _write(self, record: Write) -> bool:
        header, data = record
        if len(data) < header.stored_bytes:
            raise PoolError(_UNFIT)
        key = _key(header.id)
        # The pool takes a second object of one name for the first, so that goes before.
        with self._stripe(header.id):
            with contextlib.suppress(Corrupt):
                if self._header(header.id) == header:
                    return True
            self._client.remove(key, True)
            buffers = [memoryview(header.pack()), data[: header.stored_bytes]]
            if not header.stored_bytes:
                del buffers[1]
            [code] = self._client.batch_put_from_multi_buffers([key], *_placed(buffers))
        if code:
            raise PoolError(code)
        return True

    def _remove(self, name: RecordId) -> bool | None:
        with self._stripe(name):
            code = int(self._open().remove(_key(name), True))
        if code in (_ABSENT, _UNREADY):
            return None
        if code:
            raise PoolError(code)
        return True

    def _open(self) -> Any:
        if self._closed:
            raise Unavailable("the store is closed")
        return self._client

    # -------------------------------------------------------------------------------- one batch

    @staticmethod
    def _try(call: Any, *arguments: object) -> object:
        try:
            return call(*arguments)
        except (PoolError, Corrupt) as error:
            return error

    def _settle(self, found: Sequence[object]) -> list[Status]:
        """Return the status of each result. Raises Unavailable if nobody answered for any."""
        errors = [one for one in found if isinstance(one, (PoolError, Corrupt))]
        where = f"mooncake://{self._place.host}:{self._place.port}"
        for error in errors:
            self.causes.note(error.cause if isinstance(error, Corrupt) else str(error))
        gone = [one for one in errors if isinstance(one, PoolError) and one.code in _UNREACHABLE]
        if gone and len(gone) == len(found):
            raise Unavailable(f"{where}: {gone[0]}")
        for error in errors:
            self._report.warn(where, str(error))
        return [_status_of(one) for one in found]


def _status_of(one: object) -> Status:
    if isinstance(one, Corrupt):
        return unusable(one)
    if isinstance(one, PoolError):
        return Status.FULL if one.code == _FULL else Status.FAILED
    return Status.ABSENT if one is None else Status.OK


def _checked(name: RecordId, head: bytes, size: int) -> Header:
    header = Header.unpack(head)
    if header.id != name:
        raise Corrupt("another record lies under that name")
    if size != HEADER_BYTES + header.stored_bytes:
        raise Corrupt("the object has not the length that its header says")
    return header


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _placed(buffers: Sequence[memoryview]) -> tuple[list[list[int]], list[list[int]]]:
    """Return addresses and lengths, as the client library takes those of one object."""
    return [[_address(one) for one in buffers]], [[len(one) for one in buffers]]


def _key(name: RecordId) -> str:
    text = name.hex()
    return f"{_KEY}{text[:_KEY_HEX]}-{text[_KEY_HEX:]}"


# ----------------------------------------------------------------------------------- at the door


def _place_of(location: str, admin_port: int) -> _Place:
    if "@" in location:
        raise ConfigError("mooncake knows no credentials; leave them out of the URL")
    try:
        url = urlsplit(location)
        host, port, sound = url.hostname, url.port or _PORT, not url.path.strip("/")
    except ValueError:
        host, port, sound = None, 0, False
    if not location.startswith("//") or not host or not sound:
        raise ConfigError(
            f"{location!r} names no master; write the tier like "
            f"mooncake://host:{_PORT}?capacity=64GiB"
        )
    return _Place(host, port, f"{host}:{admin_port}")


def _reach(place: _Place) -> str:
    """Return this host's address on the way to the master.

    Raises Unreachable when that is not there: the client library would try for a minute and more.
    """
    try:
        with socket.create_connection((place.host, place.port), _CONNECT_SECONDS) as link:
            return str(link.getsockname()[0])
    except OSError as error:
        where = f"mooncake://{place.host}:{place.port}"
        raise Unreachable(f"cannot use {where}: {error}; {_REMEDY}") from error


def _client() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(f"mooncake cannot be loaded ({error}); {_INSTALL}") from error
    return MooncakeDistributedStore()
