"""Records: the header's bytes are golden, and nothing but a whole header is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from kvtier.errors import Corrupt
from kvtier.identity import record as module
from kvtier.identity.record import (
    HEADER_BYTES,
    RECORD_ID_BYTES,
    Header,
    PartName,
    checksum,
    record_id,
    split_record_id,
)

GOLDEN = Path(__file__).parent / "golden" / "record-v2.hex"
HEADER = Header(
    namespace=bytes(range(32)),
    key=bytes(range(32, 64)),
    parent=bytes(range(64, 96)) + bytes([6, 0, 7, 0, 8, 0, 9, 0, 10, 0]),
    depth=7,
    part=PartName(component=1, shard=2, shards=4, stage=3, stages=5),
    raw_bytes=1_000_000,
    stored_bytes=700_001,
    raw_sum=checksum(b"raw"),
    stored_sum=checksum(b"stored"),
    codec=3,
)


def test_the_header_is_the_golden_one():
    golden = bytes.fromhex(GOLDEN.read_text(encoding="ascii"))
    assert HEADER.pack() == golden
    assert Header.unpack(golden) == HEADER
    assert len(golden) == HEADER_BYTES


def test_the_fields_lie_where_the_text_says():
    data = HEADER.pack()
    assert data[:8] == b"KVTIERrc"
    numbers = [
        (8, 2, 2),
        (10, 2, 3),
        (12, 4, 7),
        (132, 4, 0),
        (136, 8, 1_000_000),
        (144, 8, 700_001),
    ]
    part = zip(range(112, 132, 2), [1, 2, 4, 3, 5, 6, 7, 8, 9, 10], strict=True)
    for at, size, value in [*numbers, *((at, 2, value) for at, value in part)]:
        assert int.from_bytes(data[at : at + size], "little") == value, at
    assert data[16:112] == bytes(range(96))
    assert data[152:168] == checksum(b"raw")
    assert data[168:184] == checksum(b"stored")
    assert data[184:240] == bytes(56)
    assert data[240:] == checksum(data[:240])


def test_every_flipped_bit_is_refused():
    data = bytearray(HEADER.pack())
    for bit in range(8 * HEADER_BYTES):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            Header.unpack(data)
        data[bit // 8] ^= 1 << bit % 8
    assert Header.unpack(data) == HEADER


def test_without_its_checksum_flipped_bits_would_pass(monkeypatch):
    data = bytearray(HEADER.pack())
    data[40] ^= 1
    monkeypatch.setattr(module, "checksum", lambda _: bytes(data[240:]))
    assert Header.unpack(data) != HEADER


def test_a_cut_header_is_refused():
    data = HEADER.pack()
    for size in range(HEADER_BYTES):
        with pytest.raises(Corrupt, match="not a kvtier record"):
            Header.unpack(data[:size])


def test_a_header_is_read_from_the_front_of_its_page():
    page = memoryview(HEADER.pack() + b"\xab" * 3840)
    assert Header.unpack(page) == HEADER


def sealed(body: bytes) -> bytes:
    return body + checksum(body)


def test_another_version_is_refused_by_its_number():
    body = bytearray(HEADER.pack()[:240])
    body[8] = 3
    with pytest.raises(Corrupt, match="record version 3; this kvtier reads 2"):
        Header.unpack(sealed(bytes(body)))


def test_another_version_with_another_layout_is_named_too():
    data = bytearray(HEADER.pack())
    data[8] = 9
    with pytest.raises(Corrupt, match="another version: 9"):
        Header.unpack(data)


@pytest.mark.parametrize(
    "change",
    [
        {"part": PartName(0, 1, 1)},
        {"part": PartName(0, 0, 0)},
        {"part": PartName(0, 0, 1, 1, 1)},
        {"part": PartName(0, 0, 1, 0, 0)},
        {"depth": 1 << 31},
        {"raw_bytes": (1 << 40) + 1},
        {"stored_bytes": (1 << 64) - 1},
    ],
    ids=str,
)
def test_impossible_values_are_refused_though_their_checksum_is_right(change: dict[str, object]):
    hostile = structs.replace(HEADER, **change).pack()
    with pytest.raises(Corrupt, match="impossible"):
        Header.unpack(hostile)


def test_a_part_without_a_parent_has_none():
    head = structs.replace(HEADER, parent=None)
    assert head.pack()[80:112] == bytes(32)
    assert Header.unpack(head.pack()) == head


def test_a_name_is_key_and_part():
    assert HEADER.id == record_id(HEADER.key, HEADER.part)
    assert split_record_id(HEADER.id) == (HEADER.key, HEADER.part)
    assert len(HEADER.id) == RECORD_ID_BYTES
    parts = [PartName(c, s, n) for c in range(3) for n in (1, 2, 300) for s in range(min(n, 2))]
    assert len({record_id(HEADER.key, part) for part in parts}) == len(parts)


@pytest.mark.parametrize("size", [0, 32, 41, 43])
def test_a_name_of_another_length_is_refused(size: int):
    with pytest.raises(Corrupt, match="42 bytes"):
        split_record_id(bytes(size))


def test_the_checksum_is_xxh3_128_in_canonical_order():
    # xxhsum -H2 of no bytes, as the xxHash project publishes it
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(memoryview(b"abc")) == checksum(b"abc") != checksum(b"abd")
