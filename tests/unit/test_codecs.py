"""Codecs: exactly the same bytes back, and from hostile ones never more than was asked for."""

from __future__ import annotations

import random
import struct
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from kvtier.codecs import lossless as module
from kvtier.codecs.known import KNOWN, LOSSLESS, RAW
from kvtier.codecs.lossless import PIECE_BYTES
from kvtier.identity.record import CODEC_LOSSLESS, codec_name
from kvtier.testing.records import aligned, kv_like

GOLDEN = Path(__file__).parent / "golden" / "lossless-v1.hex"
POISON = 0xAB
SIZES = [
    *(4096, 40_000, PIECE_BYTES - 2, PIECE_BYTES, PIECE_BYTES + 2),
    *(2 * PIECE_BYTES, 3 * PIECE_BYTES + 77_778),
]


def encoded(raw: memoryview, room: int | None = None) -> memoryview | None:
    """Encode, and see that nothing behind the room was written."""
    room = len(raw) if room is None else room
    into = aligned(room + 64)
    into[room:] = bytes([POISON]) * 64
    count = LOSSLESS.encode(raw, into[:room])
    assert bytes(into[room:]) == bytes([POISON]) * 64, "written past its end"
    assert 0 <= count <= room
    return into[:count] if count else None


def decoded(stored: memoryview, size: int, *, in_place: bool, offset: int = 0) -> bytes | None:
    """Decode, and see that nothing around the buffer was written."""
    space = np.full(size + 128 + offset, POISON, np.uint8)
    into = space.data[64 + offset : 64 + offset + size]
    if in_place:
        into[: len(stored)] = stored
        stored = into[: len(stored)]
    fine = LOSSLESS.decode(stored, into)
    around = (*space[: 64 + offset], *space[64 + offset + size :])
    assert set(around) == {POISON}, "written outside"
    return bytes(into) if fine else None


