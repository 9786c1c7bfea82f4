"""Hostile bytes: what a broken or malicious peer might send in place of frames. Seeded."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgspec

from kvtier.daemon.frames import HEADER, encode
from kvtier.testing.wire import NUMBER, SAMPLES

_FRAMES: Final = [encode(sample, NUMBER) for sample in SAMPLES]
_KINDS: Final = [sample.KIND for sample in SAMPLES]
_BODIES: Final[list[list[Any]]] = [
    msgspec.msgpack.decode(frame[HEADER.size :]) for frame in _FRAMES
]
_VALUES: Final[tuple[Any, ...]] = (
    *(0, 1, 2, 63, 64, 1 << 16, 1 << 17, (1 << 17) + 1, 1 << 31, 1 << 62, (1 << 63) - 1),
    *(-1, -(1 << 63), (1 << 64) - 1, None, True, False),
    *(0.0, -0.0, 0.5, 1e9, 1e300, float("inf"), float("-inf"), float("nan")),
    *("", "dram", "x" * 257, "\0", "\N{SNOWMAN}" * 80, b"", bytes(31), bytes(32), bytes(33)),
    *([], [[]], [[0]] * 40, {}, {"": 0}, {"dram": -1}, [[], {}, [None]]),
)
# How MessagePack begins what has a count of four bytes: bin, str, array, map.
_COUNTED: Final = (0xC6, 0xDB, 0xDD, 0xDF)
_NESTED: Final = (b"\x91", b"\x81\xa0", b"\xdc\x00\x01")
_LONG: Final = 1 << 14


def _framed(kind: int, body: bytes, length: int | None = None) -> bytes:
    said = len(body) if length is None else length
    return HEADER.pack(b"KV", 1, kind, said & 0xFFFFFFFF, NUMBER) + body


def _flip(random: Random) -> bytes:
    """Flip some bits of a frame."""
    data = bytearray(random.choice(_FRAMES))
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _cut(random: Random) -> bytes:
    """Take some bytes out of a frame, or put some in; its header stays what it was, or not."""
    data = random.choice(_FRAMES)
    begin = random.randrange(len(data))
    end = random.choice((len(data), begin, min(begin + random.randrange(9), len(data))))
    found = data[:begin] + random.randbytes(random.choice((0, 0, 1, 9))) + data[end:]
    if random.random() < 0.5 and len(found) > HEADER.size:
        return _framed(found[3], found[HEADER.size :])
    return found


def _length(random: Random) -> bytes:
    """Lie about a body's length."""
    which = random.randrange(len(_FRAMES))
    body = _FRAMES[which][HEADER.size :]
    near = len(body) + random.randrange(-9, 10)
    most = SAMPLES[which].MOST
    said = random.choice((near, near, 0, most, most + 1, 1 << 31, (1 << 32) - 1))
    return _framed(_KINDS[which], body, said) + random.choice(_FRAMES)


def _splice(random: Random) -> bytes:
    """Begin with one frame and end with another; or say one kind and send another's body."""
    one, two = random.choice(_FRAMES), random.choice(_FRAMES)
    if random.random() < 0.5:
        return _framed(one[3], two[HEADER.size :])
    return one[: random.randrange(len(one))] + two[random.randrange(len(two)) :]


def _noise(random: Random) -> bytes:
    """Send a random body of a known kind, or noise alone."""
    body = random.randbytes(random.choice((0, 1, 7, 40, 300)))
    if random.random() < 0.2:
        return body
    return _framed(random.choice(_KINDS), body)


def _count(random: Random) -> bytes:
    """Say of some value in a body that it has more members than there are bytes."""
    which = random.randrange(len(_FRAMES))
    body = _FRAMES[which][HEADER.size :]
    at = random.randrange(len(body) + 1)
    count = random.choice((1 << 16, 1 << 24, (1 << 31) - 1, (1 << 32) - 1))
    lie = bytes([random.choice(_COUNTED)]) + count.to_bytes(4, "big")
    return _framed(_KINDS[which], body[:at] + lie + body[at + random.randrange(2) :])


def _nest(random: Random) -> bytes:
    """Nest arrays and maps far deeper than any message does."""
    which = random.randrange(len(_FRAMES))
    body = _FRAMES[which][HEADER.size :]
    at = random.randrange(len(body) + 1)
    deep = random.choice(_NESTED) * random.choice((3, 100, 1100))
    return _framed(_KINDS[which], (body[:at] + deep + body[at:])[: SAMPLES[which].MOST])


def _replaced(random: Random, value: Any) -> Any:
    """Return a value with something hostile somewhere in it."""
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], _replaced(random, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and random.random() < 0.5:
        key = random.choice(list(value))
        return value | {key: _replaced(random, value[key])}
    if isinstance(value, bytes) and random.random() < 0.3:
        return random.randbytes(random.choice((len(value), 1, 31, 32, 64)))
    if isinstance(value, int) and random.random() < 0.5:
        return random.randrange(24)  # numbers that a daemon gives to desks, leases and plans
    return random.choice(_VALUES)


def _swap(random: Random) -> bytes:
    """Replace values by others that are no less well-formed, so that some get far."""
    which = random.randrange(len(_BODIES))
    body: Any = _BODIES[which]
    for _ in range(random.choice((1, 1, 2, 4))):
        body = _replaced(random, body)
    return _framed(_KINDS[which], msgspec.msgpack.encode(body))


def _long(random: Random) -> bytes:
    """Repeat something small very often, where a list, a map or bytes may stand."""
    which = random.randrange(len(_BODIES))
    body = list(_BODIES[which])
    if body:
        many = random.choice((_LONG, 1 << 9, 1 << 6))
        item: Any = random.choice(([], [0], 0, {}, None, [0, 0.5], ""))
        body[random.randrange(len(body))] = random.choice(
            ([item] * many, {str(at): 0 for at in range(many)}, bytes(many), "x" * many)
        )
    data = msgspec.msgpack.encode(body)
    return _framed(_KINDS[which], data)


def _header(random: Random) -> bytes:
    """Send another program's letters, another version, or a kind that there is not."""
    data = bytearray(random.choice(_FRAMES))
    at = random.choice((0, 1, 2, 3))
    data[at] = random.randrange(256)
    return random.choice((bytes(data), b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n"))


def _plain(random: Random) -> bytes:
    """Send what is right, out of place."""
    return b"".join(random.choice(_FRAMES) for _ in range(random.choice((1, 1, 3))))


WAYS: Final[dict[str, Callable[[Random], bytes]]] = {
    way.__name__.removeprefix("_"): way
    for way in (
        *(_flip, _cut, _length, _splice, _noise, _count),
        *(_nest, _swap, _long, _header, _plain),
    )
}
"""How input can be hostile, by name."""

_OFTEN: Final = [name for name in WAYS if name not in {"nest", "long"}] * 4 + [
    *("nest", "long", *["swap"] * 12)
]


def hostile(seed: int, number: int) -> tuple[str, bytes]:
    """Return the way in which one input is hostile, and what a peer sends: frames or no frames.

    The same seed and number give the same.
    """
    random = Random((seed << 64) | number)
    way = random.choice(_OFTEN)
    return way, WAYS[way](random)
