"""A record: one part as it lies in a tier, a fixed header and then bytes.

The header makes every tier readable without its index: it says which namespace and chunk the
bytes belong to, which part they are, how they were encoded, and what their checksums must be.

Layout, little-endian, 256 bytes::

    0    8s   magic "KVTIERrc"
    8    u16  version
    10   u16  codec
    12   u32  depth of the chunk in its prefix, 0 for the first
    16   32s  namespace digest
    48   32s  chunk key
    80   32s  parent key (zeros for a part without one, as at depth 0: the root is a secret)
    112  5u16 component, shard, shards, stage, stages
    122  5u16 the same of the parent's part (zeros where the part has no parent)
    132  u32  zero
    136  u64  raw bytes
    144  u64  stored bytes
    152  16s  xxh3_128 of the raw bytes
    168  16s  xxh3_128 of the stored bytes
    184  56s  zero
    240  16s  xxh3_128 of bytes 0..240
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvtier.errors import Corrupt, Newer

RECORD_VERSION: Final = 2
HEADER_BYTES: Final = 256
KEY_BYTES: Final = 32

CODEC_RAW: Final = 0
CODEC_LOSSLESS: Final = 0x0201
"""Codecs by number: the kind in the high byte, the version in the low one. 0x01 is a pack."""

NEWER_REMEDY: Final = "upgrade it, or give hosts of each version a tier of their own"
"""What to do about what another kvtier wrote, of a version that this one does not read."""

FIRST_PLUG_IN: Final = 0x8000
"""From here on numbers are those of plug-ins."""

MAGIC: Final = b"KVTIERrc"
_BODY: Final = struct.Struct("<8sHHI32s32s32s10s10sIQQ16s16s56s")
_PART: Final = struct.Struct("<HHHHH")
_NO_PARENT: Final = bytes(KEY_BYTES)
_NO_PART: Final = bytes(_PART.size)
_KEY: Final = slice(48, 80)
_SUFFIX: Final = slice(112, 122)
_VERSION: Final = struct.Struct("<8xH")
_SUM_AT: Final = HEADER_BYTES - 16
MOST_DEPTH: Final = 1 << 31
MOST_BYTES: Final = 1 << 40
RECORD_ID_BYTES: Final = KEY_BYTES + _PART.size

RecordId = bytes
"""Chunk key and part, 42 bytes: what a Store calls a record by."""


class PartName(NamedTuple):
    """Which piece of a chunk: a component of a model, a shard of its heads, a stage of its layers.

    Replicated KV, such as an MLA latent, is shard 0 of 1 whatever the ranks.
    """

    component: int = 0
    shard: int = 0
    shards: int = 1
    stage: int = 0
    stages: int = 1


def record_id(key: bytes, part: PartName) -> RecordId:
    """Return the name of a part of a chunk. `key` has 32 bytes."""
    return key + _suffix(part)


@lru_cache(maxsize=4096)
def _suffix(part: PartName) -> bytes:
    return _PART.pack(*part)


def split_record_id(name: RecordId) -> tuple[bytes, PartName]:
    """Return chunk key and part of a record's name. Raises Corrupt for a wrong length."""
    if len(name) != RECORD_ID_BYTES:
        raise Corrupt(f"a record id has {RECORD_ID_BYTES} bytes, this one {len(name)}")
    return name[:KEY_BYTES], PartName(*_PART.unpack(name[KEY_BYTES:]))


@lru_cache(maxsize=4096)
def _possible_part(suffix: bytes) -> PartName | None:
    """Return a part from its ten bytes, None if there can be none; records have few different."""
    part = PartName(*_PART.unpack(suffix))
    return part if part.shard < part.shards and part.stage < part.stages else None


def name_in(head: bytes) -> RecordId:
    """Return the name that a packed header gives its record, without looking at the rest."""
    return head[_KEY] + head[_SUFFIX]


def codec_name(codec: int) -> str:
    """Return what people call the codec of a record, with its version."""
    if codec >= FIRST_PLUG_IN:
        return f"plug-in {codec:#06x}"
    kind = {CODEC_RAW: "raw", CODEC_LOSSLESS >> 8: "lossless", 0x01: "pack"}.get(codec >> 8)
    if kind is None or (kind == "raw") != (codec == CODEC_RAW):
        return f"unknown {codec:#06x}"
    return f"{kind}-{codec & 0xFF}" if codec else kind


def checksum(data: bytes | memoryview) -> bytes:
    """Return the xxh3_128 of contiguous bytes: 16 bytes. Releases the GIL."""
    return xxhash.xxh3_128_digest(data)


class Header(msgspec.Struct, frozen=True):
    """All that is known of a record besides its bytes. parent: the name of its parent, if any."""

    namespace: bytes
    key: bytes
    parent: RecordId | None
    depth: int
    part: PartName
    raw_bytes: int
    stored_bytes: int
    raw_sum: bytes
    stored_sum: bytes
    codec: int = CODEC_RAW

    @property
    def id(self) -> RecordId:
        """The name that the record has in every tier."""
        return record_id(self.key, self.part)

    def pack(self) -> bytes:
        """Return the header as its 256 bytes."""
        parent = self.parent or _NO_PARENT + _NO_PART
        body = _BODY.pack(
            MAGIC,
            RECORD_VERSION,
            self.codec,
            self.depth,
            self.namespace,
            self.key,
            parent[:KEY_BYTES],
            _PART.pack(*self.part),
            parent[KEY_BYTES:],
            0,
            self.raw_bytes,
            self.stored_bytes,
            self.raw_sum,
            self.stored_sum,
            b"",
        )
        return body + checksum(body)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """Read a header from the first 256 bytes of `data`.

        Raises Corrupt for anything that is not a whole header of a known version, Newer for one of
        a later version.
        """
        head = (
            data
            if len(data) == HEADER_BYTES and type(data) is bytes
            else bytes(data[:HEADER_BYTES])
        )
        if len(head) < HEADER_BYTES or head[:8] != MAGIC:
            raise Corrupt("not a kvtier record")
        (version,) = _VERSION.unpack_from(head)
        if checksum(head[:_SUM_AT]) != head[_SUM_AT:]:
            other = "" if version == RECORD_VERSION else f" (or is of another version: {version})"
            raise Corrupt(f"a record header fails its checksum{other}")
        if version != RECORD_VERSION:
            why = f"record version {version}; this kvtier reads {RECORD_VERSION}"
            raise Newer(f"{why}: {NEWER_REMEDY}") if version > RECORD_VERSION else Corrupt(why)
        fields = _BODY.unpack_from(head)
        _, _, codec, depth, namespace, key, above, suffix, above_suffix, *rest = fields
        _, raw_bytes, stored_bytes, raw_sum, stored_sum, _ = rest
        part = _possible_part(suffix)
        parent = None if above == _NO_PARENT else above + above_suffix
        # Anybody can compute a checksum: a shared tier's headers must be possible, too.
        if part is None or depth >= MOST_DEPTH or max(raw_bytes, stored_bytes) > MOST_BYTES:
            raise Corrupt("a record header names an impossible part, depth or size")
        return cls(
            namespace=namespace,
            key=key,
            parent=parent,
            depth=depth,
            part=part,
            raw_bytes=raw_bytes,
            stored_bytes=stored_bytes,
            raw_sum=raw_sum,
            stored_sum=stored_sum,
            codec=codec,
        )
