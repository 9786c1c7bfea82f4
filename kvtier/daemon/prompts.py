"""Prompts: the keys that clients have sent, remembered, so that they are sent and named once."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.daemon.messages import Prompt
from kvtier.errors import MisuseError, ProtocolError
from kvtier.identity.namespace import Request
from kvtier.identity.record import KEY_BYTES, RECORD_ID_BYTES, RecordId, record_id
from kvtier.identity.shape import Shape
from kvtier.prefix import Prefix

MOST_NAMES: Final = 1 << 18
"""Parts that one prompt may have: more would keep the daemon from all others for too long."""

_PROMPTS: Final = 256  # of a session
_SESSION_BYTES: Final = 32 << 20
_ALL_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 96  # CPython 3.11: a tuple, its place in a list, and the key as it came
_NAME_BYTES: Final = 88  # a name of 42 bytes as an object, and its place in a tuple
_LIGHT: Final = 4096  # names
_TOKEN: Final = np.zeros(1, np.int32)
_NAME: Final = np.dtype((np.void, RECORD_ID_BYTES))
_PLAIN: Final = Request()


def weight(prefix: Prefix) -> int:
    """Return what a prompt counts for while something is under way with it: mostly one."""
    return 1 + len(prefix.names) * len(prefix.shape.names) // _LIGHT


class _Named(NamedTuple):
    keys: bytes
    names: list[tuple[RecordId, ...]]
    nbytes: int


class Recall:
    """What is remembered of all sessions: 256 MiB at most, less of who has most."""

    def __init__(self, most: int = _ALL_BYTES) -> None:
        self._most = most
        self._sessions: dict[bytes, Prompts] = {}
        self.nbytes = 0

    def of(self, session: bytes) -> Prompts:
        """Return the prompts of a session."""
        return self._sessions.setdefault(session, Prompts(self))

    def forget(self, session: bytes) -> None:
        """Forget all prompts of a session."""
        prompts = self._sessions.pop(session, None)
        if prompts is not None:
            prompts.clear()

    def trim(self) -> None:
        """Forget until the bytes are within the limit."""
        while self.nbytes > self._most:
            max(self._sessions.values(), key=lambda prompts: prompts.nbytes).shrink()


class Prompts:
    """Those of one session, 256 and 32 MiB at most; what was used longest ago goes first."""

    def __init__(self, recall: Recall) -> None:
        self.nbytes = 0
        self._recall = recall
        self._named: OrderedDict[tuple[int, int, bytes], _Named] = OrderedDict()

    def prefix(self, desk: int, shape: Shape, owner: int, prompt: Prompt) -> Prefix | None:
        """Return a prompt of a desk as a Prefix; None when its keys have to be sent.

        Its tokens are zeros that take no memory, and its keys are in the names only.
        Raises ProtocolError for what cannot be a prompt, and MisuseError for one of too many parts.
        """
        chunks, size = prompt.chunks, shape.chunk_tokens
        if not chunks * size <= prompt.tokens < (chunks + 1) * size:
            raise ProtocolError(f"{prompt.tokens} tokens have not {chunks} chunks of {size}")
        if prompt.keys:
            _check_keys(prompt)
        place = (desk, chunks, prompt.last)
        known = self._named.get(place)
        if known is not None and prompt.keys and known.keys != prompt.keys:
            self._forget(place)
            known = None
        if known is not None:
            self._named.move_to_end(place)
            names = known.names
        elif prompt.keys or not chunks:
            names = _names(shape, prompt.keys)
            self._remember(place, prompt.keys, names, len(shape.names))
        else:
            return None
        return Prefix(_zeros(prompt.tokens), [], names, shape, _PLAIN, owner)

    def clear(self) -> None:
        """Forget all."""
        while self._named:
            self.shrink()

    def shrink(self) -> None:
        """Forget the one that was used longest ago."""
        self._forget(next(iter(self._named)))

    def _remember(
        self,
        place: tuple[int, int, bytes],
        keys: bytes,
        names: list[tuple[RecordId, ...]],
        parts: int,
    ) -> None:
        nbytes = len(names) * (_CHUNK_BYTES + parts * _NAME_BYTES)
        if not names or nbytes > _SESSION_BYTES:
            return
        while len(self._named) >= _PROMPTS or self.nbytes + nbytes > _SESSION_BYTES:
            self.shrink()
        self._named[place] = _Named(keys, names, nbytes)
        self.nbytes += nbytes
        self._recall.nbytes += nbytes
        self._recall.trim()

    def _forget(self, place: tuple[int, int, bytes]) -> None:
        nbytes = self._named.pop(place).nbytes
        self.nbytes -= nbytes
        self._recall.nbytes -= nbytes


@functools.lru_cache(1024)
def _zeros(count: int) -> NDArray[np.int32]:
    """Return so many tokens, which take the memory of one."""
    return np.broadcast_to(_TOKEN, (count,))


def _check_keys(prompt: Prompt) -> None:
    """Refuse keys that are not those of so many chunks."""
    if len(prompt.keys) != prompt.chunks * KEY_BYTES or prompt.keys[-KEY_BYTES:] != prompt.last:
        raise ProtocolError(f"{len(prompt.keys)} bytes are not the keys of {prompt.chunks} chunks")


def _names(shape: Shape, keys: bytes) -> list[tuple[RecordId, ...]]:
    """Name the parts of all chunks."""
    count = len(keys) // KEY_BYTES
    if count * len(shape.names) > MOST_NAMES:
        raise MisuseError(
            f"a prompt of {count} chunks of {len(shape.names)} parts each; the daemon takes "
            f"{MOST_NAMES} parts of a prompt at most"
        )
    whole = np.empty((count, RECORD_ID_BYTES), np.uint8)
    whole[:, :KEY_BYTES] = np.frombuffer(keys, np.uint8).reshape(count, KEY_BYTES)
    columns = []
    for part in shape.names:
        whole[:, KEY_BYTES:] = np.frombuffer(record_id(b"", part), np.uint8)
        columns.append(whole.view(_NAME).ravel().tolist())  # a slice each takes twice as long
    if len(set(columns[0])) < count:  # of the names: what looks them up needs their hashes too
        raise ProtocolError("two chunks of a prompt have one key")
    return list(zip(*columns, strict=True))
