"""A cache of tiny chunks, for benchmarks of what calls take and not of bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import kvtier
from kvtier.transfer import CopyResult, CopyStatus

BLOCK = 16
MOST_CHUNKS = 4096
TINY = kvtier.Namespace(
    "small", kvtier.Geometry((kvtier.Component(1, 1, 1),), "int8", (BLOCK,), BLOCK)
)
WIDE = kvtier.Namespace(
    "wide", kvtier.Geometry((kvtier.Component(1, 8, 64),), "int8", (BLOCK,), BLOCK)
)

Found = dict[str, list[float]]


def note(found: Found, name: str, value: float) -> None:
    """Keep one value of a figure."""
    found.setdefault(name, []).append(value)


@contextlib.contextmanager
def opened(*urls: str, namespace: kvtier.Namespace = TINY) -> Iterator[kvtier.Cache]:
    """Open a cache with room for a few prompts."""
    cache = kvtier.open(f"dram:{MOST_CHUNKS * 4096}B", *urls, namespace=namespace)
    try:
        yield cache
    finally:
        cache.close()


def saved(cache: kvtier.Cache, tokens: Any) -> None:
    """Save a prompt, of whatever bytes its slots have; it is written down in the background."""
    chunks = len(tokens) // BLOCK
    cache.settle(
        cache.plan_save(cache.prefix(tokens), list(range(chunks))), CopyResult(CopyStatus.OK)
    )


def save(cache: kvtier.Cache, tokens: Any) -> None:
    """Save a prompt, and wait until it is written down."""
    saved(cache, tokens)
    if not cache.flush(timeout=60):
        raise SystemExit("the prompt was not written down")
