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
    """tokens: int32 [n]. keys: of the complete chunks; parts: those of each chunk."""

    tokens: NDArray[np.int32]
    keys: list[bytes]
    parts: list[tuple[Part, ...]]
    request: Request


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
        parts = list(known.parts) if known else []
        above: list[RecordId | None] = [None] * len(self.names)
        if parts:
            above = [part.name for part in parts[-1]]
        for depth in range(len(parts), len(keys)):
            names = [record_id(keys[depth], name) for name in self.names]
            rows = zip(names, above, self.nbytes, strict=True)
            parts.append(tuple(Part(name, up, depth, nbytes) for name, up, nbytes in rows))
            above = list(names)
        return Prefix(ids, keys, parts, request)
