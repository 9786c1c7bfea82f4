"""Codecs under any bytes: what goes in comes back, and what nobody encoded does no harm."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.codecs.known import LOSSLESS
from kvtier.codecs.lossless import PIECE_BYTES
from kvtier.identity.record import CODEC_LOSSLESS, Header, PartName, checksum
from kvtier.testing.records import kv_like
from kvtier.tiers.exact import Wanted, verify
from kvtier.tiers.store import Read, Status

SIZE = PIECE_BYTES + 30_000
RAW = kv_like(1, SIZE)
_space = bytearray(SIZE)
STORED = bytes(_space[: LOSSLESS.encode(RAW, memoryview(_space))])
HEADER = Header(
    *(bytes(32), bytes(32), None, 0, PartName()),
    *(SIZE, len(STORED), checksum(RAW), checksum(STORED), CODEC_LOSSLESS),
)


def runs(values: st.SearchStrategy[int], most: int) -> st.SearchStrategy[bytes]:
    """Return elements in runs, so that a codec has something to find."""
    run = st.tuples(values, st.integers(1, 200))
    return st.lists(run, max_size=most).map(
        lambda found: b"".join(struct.pack("<H", value) * count for value, count in found)
    )


@given(st.one_of(st.binary(max_size=3000), runs(st.integers(0, 0xFFFF), 60)), st.booleans())
def test_what_comes_back_is_what_went_in(raw: bytes, offset: bool) -> None:
    into = np.full(len(raw) + 1, 0xAB, np.uint8)[offset:]
    count = LOSSLESS.encode(memoryview(raw), into.data[: len(raw)])
    assert count <= len(raw)
    if count:
        assert LOSSLESS.decode(into.data[:count], into.data[: len(raw)])
        assert into.tobytes()[: len(raw)] == raw


@settings(max_examples=200)
@given(st.integers(0, 4000), st.binary(max_size=3000))
def test_bytes_that_nobody_encoded_stay_in_their_buffer(size: int, stored: bytes) -> None:
    space = np.full(max(size, len(stored)) + 64, 0xAB, np.uint8)
    space[: len(stored)] = np.frombuffer(stored, np.uint8)
    behind = space[max(size, len(stored)) :].copy()
    LOSSLESS.decode(memoryview(stored), space.data[:size])
    if len(stored) <= size:
        LOSSLESS.decode(space.data[: len(stored)], space.data[:size])
    assert (space[max(size, len(stored)) :] == behind).all()


def spoilt(draw: st.DrawFn) -> bytes:
    """Return what was stored, with bytes changed, moved, missing, or too many."""
    data = bytearray(STORED)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.one_of(st.integers(0, len(data)), st.integers(len(data) - 40, len(data))))
        how = draw(st.sampled_from(["flip", "cut", "put", "drop"]))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[max(at, 64) :]
        elif how == "put":
            data[at:at] = draw(st.binary(min_size=1, max_size=40))
        else:
            del data[at : at + draw(st.integers(1, 40))]
        if len(data) < 64:
            break
    return bytes(data)


@settings(max_examples=150)
@given(st.composite(spoilt)(), st.booleans())
def test_spoilt_bytes_are_never_taken_for_others(data: bytes, attested: bool) -> None:
    """attested: whoever spoilt them wrote a header with their length and checksum."""
    data = data[:SIZE]
    into = np.full(SIZE, 0xAB, np.uint8)
    into[: len(data)] = np.frombuffer(data, np.uint8)
    header = HEADER
    if attested:
        header = Header(
            *(bytes(32), bytes(32), None, 0, PartName()),
            *(SIZE, len(data), HEADER.raw_sum, checksum(data), CODEC_LOSSLESS),
        )
    found = verify(Read(Status.OK, header), Wanted(HEADER.id, bytes(32), SIZE, into.data))
    assert found.status in (Status.OK, Status.CORRUPT)
    if found.status is Status.OK:
        assert into.data == RAW