def patterns(size: int) -> dict[str, memoryview]:
    """Return what numbers of 16 bits may look like."""
    words = size // 2
    numbers = np.random.default_rng(size)

    def data(values) -> memoryview:
        return memoryview(np.ascontiguousarray(values, "<u2").view(np.uint8))

    return {
        "zeros": data(np.zeros(words)),
        "like KV": kv_like(size, size),
        "NaNs, with what they carry": data(numbers.integers(0x7F81, 0x8000, words)),
        "both infinities and both zeros": data(numbers.choice([0x7F80, 0xFF80, 0, 0x8000], words)),
        "denormals": data(numbers.integers(0, 0x80, words)),
        "all that there are": data(np.arange(words)),
        "noise then KV": memoryview(numbers.bytes(size // 2) + bytes(kv_like(1, size - size // 2))),
        "half floats": data(numbers.standard_normal(words).astype("<f2").view("<u2")),
    }


@pytest.mark.parametrize("size", SIZES)
def test_what_comes_back_is_what_went_in(size):
    for what, raw in patterns(size).items():
        stored = encoded(raw)
        if stored is None:
            continue
        assert len(stored) < size
        for in_place in (True, False):
            for offset in (0, 1):
                assert decoded(stored, size, in_place=in_place, offset=offset) == raw, what


def test_kv_becomes_two_thirds_and_noise_is_refused():
    raw = kv_like(3, 4 * PIECE_BYTES)
    stored = encoded(raw)
    assert stored is not None
    assert 1.4 < len(raw) / len(stored) < 1.5
    noise = memoryview(random.Random(1).randbytes(2 * PIECE_BYTES))
    assert encoded(noise) is None


def test_what_does_not_fit_is_refused_at_every_length():
    raw = kv_like(1, 6000)
    stored = encoded(raw)
    assert stored is not None
    for room in (0, 1, 3, 4, 3000, len(stored) - 1):
        assert encoded(raw, room) is None
    assert encoded(raw, len(stored)) == stored


def test_a_piece_of_noise_among_others_lies_there_as_it_is():
    noise = random.Random(1).randbytes(PIECE_BYTES)
    raw = memoryview(bytes(kv_like(1, PIECE_BYTES)) + noise + bytes(kv_like(2, PIECE_BYTES)))
    stored = encoded(raw)
    assert stored is not None
    assert noise in bytes(stored)
    assert decoded(stored, len(raw), in_place=True) == raw


@pytest.mark.parametrize("size", [0, 1, 4097])
def test_what_is_not_of_16_bit_elements_is_refused(size):
    assert encoded(memoryview(bytes(size))) is None
    assert decoded(memoryview(bytes(size)), size, in_place=False) is None


def test_unaligned_bytes_are_encoded_alike():
    raw = kv_like(5, 50_000)
    shifted = memoryview(bytearray(b"x" + bytes(raw)))[1:]
    assert encoded(shifted) == encoded(raw)


# ---------------------------------------------------------------------------------- the format


def written_by_the_text(raw: bytes) -> bytes:
    """Encode as the module's text says, in other words."""
    out, lengths = b"", []
    for start in range(0, len(raw), PIECE_BYTES):
        piece = raw[start : start + PIECE_BYTES]
        both = piece[0::2] + zstandard.ZstdCompressor(level=9).compress(piece[1::2])
        kept = min(both, piece, key=len)
        out += kept
        lengths.append(len(kept))
    return out + struct.pack(f"<{len(lengths)}I", *lengths)


def test_what_another_writer_makes_by_the_format_is_read():
    raw = bytes(kv_like(8, 2 * PIECE_BYTES + 4444))
    stored = memoryview(written_by_the_text(raw))
    assert decoded(stored, len(raw), in_place=True) == raw


def test_the_golden_bytes_are_read():
    """Who changes the format counts the codec's version up, and keeps reading this one."""
    golden = bytes.fromhex(GOLDEN.read_text(encoding="ascii"))
    assert decoded(memoryview(golden), 1024, in_place=True) == kv_like(1, 1024)
    assert (LOSSLESS.name, LOSSLESS.number) == ("lossless-1", CODEC_LOSSLESS)
    assert CODEC_LOSSLESS == 0x0201


def test_codecs_have_the_names_that_people_are_told():
    assert all(codec.name == codec_name(number) for number, codec in KNOWN.items())
    assert codec_name(0x0102) == "pack-2"
    assert codec_name(0x0202) == "lossless-2"
    assert codec_name(0x8123) == "plug-in 0x8123"
    assert [codec_name(number) for number in (1, 0x0999)] == ["unknown 0x0001", "unknown 0x0999"]


def test_raw_is_a_copy_and_refuses_what_does_not_fit():
    into = bytearray(8)
    assert RAW.encode(memoryview(b"12345678"), memoryview(into)) == 8
    assert RAW.encode(memoryview(b"123456789"), memoryview(into)) == 0
    assert RAW.decode(memoryview(into), memoryview(into))
    assert not RAW.decode(memoryview(b"1"), memoryview(into))
    assert into == b"12345678"


# -------------------------------------------------------------------------------- hostile bytes


def table(stored: memoryview, *lengths: int) -> bytes:
    """Return stored bytes with another table behind them."""
    return bytes(stored[: -4 * len(lengths)]) + struct.pack(f"<{len(lengths)}I", *lengths)


def bomb() -> memoryview:
    """Return stored bytes for one piece, of which the frame holds 64 MiB."""
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    half = PIECE_BYTES // 2
    assert len(frame) < half // 4
    return memoryview(bytes(half) + frame + struct.pack("<I", half + len(frame)))


def wide(log: int) -> bytes:
    """Return stored bytes for two KiB whose frame asks for a window of that size."""
    parameters = zstandard.ZstdCompressionParameters(window_log=log)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = packer.compress(bytes(1024)) + packer.flush()
    return bytes(1024) + frame + struct.pack("<I", 1024 + len(frame))


def test_bytes_that_nobody_encoded_are_refused():
    raw = kv_like(2, 2048)
    stored = encoded(raw)
    assert stored is not None
    other = bytes(1024) + b"\x50\x2a\x4d\x18\x00\x00\x00\x00"  # a frame that is to be skipped
    for hostile in (
        *(b"", b"\0", bytes(4), bytes(2048), bytes(2052), stored[:-1], bytes(stored) + b"\0"),
        *(table(stored, 0), table(stored, 1), table(stored, 1 << 31), table(stored, 1023)),
        *(wide(27), other + struct.pack("<I", len(other)), bytes(1024) + struct.pack("<I", 1024)),
    ):
        for in_place in (True, False):
            if len(hostile) <= len(raw) or not in_place:
                held = memoryview(hostile)
                assert decoded(held, len(raw), in_place=in_place) is None, bytes(hostile[-8:])


def test_a_piece_that_is_not_where_it_could_be_is_refused():
    """The lengths of both pieces add up, and the first one leaves no room for itself."""
    raw = kv_like(2, 2 * PIECE_BYTES)
    stored = encoded(raw)
    assert stored is not None
    total = len(stored) - 8
    long = PIECE_BYTES + 4096
    assert decoded(memoryview(table(stored, long, total - long)), len(raw), in_place=True) is None


def memory_to_defuse() -> int:
    """Return how much memory at most decoding a bomb takes besides the buffer."""
    stored, into = bomb(), memoryview(bytearray(PIECE_BYTES))
    LOSSLESS.decode(memoryview(b""), into)  # the thread's scratch is there
    tracemalloc.start()
    LOSSLESS.decode(stored, into)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_a_bomb_takes_no_more_memory_than_what_was_asked_for():
    assert memory_to_defuse() < PIECE_BYTES


def test_without_its_bounds_a_bomb_would_take_all_of_its_memory(monkeypatch):
    """The twin: all of a frame is decompressed, and then what is wanted is taken."""

    def unbounded(self, frame, into) -> bool:
        data = zstandard.ZstdDecompressor().decompress(frame.data)
        into[:] = np.frombuffer(data[: len(into)], np.uint8)
        return True

    monkeypatch.setattr(module.Lossless, "_unpack", unbounded)
    assert memory_to_defuse() > 1 << 26


def test_a_window_is_refused_by_its_bound_and_by_nothing_else(monkeypatch):
    """The twin of a frame that asks for a window of 128 MiB."""
    stored = memoryview(wide(27))
    assert decoded(stored, 2048, in_place=True) is None
    monkeypatch.setattr(
        LOSSLESS._scratch, "unpacker", zstandard.ZstdDecompressor(max_window_size=1 << 27)
    )
    assert decoded(stored, 2048, in_place=True) == bytes(2048)


def test_several_threads_do_not_meet():
    raws = [kv_like(seed, 2 * PIECE_BYTES + 2 * seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(4):
            stored = encoded(raws[seed])
            if stored is None or decoded(stored, len(raws[seed]), in_place=True) != raws[seed]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
