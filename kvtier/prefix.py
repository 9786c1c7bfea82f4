"""Prefix: a prompt's tokens with the names of the parts of its complete chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.catalog.catalog import Part
from kvtier.checks import check_kind
from kvtier.errors import MisuseError
from kvtier.identity.keys import TokenIds, as_tokens, chunk_keys
from kvtier.identity.namespace import Namespace, Request, root_key
from kvtier.identity.record import RecordId, record_id
from kvtier.identity.shape import NO_PARENT, Shape
from kvtier.retention import Term

_PLAIN: Final = Request()
_USUAL: Final = Term()


@dataclass(frozen=True, slots=True)
class Prefix:
    """tokens: int32 [n]. keys: of the complete chunks; names: for each, of its parts.

    shape: of a chunk; owner: the namespace, as the catalog numbers it.
    """

    tokens: NDArray[np.int32]
    keys: list[bytes]
    names: list[tuple[RecordId, ...]]
    shape: Shape
    request: Request
    owner: int = 0

    @property
    def limit(self) -> int:
        """Tokens of it that can be loaded: whole blocks, and the last token is computed."""
        block = self.shape.block_tokens
        return max(len(self.tokens) - 1, 0) // block * block

    def agrees(self, tokens: NDArray[np.int32]) -> bool:
        """Say whether these tokens and its own are the same, as far as both go."""
        both = min(len(self.tokens), len(tokens))
        return bool(np.array_equal(self.tokens[:both], tokens[:both]))

    def part(self, chunk: int, at: int, term: Term = _USUAL) -> Part:
        """Return the part at a position of a chunk, with its parent's name.

        term: its priority, and for how long it is kept.
        """
        shape = self.shape
        above = shape.above[at]
        parent = self.names[chunk - 1][above] if chunk and above != NO_PARENT else None
        return Part(self.names[chunk][at], parent, chunk, shape.nbytes[at], self.owner, *term)

    def parts(self, first: int, stop: int | None = None) -> list[tuple[Part, ...]]:
        """Return the parts of chunks [first, stop)."""
        chunks = range(first, len(self.names) if stop is None else stop)
        places = range(len(self.shape.names))
        return [tuple(self.part(chunk, at) for at in places) for chunk in chunks]

    def outgrown(self, first: int) -> list[RecordId]:
        """Return the parts that windows left behind as the prefix grew from `first` chunks."""
        size = self.shape.chunk_tokens
        end = len(self.names) * size
        return [
            self.names[chunk][at]
            for at, window in self.shape.windows
            for chunk in range(max(first * size - window, 0) // size, (end - window) // size)
        ]

    def head(self, tokens: NDArray[np.int32], chunks: int) -> Prefix:
        """Return the first `chunks` chunks, as the prefix of `tokens`."""
        names = self.names[:chunks]
        return Prefix(tokens, self.keys[:chunks], names, self.shape, self.request, self.owner)


class Namer:
    """Names prompts' parts for one namespace, the shape of its chunks, and its number."""

    def __init__(self, namespace: Namespace, shape: Shape, owner: int = 0) -> None:
        self.shape = shape
        self.owner = owner
        self._namespace = namespace
        self._suffixes = tuple(record_id(b"", name) for name in shape.names)

    def prefix(self, tokens: TokenIds, request: Request | None, known: Prefix | None) -> Prefix:
        """Name a prompt; what `known`, an earlier state of it, has is not hashed again.

        A `known` of another request identity is not used: its keys are another adapter's.
        """
        ids = as_tokens(tokens)
        if request is not None:
            check_kind("what tells requests apart", request, Request)
        if known is not None:
            self._check_known(known, ids)
        request = request or (known.request if known else _PLAIN)
        if known is not None and known.request != request:
            known = None
        root = root_key(self._namespace, request)
        size = self.shape.chunk_tokens
        keys = chunk_keys(root, ids, size, request.spans, known=known.keys if known else ())
        # A column for each part, so that one long prompt costs one comprehension.
        columns = [[key + suffix for key in keys] for suffix in self._suffixes]
        return Prefix(ids, keys, list(zip(*columns, strict=True)), self.shape, request, self.owner)

    def _check_known(self, known: Prefix, ids: NDArray[np.int32]) -> None:
        """Refuse keys that are another prompt's, or another namespace's: their KV would be used."""
        check_kind("what is known of a prompt", known, Prefix)
        if known.shape is not self.shape:
            raise MisuseError("this prompt was named by another cache; each names its own")
        if not known.agrees(ids):
            raise MisuseError("what is known of this prompt has other tokens; name it from scratch")
