"""One client of a soak: it saves and loads prompts, and checks each byte that it gets.

The KV of a block is a pattern of all tokens up to its end, so that whatever else lands there is
seen. What a client has done and seen stands on a Board that outlives it.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvtier
from kvtier.copyplan import CopyPlan
from kvtier.device.base import Role
from kvtier.device.cpu import CpuDevice
from kvtier.errors import ConfigError, KvtierError
from kvtier.prefix import Prefix
from kvtier.transfer import CopyResult, CopyStatus

BLOCK: Final = 16
CHUNK: Final = 64
_LAYERS, _HEADS, _SIZE = 2, 2, 32
GEOMETRY: Final = kvtier.Geometry(
    (kvtier.Component(layers=_LAYERS, heads=_HEADS, head_size=_SIZE),),
    block_tokens=(BLOCK,),
    chunk_tokens=CHUNK,
)
CHUNK_BYTES: Final = GEOMETRY.bytes_per_token * CHUNK
NAMESPACE: Final = kvtier.Namespace("soak", GEOMETRY)

_MOST_CHUNKS: Final = 12  # of a prompt
_FAMILIES: Final = 48  # prompts at a time; all clients have the same
_EPOCH_SECONDS: Final = 5.0  # then others follow
_PLANES: Final = 2 * _LAYERS
_WORDS: Final = BLOCK * _HEADS * _SIZE * 2 // 8  # of 8 bytes, of one block in one plane
_BASE: Final = (
    np.arange(_PLANES * _WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
).reshape(_PLANES, 1, _WORDS)
_ODD: Final = np.uint64(0xD1B54A32D192ED03)

LEASE_SECONDS: Final = 0.5
_FETCH_SECONDS: Final = 2.0
_COPY_SECONDS: Final = 10.0
_THINK_SECONDS: Final = 0.25


class Row(enum.IntEnum):
    """What a board has of each client."""

    LOADS = 0
    SAVES = 1
    CHECKED_BYTES = 2
    WRONG_BYTES = 3
    ERRORS = 4
    STALLED_COPIES = 5
    BEGUN_NS = 6  # when it began what it does now, 0 when it pauses
    ANSWERED_NS = 7  # when it last got a plan
    MISSES = 8
    STOP = 9
    UNOPENED = 10


class Board:
    """Numbers [clients, fields] in a file that all processes of a soak have mapped."""

    def __init__(self, path: Path, clients: int) -> None:
        path.touch(0o600)
        size = 8 * clients * len(Row)
        if path.stat().st_size != size:
            os.truncate(path, size)
        self.path = path
        self.rows = np.memmap(path, np.int64, "r+", shape=(clients, len(Row)))

    def sum(self, field: Row) -> int:
        """Add up what all clients have in a field."""
        return int(self.rows[:, field].sum())


def prompt(family: int, chunks: int) -> NDArray[np.int32]:
    """Return the tokens of a prompt of whole chunks and one token more.

    Families come in fours that share three chunks.
    """
    tokens = np.random.default_rng(family).integers(0, 30_000, _MOST_CHUNKS * CHUNK + 1)
    head = np.random.default_rng([family // 4, 1]).integers(0, 30_000, 3 * CHUNK)
    tokens[: len(head)] = head
    return tokens[: chunks * CHUNK + 1].astype(np.int32)


def pattern(tokens: NDArray[np.int32], blocks: int) -> NDArray[np.uint64]:
    """Return the KV of a prompt's first blocks, [planes, blocks, words of 8 bytes]."""
    used = tokens[: blocks * BLOCK].astype(np.uint64) + np.uint64(1)
    places = np.arange(1, len(used) + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    sums = np.cumsum(used * (places | np.uint64(1)))[BLOCK - 1 :: BLOCK]
    return _BASE + (sums * _ODD)[None, :, None]


class Client:
    """A small engine without a model, on a cache.

    row: of its board. stalls: of copies, one in so many is queued, and the process stopped until
    somebody else continues it; 0 for none.
    """

    def __init__(
        self, cache: kvtier.Cache, row: NDArray[np.int64], random: Random, stalls: int = 0
    ) -> None:
        self._cache = cache
        self._row = row
        self._random = random
        self._stalls = stalls
        blocks = _MOST_CHUNKS * CHUNK // BLOCK
        self._kv = np.zeros((_PLANES, 2 * blocks, _WORDS), np.uint64)
        shaped = self._kv.view(np.uint16).reshape(_LAYERS, 2, 2 * blocks, BLOCK, _HEADS, _SIZE)
        self._device = CpuDevice()
        self._pages = cache.bind(shaped, self._device)
        self._half = blocks

    def step(self) -> None:
        """Ask for one prompt; load what there is of it, and save the rest."""
        chunks = self._random.randint(1, _MOST_CHUNKS)
        epoch = int(time.monotonic() // _EPOCH_SECONDS) - self._random.randrange(2)
        tokens = prompt(epoch * _FAMILIES + self._random.randrange(_FAMILIES), chunks)
        prefix = self._cache.prefix(tokens)
        loaded = self._load(prefix)
        if loaded < chunks:
            self._save(prefix, loaded)

    def close(self) -> None:
        """Close cache and device."""
        self._cache.close()
        self._device.close()

    def _load(self, prefix: Prefix) -> int:
        """Load what can be found; return how many chunks. All of it is checked."""
        match = self._cache.match(prefix)
        if not match.tokens:
            self._row[Row.MISSES] += 1
            return 0
        lease = self._cache.lease(match, deadline=LEASE_SECONDS)
        if lease is None:
            fetch = self._cache.fetch(match, timeout=_FETCH_SECONDS, deadline=LEASE_SECONDS)
            lease = fetch.result(_FETCH_SECONDS)
            if lease is None:
                fetch.abandon()
                return 0
        with lease:
            blocks = -(-lease.tokens // BLOCK)
            plan = self._cache.plan_load(lease, list(range(blocks)))
            if plan is None:
                return 0
            self._kv[:, :blocks] = 0xABABABABABABABAB
            result = self._copy(plan, "load")
        if result.status is not CopyStatus.OK:
            return 0
        self._check(prefix.tokens, result.tokens // BLOCK)
        self._row[Row.LOADS] += 1
        return result.tokens // CHUNK

    def _check(self, tokens: NDArray[np.int32], blocks: int) -> None:
        found = self._kv[:, :blocks]
        differs = found != pattern(tokens, blocks)
        self._row[Row.CHECKED_BYTES] += found.nbytes
        if differs.any():
            self._row[Row.WRONG_BYTES] += 8 * int(np.count_nonzero(differs))
            which = np.flatnonzero(differs.any((0, 2))).tolist()
            _say(f"wrong bytes in blocks {which} of {blocks}")

    def _save(self, prefix: Prefix, first: int) -> None:
        """Save a prompt's chunks from `first` on; they are computed once there is room for them."""
        count = len(prefix.names) * CHUNK // BLOCK
        blocks = list(range(self._half, self._half + count))
        plan = self._cache.plan_save(prefix, blocks, first=first)
        if plan is not None:
            self._kv[:, self._half : self._half + count] = pattern(prefix.tokens, count)
            result = self._copy(plan, "store")
            self._row[Row.SAVES] += result.status is CopyStatus.OK

    def _copy(self, plan: CopyPlan, role: Role) -> CopyResult:
        """Execute a plan to its end, and settle it. Sometimes the process stands still before."""
        self._row[Row.ANSWERED_NS] = time.monotonic_ns()
        gate = threading.Event()
        stall = self._stalls and self._random.randrange(self._stalls) == 0
        if stall:
            self._device.stream(role).enqueue(lambda: _wait(gate))
        try:
            transfer = self._pages.execute(plan, ())
        except KvtierError as error:  # the arena has gone since: nothing was copied
            gate.set()
            result = CopyResult(CopyStatus.FAILED, cause=str(error))
        else:
            if stall:
                self._row[Row.STALLED_COPIES] += 1
                os.kill(os.getpid(), signal.SIGSTOP)
            gate.set()
            result = transfer.result(_COPY_SECONDS)
        self._cache.settle(plan, result)
        return result


def _wait(gate: threading.Event) -> None:
    gate.wait(_COPY_SECONDS)


def _say(text: str) -> None:
    sys.stderr.write(f"client {os.getpid()}: {text}\n")
    sys.stderr.flush()


def client(url: str, board: Board, number: int, seed: int, stalls: int) -> None:
    """Be one client, until its board says that it is to stop. For a process of its own."""
    row = board.rows[number]
    random = Random(seed)
    row[Row.BEGUN_NS] = time.monotonic_ns()
    try:
        try:
            cache = kvtier.open(url, namespace=NAMESPACE)
        except ConfigError as error:  # in ten seconds it found no daemon that lived long enough
            row[Row.UNOPENED] += 1
            _say(str(error))
            return
        one = Client(cache, row, random, stalls)
        while not row[Row.STOP]:
            row[Row.BEGUN_NS] = time.monotonic_ns()
            one.step()
            row[Row.BEGUN_NS] = 0
            time.sleep(random.random() * _THINK_SECONDS)
        row[Row.BEGUN_NS] = time.monotonic_ns()
        one.close()
    except Exception:
        row[Row.ERRORS] += 1
        _say(traceback.format_exc())
        raise
    finally:
        row[Row.BEGUN_NS] = 0
