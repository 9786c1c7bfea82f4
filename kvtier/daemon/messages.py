"""What a client says to a daemon. See ``frames`` for how it crosses the socket."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec

from kvtier.identity.geometry import Geometry
from kvtier.identity.record import KEY_BYTES

MOST_CHUNKS: Final = 1 << 17  # of a prompt
SMALL: Final = 4 << 10
LARGE: Final = 64 << 20
_PROMPT: Final = MOST_CHUNKS * KEY_BYTES + SMALL  # bytes of a message that carries a prompt
_SAVE: Final = _PROMPT + (2 << 20)
_MOST_TIERS: Final = 64
_MOST_PARTS: Final = 1 << 16  # of one chunk

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Short = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=4096)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_CHUNKS * KEY_BYTES)]
Chunks = Annotated[int, msgspec.Meta(ge=0, le=MOST_CHUNKS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Places = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=_MOST_PARTS)]], msgspec.Meta(max_length=_MOST_PARTS)
]
_Priority = Annotated[int, msgspec.Meta(ge=-100, le=100)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One message. MOST: bytes that its body may have."""

    KIND: ClassVar[int] = 0
    MOST: ClassVar[int] = SMALL


class Prompt(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A prompt, by the keys of its complete chunks, 32 bytes each, one behind another.

    tokens: its length. chunks: how many keys; last: the last of them, or nothing where there is
    none. keys: all of them, or nothing when the daemon was sent these keys before on the same
    session; when it has forgotten them it answers Resend.
    """

    tokens: Number
    chunks: Chunks
    last: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    keys: _Keys


# ---- from a client: the session


class Hello(Message):
    """The first message of a connection; the client's pidfd comes with it.

    session: 16 bytes that the client has drawn; its further connections name the same. engine:
    that it serves; its ranks name the same.
    """

    KIND = 1
    session: _Token
    engine: Short
    role: Literal["scheduler", "worker"]


class Join(Message):
    """Use a namespace; all its fields but the secret. Answered by Joined."""

    KIND = 2
    MOST = 1 << 20
    model: _Text
    geometry: Geometry
    revision: _Text
    config_digest: _Bytes
    quantisation: _Text
    kv_scales: _Text
    draft: _Text
    tenant: _Text
    shards: Annotated[int, msgspec.Meta(ge=1, le=0xFFFF)]
    stages: Annotated[int, msgspec.Meta(ge=1, le=0xFFFF)]


class Leave(Message):
    """End what Join began, when all that was saved is written down. Answered by Told."""

    KIND = 3
    desk: Number


class Bye(Message):
    """The client closes on purpose. No answer."""

    KIND = 4


class Resume(Message):
    """What of a session still stands after a break, said right after Welcome. No answer.

    plans: ids of those that are out still, as unsigned 64-bit numbers, little-endian. All its other
    plans have ended, of whichever server, and so have all leases, pins and desks that it had.
    """

    KIND = 5
    MOST = 1 << 20
    plans: bytes


# ---- from a client: a cache's calls. desk: the number that Joined gave.


class Match(Message):
    """See Desk.match. Answered by Matched."""

    KIND = 10
    MOST = _PROMPT
    desk: Number
    prompt: Prompt
    counted: bool = True


class Lease(Message):
    """See Desk.lease; tokens: of the match. Answered by Leased."""

    KIND = 11
    MOST = _PROMPT
    desk: Number
    prompt: Prompt
    tokens: Number
    first: Chunks
    seconds: Seconds


class Fetch(Message):
    """See Desk.fetch; tokens, known, unknown: of the match. Answered by Leased when it is there."""

    KIND = 12
    MOST = _PROMPT
    desk: Number
    prompt: Prompt
    tokens: Number
    known: Chunks
    unknown: bool
    first: Chunks
    within: Seconds
    hold: Seconds
    pin: bool


class Prefetch(Message):
    """See Desk.prefetch. Answered by Count, of tokens."""

    KIND = 13
    MOST = _PROMPT
    desk: Number
    prompt: Prompt
    tokens: Number
    known: Chunks
    unknown: bool
    within: Seconds


class Release(Message):
    """End a lease. No answer."""

    KIND = 14
    lease: Number


class Renew(Message):
    """Move a lease's deadline. Answered by Told."""

    KIND = 15
    lease: Number
    seconds: Seconds


class Issue(Message):
    """A plan of this lease goes out. Answered by Count: the plan's id, 0 when it has ended."""

    KIND = 16
    desk: Number
    lease: Number


class Reserve(Message):
    """See Desk.reserve. Answered by Reserved.

    places: for each chunk from `first` on, positions of its parts; None for all of all chunks.
    kept: for each chunk of the prompt its priority, and seconds (infinite for no end); or none.
    """

    KIND = 17
    MOST = _SAVE
    desk: Number
    prompt: Prompt
    first: Chunks
    places: Annotated[list[_Places], msgspec.Meta(max_length=MOST_CHUNKS)] | None
    kept: Annotated[list[tuple[_Priority, float]], msgspec.Meta(max_length=MOST_CHUNKS)]


class Settle(Message):
    """A plan's copies have ended everywhere. No answer. ok: whether what it saved is whole."""

    KIND = 18
    plan: Number
    ok: bool


class Ended(Message):
    """From a worker: this plan's copies have ended here, or will never begin. No answer."""

    KIND = 19
    plan: Number


class Loaded(Message):
    """See Desk.loaded. No answer."""

    KIND = 20
    MOST = _PROMPT
    desk: Number
    prompt: Prompt
    tiers: Annotated[dict[Short, Number], msgspec.Meta(max_length=_MOST_TIERS)]
    first: Chunks


# ---- from a client: what an operator asks


class Invalidate(Message):
    """See Desk.invalidate. Answered by Removed."""

    KIND = 30
    MOST = _PROMPT
    desk: Number
    prompt: Prompt
    first: Chunks
    timeout: Seconds


class Purge(Message):
    """See Desk.purge. Answered by any number of Progress, then Removed."""

    KIND = 31
    desk: Number
    digest: _Digest
    timeout: Seconds


class Clear(Message):
    """See Desk.clear. Answered by Told: whether it ended in time."""

    KIND = 32
    desk: Number
    tier: Short
    timeout: Seconds


class Flush(Message):
    """See Desk.flush. Answered by Told."""

    KIND = 33
    desk: Number
    timeout: Seconds


class Explain(Message):
    """See Desk.explain. Answered by Explained."""

    KIND = 34
    MOST = _PROMPT
    desk: Number
    prompt: Prompt


class Figures(Message):
    """All metrics. Answered by Answer."""

    KIND = 35


class Bypass(Message):
    """Let the namespace go without its cache, or not; None asks. Answered by Told."""

    KIND = 36
    desk: Number
    on: bool | None


class Unpin(Message):
    """End the pins of this cache. Answered by Told."""

    KIND = 37
    desk: Number


class Health(Message):
    """See Desk.health. Answered by Healthy."""

    KIND = 38
