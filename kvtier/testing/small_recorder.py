"""Recorders for tests: of a folder, by a clock that goes on when told."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.identity.shape import chunk_shape
from kvtier.metrics import Metrics
from kvtier.prefix import Namer, Prefix
from kvtier.recorder import Recorder, Recording
from kvtier.testing.hands import Hands
from kvtier.testing.toy import CHUNK, GEOMETRY, NAMESPACE

SALT: Final = bytes(range(16))
"""Of all recordings that are not told another."""

_NAMER: Final = Namer(NAMESPACE, chunk_shape(GEOMETRY, 1, 1))
_SECONDS: Final = 30.0


@contextlib.contextmanager
def recorders(folder: Path, clock: Hands) -> Iterator[Callable[..., Recorder]]:
    """Return what starts a recorder of ``r.jsonl`` there; they are closed at the end."""
    running: list[Recorder] = []

    def start(
        path: Path = folder / "r.jsonl",
        most: int = 1 << 16,
        salt: bytes = SALT,
        when: Callable[[], float] = clock,
    ) -> Recorder:
        running.append(Recorder(Recording(str(path), most, salt), None, Metrics(), when, 1000.0))
        return running[-1]

    yield start
    for one in running:
        one.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what a recording has."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(number: int, chunks: int = 1, more: int = 0) -> Prefix:
    """Return a prompt; its chunks are those of no other number."""
    tokens = np.full(chunks * CHUNK + more, number % 1000, np.int32)
    tokens[0] = number // 1000
    return _NAMER.prefix(tokens, None, None)


def written(recorder: Recorder, requests: int) -> None:
    """Wait until so many are written, or lost."""
    count = recorder._metrics.get
    until = time.monotonic() + _SECONDS
    while count("recorded_requests") + count("unrecorded_requests") < requests:
        assert time.monotonic() < until
        time.sleep(0.01)
