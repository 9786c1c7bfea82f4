"""What the benchmark's process and those of its arms say to each other: JSON, one line each.

Every request has one answer: the reply named after it, or ``Failed``.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvtier.bench.recorded import Asked
from kvtier.bench.workloads import Conversation, Group, LongDoc, MultiTurn, NoReuse, SharedPrefix


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class LoadModel(_Message, frozen=True):
    """Load a model: ``smollm2``, ``random``, or the path of a GGUF file; in vLLM, of a folder.

    folder: where all arms find a model that one of them has to make. seconds_per_token: of an
    engine that is a clock; None: one that computes.
    """

    model: str
    chunk_tokens: int
    folder: str = ""
    seconds_per_token: float | None = None


class ModelLoaded(_Message, frozen=True):
    """sha256: of the weights' file; empty where there is none. engine: what serves it."""

    name: str
    sha256: str
    context_tokens: int
    bytes_per_token: int
    engine: str = ""


class Build(_Message, frozen=True):
    """Make the prompts of a workload."""

    shape: SharedPrefix | MultiTurn | NoReuse | LongDoc
    seed: int
    chunk_tokens: int


class Built(_Message, frozen=True):
    """The prompts; the fields of the other workloads stay empty."""

    groups: list[Group] = []
    conversations: list[Conversation] = []
    prompts: list[list[int]] = []


class Open(_Message, frozen=True):
    """Make an engine for sequences of `tokens` and, if there are tiers, a cache below it.

    chaos: seed of a chaos device, checked for races, between the two. device: where both are.
    spare: with a few blocks more than that takes; else what the engine keeps of ended requests
    has no more room than this.
    """

    tokens: int
    prefix_cache: bool
    tiers: list[str]
    chaos: int | None = None
    device: str = "cpu"
    spare: bool = True


class Empty(_Message, frozen=True):
    """Empty tiers by name, and the engine's prefix cache with them unless it is kept."""

    tiers: list[str]
    keeps_hbm: bool = False


class Serve(_Message, frozen=True):
    """Serve one prompt, then wait until everything that was saved is written down."""

    tokens: list[int]
    output_len: int


class Served(_Message, frozen=True):
    """One request's outcome.

    tpot_s: None for one output token. hits: prompt tokens by tier. read_bytes: what the kernel
    counted that this process read from block devices meanwhile. fetched: what the cache says
    that it read from its tiers, as bytes by tier.
    """

    tokens: list[int]
    ttft_s: float
    tpot_s: float | None
    hits: Mapping[str, int]
    recomputed: int
    read_bytes: int
    fetched: Mapping[str, int]


class Replay(_Message, frozen=True):
    """Serve requests as they arrive, then wait until everything that was saved is written down.

    block_tokens, seed: what their tokens are made with.
    """

    asked: list[Asked]
    block_tokens: int
    seed: int


class Replayed(_Message, frozen=True):
    """served: in the order of arrival; what was read is counted over all of them, in the last.

    seconds: from the first arrival to the last token.
    """

    served: list[Served]
    seconds: float


class Plain(_Message, frozen=True):
    """Compute a prompt in plain torch, without pool and tiles."""

    tokens: list[int]


class PlainTook(_Message, frozen=True):
    """Seconds until its last logits."""

    seconds: float


class Done(_Message, frozen=True):
    """It is done."""


class Failed(_Message, frozen=True):
    """It could not be done, for a reason that the user can change."""

    error: str


Request = LoadModel | Build | Open | Empty | Serve | Replay | Plain
Reply = ModelLoaded | Built | Done | Served | Replayed | PlainTook | Failed
