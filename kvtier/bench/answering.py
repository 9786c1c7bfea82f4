"""An arm's side of its pipes: requests on stdin, answers on stdout, one JSON line each.

See ``messages`` for what they say. It ends when stdin does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from kvtier.bench.messages import Build, Built, Failed, Reply, Request
from kvtier.bench.workloads import (
    Encode,
    LongDoc,
    MultiTurn,
    SharedPrefix,
    conversations,
    distinct_prompts,
    documents,
    shared_prefixes,
)
from kvtier.errors import KvtierError


class Answers(Protocol):
    """What serves prompts in a process of its own."""

    def answer(self, request: Request) -> Reply:
        """Do what a request says. Blocks. Raises KvtierError for what its sender got wrong."""
        ...

    def close(self) -> None:
        """Write down what waits, and let go of everything. Blocks."""
        ...


def answer_all(arm: Answers) -> None:
    """Answer until stdin ends; then end this process."""
    with _own_stdout() as out:
        try:
            for line in _lines():
                out.write(_answer(arm, line) + b"\n")
                out.flush()
        finally:
            arm.close()
    # All is closed. Without this, torch takes a second to come down.
    sys.stderr.flush()
    os._exit(0)


def build(request: Build, encode: Encode) -> Built:
    """Make the prompts of a workload with a model's tokenizer. Raises ConfigError."""
    shape = request.shape
    if isinstance(shape, SharedPrefix):
        groups = shared_prefixes(encode, shape, request.seed, request.chunk_tokens)
        return Built(groups=groups)
    if isinstance(shape, MultiTurn):
        talks = conversations(encode, shape, request.seed, request.chunk_tokens)
        return Built(conversations=talks)
    if isinstance(shape, LongDoc):
        return Built(groups=documents(encode, shape, request.seed, request.chunk_tokens))
    return Built(prompts=distinct_prompts(encode, shape, request.seed))


def _answer(arm: Answers, line: bytes) -> bytes:
    try:
        reply = arm.answer(msgspec.json.decode(line, type=Request))
    except KvtierError as error:
        reply = Failed(str(error))
    return msgspec.json.encode(reply)


def _lines() -> Iterator[bytes]:
    yield from sys.stdin.buffer


def _own_stdout() -> BinaryIO:
    """Keep stdout for answers: whatever else prints goes to stderr."""
    mine = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(mine, "wb")


def read_bytes() -> int:
    """Return what the kernel counted that this process read from block devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
