"""Lossless: the two bytes of each 16-bit element apart, and only the upper ones compressed.

The upper byte of a bfloat16 is its sign and most of its exponent, which takes few values; the
lower one is nearly noise. zstd at level 1 finds in the upper plane what order-0 entropy promises,
and would spend its time in vain on the lower. benchmarks/codec.py shows both beside that bound.

Stored, version 1, little-endian::

    pieces, each of one MiB of raw bytes, the last one shorter:
        the lower plane, then the upper plane as one zstd frame; or, where that would be no
        shorter, the raw bytes
    for each piece its stored length, u32

No piece grows, so that in the memory of the raw bytes the stored ones of a piece never begin
behind where its raw ones will: decoding goes from the last piece to the first, in place.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvtier.identity.record import CODEC_LOSSLESS

PIECE_BYTES: Final = 1 << 20
"""Of raw bytes: both planes and what is made of them stay in a core's cache."""

_LEVEL: Final = 1
_WINDOW_BYTES: Final = 1 << 20  # a frame that asks for more memory to be decoded is refused
_LENGTH_BYTES: Final = 4
_ELEMENT: Final = np.dtype("<u2")

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


class _Scratch(threading.local):
    """What one thread needs: two MiB, and two contexts of zstd."""

    def __init__(self) -> None:
        half = PIECE_BYTES // 2
        self.low: Bytes = np.empty(half, np.uint8)
        self.high: Bytes = np.empty(half, np.uint8)
        self.wide: Words = np.empty(half, _ELEMENT)
        self.packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)


class Lossless:
    """For elements of 16 bits. See Codec."""

    name = "lossless-1"
    number = CODEC_LOSSLESS
    element_bytes = _ELEMENT.itemsize

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """See Codec. An odd number of bytes is of no such elements: that does not fit."""
        if not raw or len(raw) % 2:
            return 0
        data, out = np.frombuffer(raw, np.uint8), np.frombuffer(into, np.uint8)
        count = _pieces(len(raw))
        room = len(into) - _LENGTH_BYTES * count
        lengths: list[int] = []
        at = 0
        for start in range(0, len(raw), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            length = self._encode(piece, out[at : max(room, at)])
            if not length:
                return 0
            lengths.append(length)
            at += length
        struct.pack_into(f"<{count}I", into, at, *lengths)
        return at + _LENGTH_BYTES * count

    def _encode(self, piece: Bytes, into: Bytes) -> int:
        """Write one piece; return its stored length, 0 when there is no room."""
        half = len(piece) // 2
        elements = piece.view(_ELEMENT)
        high = self._scratch.high[:half]
        np.right_shift(elements, 8, out=high, casting="unsafe")
        frame = np.frombuffer(self._scratch.packer.compress(high.data), np.uint8)
        length = half + len(frame)
        if length >= len(piece):
            if len(into) < len(piece):
                return 0
            np.copyto(into[: len(piece)], piece)
            return len(piece)
        if length > len(into):
            return 0
        np.copyto(into[:half], elements, casting="unsafe")  # keeps the lower byte of each
        np.copyto(into[half:length], frame)
        return length

    def decode(self, stored: memoryview, into: memoryview) -> bool:
        """See Codec."""
        count = _pieces(len(into))
        end = len(stored) - _LENGTH_BYTES * count
        if not count or len(into) % 2 or end < 0:
            return False
        lengths = struct.unpack_from(f"<{count}I", stored, end)  # before it is written over
        if sum(lengths) != end:
            return False
        source, target = np.frombuffer(stored, np.uint8), np.frombuffer(into, np.uint8)
        for number in range(count - 1, -1, -1):
            piece = target[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            end, stop = end - lengths[number], end
            # What comes before has to have kept its place, or this would write over it.
            if end > number * PIECE_BYTES or not self._decode(source[end:stop], piece):
                return False
        return True

    def _decode(self, stored: Bytes, piece: Bytes) -> bool:
        """Fill a piece from its stored bytes, with which it may overlap."""
        scratch, half = self._scratch, len(piece) // 2
        low, high, wide = scratch.low[:half], scratch.high[:half], scratch.wide[:half]
        if len(stored) >= len(piece):
            if len(stored) > len(piece):
                return False
            np.copyto(piece, stored)  # which looks for an overlap itself
            return True
        if len(stored) < half or not self._unpack(stored[half:], high):
            return False
        np.copyto(low, stored[:half])
        np.left_shift(high, 8, out=wide, dtype=_ELEMENT, casting="unsafe")
        np.bitwise_or(wide, low, out=piece.view(_ELEMENT), casting="unsafe")
        return True

    def _unpack(self, frame: Bytes, into: Bytes) -> bool:
        """Decompress a frame of exactly so many bytes, never more of it."""
        try:
            with self._scratch.unpacker.stream_reader(frame.data) as reader:
                return reader.readinto(into.data) == len(into)
        except zstandard.ZstdError:
            return False


def _pieces(raw_bytes: int) -> int:
    return -(-raw_bytes // PIECE_BYTES)
