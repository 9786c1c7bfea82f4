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

TokenIds = Sequence[int] | NDArray[np.integer]
"""Token ids: a list, a tuple, or a one-dimensional integer array of numpy or (CPU) torch."""

_SPAN: Final = struct.Struct("<qqQ")
_MAX_TOKEN: Final = 2**31 - 1


def as_tokens(tokens: TokenIds) -> NDArray[np.int32]:
    """Return token ids as a contiguous int32 array [n]; an int32 array is not copied.

    Raises MisuseError for anything but whole numbers from 0 to 2**31 - 1 in one dimension.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged; a tensor of another device
        raise MisuseError(f"not token ids: {error}") from error
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
    of these tokens; only what follows them is hashed. Raises MisuseError when there are more of
    them than complete chunks.
    """
    keys = list(known)
    if len(keys) > len(tokens) // chunk_tokens:
        raise MisuseError(f"{len(keys)} known keys are more than {len(tokens)} tokens have")
    parent = keys[-1] if keys else root
    data = memoryview(tokens.astype("<i4", copy=False).data).cast("B")
    width = chunk_tokens * 4
    fresh = range(len(keys), len(tokens) // chunk_tokens)
    extra = _extra(spans, fresh, chunk_tokens)
    for index in fresh:
        digest = hashlib.sha256(parent)
        digest.update(data[index * width : (index + 1) * width])
        if index in extra:
            digest.update(extra[index])
        parent = digest.digest()
        keys.append(parent)
    return keys


def _extra(spans: Sequence[Span], chunks: range, chunk_tokens: int) -> dict[int, bytes]:
    """Encode for each chunk the spans that overlap it, in order of their place."""
    inside: dict[int, list[tuple[int, int, bytes]]] = {}
    for span in spans:
        first = max(span.start // chunk_tokens, chunks.start)
        last = min(-(-span.stop // chunk_tokens), chunks.stop)
        for index in range(first, last):
            at = index * chunk_tokens
            inside.setdefault(index, []).append((span.start - at, span.stop - at, span.digest))
    return {
        index: b"".join(
            _SPAN.pack(start, stop, len(digest)) + digest for start, stop, digest in sorted(places)
        )
        for index, places in inside.items()
    }
