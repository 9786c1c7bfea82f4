"""One message of each kind between a client and a daemon, with every field set."""

from __future__ import annotations

import math
from typing import Final

from kvtier.catalog.explain import ChunkPlace, End, Explanation, PartPlace
from kvtier.daemon import answers, messages
from kvtier.daemon.messages import Message, Prompt
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.memory.arena import Slot
from kvtier.memory.packed import pack_slots

NUMBER: Final = 0x0102030405060708
"""Of the request whose golden frames are kept."""

_KEYS: Final = bytes(range(64))
_SLOTS: Final = pack_slots([Slot(0, 4096, 1), Slot(1 << 40, 1 << 20, (1 << 63) - 1)])
_GEOMETRY: Final = Geometry(
    (
        Component(layers=32, heads=8, head_size=128),
        Component(4, 2, 64, 2, "window", Needs.TRAILING, 1024),
        Component(2, 1, 96, 1, "state", Needs.LAST, replicated=True),
    ),
    dtype="float16",
    block_tokens=(16, 32),
    chunk_tokens=256,
)
_PLACE: Final = PartPlace(
    "window shard 1",
    ("dram", "lmdb"),
    state="saving",
    held=True,
    pinned=True,
    reason="evicted",
    tier="s3",
    seconds=1.5,
)
_EXPLAINED: Final = Explanation(
    300, 256, End(1, "it is in no tier."), (ChunkPlace(0, 0, 256, (_PLACE,)),)
)

PROMPT: Final = Prompt(tokens=600, chunks=2, last=_KEYS[32:], keys=_KEYS)
"""A prompt of two chunks."""

SAMPLES: Final[tuple[Message, ...]] = (
    messages.Hello(bytes(range(16)), "engine-0", "scheduler"),
    messages.Join("model", _GEOMETRY, "main", b"\x01\x02", "fp8", "none", "draft", "tenant", 2, 3),
    messages.Leave(7),
    messages.Bye(),
    messages.Resume(bytes(range(32))),
    messages.Match(7, PROMPT, counted=False),
    messages.Lease(7, PROMPT, 512, 1, 2.5),
    messages.Fetch(7, PROMPT, 512, 2, unknown=True, first=1, within=0.5, hold=2.0, pin=False),
    messages.Prefetch(7, PROMPT, 512, 2, unknown=False, within=0.25),
    messages.Release(9),
    messages.Renew(9, 1.0),
    messages.Issue(7, 9),
    messages.Reserve(7, PROMPT, 1, [[0, 2], []], [(5, 60.0), (-100, math.inf)]),
    messages.Settle(11, ok=True),
    messages.Ended(11),
    messages.Loaded(7, PROMPT, {"dram": 256, "lmdb": 256}, 1),
    messages.Invalidate(7, PROMPT, 1, 5.0),
    messages.Purge(7, bytes(range(32)), 600.0),
    messages.Clear(7, "lmdb", 30.0),
    messages.Flush(7, 20.0),
    messages.Explain(7, PROMPT),
    messages.Figures(),
    messages.Bypass(7, None),
    messages.Unpin(7),
    messages.Health(),
    answers.Welcome(3, 4, 1 << 30, ("dram", "lmdb")),
    answers.Joined(7, 1),
    answers.Matched(512, b"\x00\x01", 2, unknown=True),
    answers.Leased(9, 512, 1, b"\x01", _SLOTS, 2.5),
    answers.Reserved(11, 1, b"\x01\x00\x00\x00" * 2, b"\x00\x00\x00\x00\x02\x00\x00\x00", _SLOTS),
    answers.Count(12),
    answers.Told(value=False),
    answers.Removed(3, 1, ("s3",)),
    answers.Progress(1000),
    answers.Explained(_EXPLAINED),
    answers.Answer({"kvtier_hit_tokens": 512.0}),
    answers.Resend(),
    answers.Failed("MisuseError", "no such desk"),
    answers.Closing(),
    answers.Healthy({"lmdb": "every call hangs"}),
)
"""One of each kind."""
