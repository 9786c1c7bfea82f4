"""ChunkKeys: the names of a prompt's chunks, each a hash of everything that its KV depends on.

``key[i] = sha256(key[i-1] || tokens of chunk i as little-endian int32 || extra)``, with
``key[-1]`` the root of namespace, adapter and salt. ``extra`` holds the spans (images,
embeddings) that overlap the chunk, with their place in it, and nothing for plain text: a text
before an image keeps its keys. An incomplete last chunk has no key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import MisuseError
from kvtier.identity.namespace import Span

__all__ = ["TokenIds", "as_tokens", "chunk_keys"]

TokenIds = Sequence[int] | NDArray[np.integer]
"""Token ids: a list, a tuple, or a one-dimensional integer array of numpy or (CPU) torch."""

_SPAN: Final = struct.Struct("<qqQ")
_MAX_TOKEN: Final = 2**31 - 1


def as_tokens(tokens: TokenIds) -> NDArray[np.int32]:
    """Return token ids as a contiguous int32 array [n]; an int32 array is not copied.

    Raises MisuseError for anything but whole numbers from 0 to 2**31 - 1 in one dimension.
    """
    array = np.asarray(tokens)
    if array.dtype == np.int32 and array.ndim == 1:
        if array.size and array.min() < 0:
            raise MisuseError("a token id is negative")
        return np.ascontiguousarray(array)
    if array.ndim != 1:
        raise MisuseError(f"token ids must have one dimension, not {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise MisuseError(f"token ids must be integers, not {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > _MAX_TOKEN:
        raise MisuseError(f"a token id lies outside 0..{_MAX_TOKEN}")
    return array.astype(np.int32)


def chunk_keys(
    root: bytes,
    tokens: NDArray[np.int32],
    chunk_tokens: int,
    spans: Sequence[Span] = (),
    *,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the 32-byte key of each complete chunk of `tokens`.

    root: from ``root_key``. known: keys of the first chunks, from an earlier call with a prefix
    of these tokens; only what follows them is hashed.
    """
    keys = list(known)
    parent = keys[-1] if keys else root
    data = memoryview(tokens.astype("<i4", copy=False).data).cast("B")
    width = chunk_tokens * 4
    for index in range(len(keys), len(tokens) // chunk_tokens):
        digest = hashlib.sha256(parent)
        digest.update(data[index * width : (index + 1) * width])
        if spans:
            digest.update(_extra(spans, index * chunk_tokens, chunk_tokens))
        parent = digest.digest()
        keys.append(parent)
    return keys


def _extra(spans: Sequence[Span], start: int, count: int) -> bytes:
    """Encode the spans that overlap tokens [start, start + count), in order of their place."""
    inside = sorted(
        (span.start - start, span.stop - start, span.digest)
        for span in spans
        if span.start < start + count and span.stop > start
    )
    return b"".join(_SPAN.pack(first, last, len(digest)) + digest for first, last, digest in inside)
