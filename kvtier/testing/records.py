"""Records whose bytes follow from their names, so that any reader can tell what it should get."""

from __future__ import annotations

import hashlib
import mmap
from typing import Final

import numpy as np

from kvtier.identity.record import RECORD_VERSION, Header, PartName, RecordId, checksum, record_id
from kvtier.tiers.store import Read, Status, Store, Write

NAMESPACE: Final = hashlib.sha256(b"kvtier.testing").digest()
_POISON: Final = 0xAB


def aligned(size: int) -> memoryview:
    """Return `size` bytes of zeroed memory that begins at a page."""
    return memoryview(mmap.mmap(-1, max(1, size)))[:size]


def payload(key: bytes, size: int, version: int = 0) -> memoryview:
    """Return the bytes that a record of this key, size and version has. Page-aligned."""
    data = aligned(size)
    seed = int.from_bytes(key[:8], "little") + version
    data[:] = np.random.default_rng(seed).bytes(size)
    return data


def kv_like(seed: int, size: int) -> memoryview:
    """Return bytes like the KV of a model in bfloat16: normal, of another scale each channel."""
    numbers = np.random.default_rng(seed)
    scales = np.exp(numbers.standard_normal(64))
    wide = (numbers.standard_normal((size // 128 + 1, 64)) * scales).astype("<f4")
    high = (wide.view("<u4") >> 16).astype("<u2").ravel()
    data = aligned(size)
    data[:] = high.data.cast("B")[:size]
    return data


class _NewerHeader(Header, frozen=True):
    """A header as a later kvtier packs it."""

    def pack(self) -> bytes:
        body = bytearray(super().pack()[:-16])
        body[8] = RECORD_VERSION + 1
        return bytes(body) + checksum(bytes(body))


def newer_record(number: int, size: int) -> Write:
    """Return the same record as a later kvtier writes it, of the next version."""
    header, data = make_record(number, size)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    return Write(_NewerHeader(**fields), data)


def make_record(
    number: int,
    size: int,
    *,
    version: int = 0,
    namespace: bytes = NAMESPACE,
    part: PartName | None = None,
    like_kv: bool = False,
) -> Write:
    """Return record `number` of a namespace, `size` bytes; a version has bytes of its own.

    like_kv: those of bfloat16, and not of noise.
    """
    key = hashlib.sha256(namespace + number.to_bytes(8, "little")).digest()
    data = kv_like(number, size) if like_kv else payload(key, size, version)
    total = checksum(data)
    header = Header(
        namespace=namespace,
        key=key,
        parent=record_id(hashlib.sha256(b"parent" + key).digest(), part or PartName()),
        depth=number,
        part=part or PartName(),
        raw_bytes=size,
        stored_bytes=size,
        raw_sum=total,
        stored_sum=total,
    )
    return Write(header, data)


def fetch(store: Store, name: RecordId, size: int) -> tuple[Read, memoryview]:
    """Read one record into a poisoned buffer of `size` bytes."""
    buffer = aligned(size)
    buffer[:] = bytes([_POISON]) * size
    (read,) = store.read_many([name], [buffer])
    return read, buffer


def is_exact(read: Read, buffer: memoryview) -> bool:
    """Say whether a read gave the bytes that its header promises, as a Tier checks it."""
    if read.status is not Status.OK or read.header is None:
        return False
    return checksum(buffer[: read.header.stored_bytes]) == read.header.stored_sum
