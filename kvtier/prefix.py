"""Prefix: a prompt's tokens with the names of the parts of its complete chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.catalog.catalog import Part
from kvtier.identity.keys import TokenIds, as_tokens, chunk_keys
from kvtier.identity.namespace import Namespace, Request, root_key
from kvtier.identity.record import Part as PartName
from kvtier.identity.record import RecordId, record_id

__all__ = ["Namer", "Prefix"]

_PLAIN: Final = Request()


@dataclass(frozen=True, slots=True)
class Prefix:
    """tokens: int32 [n]. keys: of the complete chunks; names: for each, of its parts.

    nbytes: raw bytes of each part of a chunk.
    """

    tokens: NDArray[np.int32]
    keys: list[bytes]
    names: list[tuple[RecordId, ...]]
    nbytes: tuple[int, ...]
    request: Request

    def parts(self, first: int, stop: int | None = None) -> list[tuple[Part, ...]]:
        """Return the parts of chunks [first, stop), each with its parent's name."""
        orphan: tuple[RecordId | None, ...] = (None,) * len(self.nbytes)
        return [
            tuple(
                Part(name, above, depth, size)
                for name, above, size in zip(
                    self.names[depth],
                    self.names[depth - 1] if depth else orphan,
                    self.nbytes,
                    strict=True,
                )
            )
            for depth in range(first, len(self.names) if stop is None else stop)
        ]

    def head(self, tokens: NDArray[np.int32], chunks: int) -> Prefix:
        """Return the first `chunks` chunks, as the prefix of `tokens`."""
        return Prefix(tokens, self.keys[:chunks], self.names[:chunks], self.nbytes, self.request)


class Namer:
    """Names prompts' parts for one namespace and one number of shards."""

    def __init__(self, namespace: Namespace, shards: int) -> None:
        geometry = namespace.geometry
        self._namespace = namespace
        self._chunk_tokens = geometry.chunk_tokens
        self.names = tuple(
            PartName(component, shard, shards)
            for component in range(len(geometry.components))
            for shard in range(shards)
        )
        self.nbytes = tuple(geometry.part_bytes(name) for name in self.names)
        self._suffixes = tuple(record_id(b"", name) for name in self.names)

    def prefix(self, tokens: TokenIds, request: Request | None, known: Prefix | None) -> Prefix:
        """Name a prompt; what `known`, an earlier state of it, has is not hashed again.

        A `known` of another request identity is not used: its keys are another adapter's.
        """
        ids = as_tokens(tokens)
        request = request or (known.request if known else _PLAIN)
        if known is not None and known.request != request:
            known = None
        root = root_key(self._namespace, request)
        keys = chunk_keys(
            root, ids, self._chunk_tokens, request.spans, known=known.keys if known else ()
        )
        # A column for each part, so that one long prompt costs one comprehension.
        columns = [[key + suffix for key in keys] for suffix in self._suffixes]
        return Prefix(ids, keys, list(zip(*columns, strict=True)), self.nbytes, request)
