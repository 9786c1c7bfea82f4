"""What a daemon says to its clients. See ``frames`` for how it crosses the socket."""

from __future__ import annotations

from typing import Literal

from kvtier.catalog.explain import Explanation
from kvtier.daemon.messages import LARGE, Chunks, Message, Number, Seconds, Short


class Welcome(Message):
    """Answer to Hello; the arena's descriptor comes with it.

    generation: counts the daemon's starts on this arena, beginning with 1. arena: its inode
    number, as plans name it; nbytes: its size. tiers: their names, DRAM first. first: plans with
    lower ids are not a worker's to execute that has not had this arena before.
    """

    KIND = 64
    MOST = 64 << 10
    generation: Number
    arena: Number
    nbytes: Number
    tiers: tuple[Short, ...]
    first: Number = 0


class Joined(Message):
    """Answer to Join. desk: names it in requests; owner: the namespace's number there."""

    KIND = 65
    desk: Number
    owner: Number


class Matched(Message):
    """Answer to Match. tiers: for each chunk one byte, the tier's number."""

    KIND = 66
    MOST = 1 << 20
    tokens: Number
    tiers: bytes
    known: Chunks
    unknown: bool


class Leased(Message):
    """Answer to Lease and Fetch. lease: its number, 0 for none at all.

    tokens, first: see Lease. sources: for each chunk one byte, the tier's number. slots: of all
    its parts, chunk by chunk. seconds: how long it is held from now on.
    """

    KIND = 67
    MOST = LARGE
    lease: Number
    tokens: Number
    first: Chunks
    sources: bytes
    slots: bytes
    seconds: Seconds


class Reserved(Message):
    """Answer to Reserve. plan: its id, 0 for none; refused: chunks without room.

    chunks, places: of each slot, as unsigned 32-bit numbers, little-endian.
    """

    KIND = 68
    MOST = LARGE
    plan: Number
    refused: Number
    chunks: bytes
    places: bytes
    slots: bytes


class Count(Message):
    """A number."""

    KIND = 69
    value: Number


class Told(Message):
    """Yes or no."""

    KIND = 70
    value: bool


class Removed(Message):
    """Answer to Invalidate and Purge. See ``kvtier.Removed``."""

    KIND = 71
    MOST = 64 << 10
    parts: Number
    unconfirmed: Number
    unlisted: tuple[Short, ...]


class Progress(Message):
    """How many parts a purge has gone through."""

    KIND = 72
    parts: Number


class Explained(Message):
    """Answer to Explain."""

    KIND = 73
    MOST = LARGE
    explanation: Explanation


class Answer(Message):
    """Answer to Figures: numbers by name."""

    KIND = 74
    MOST = 1 << 20
    figures: dict[str, float]


class Resend(Message):
    """The daemon does not have this prompt's keys (any more): ask again, with them."""

    KIND = 75


class Failed(Message):
    """What was asked is refused, and why. error: the exception's name, of ``kvtier.errors``."""

    KIND = 77
    MOST = 64 << 10
    error: Literal[
        "ConfigError", "MisuseError", "NamespaceMismatch", "ProtocolError", "TimeoutError"
    ]
    text: str


class Closing(Message):
    """The daemon ends, in order. No answer."""

    KIND = 78


class Healthy(Message):
    """Answer to Health. troubles: of each tier that is not served, why."""

    KIND = 79
    MOST = 1 << 20
    troubles: dict[Short, str]
