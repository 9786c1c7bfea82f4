"""Traces: recorded requests, each with its time, its lengths and the hashes of its blocks.

Reads the JSON lines of Mooncake, Bailian and ``Cache.record``, plain, gzip or zstd: an object a
line with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, of which each names
a block of tokens and all before it.
"""

from __future__ import annotations

import gzip
import io
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import zstandard

from kvtier.errors import ConfigError

__all__ = ["Trace", "read_trace"]

_MOST_BYTES: Final = 16 << 20
_MOST_BLOCKS: Final = 1 << 20
_MOST_NUMBER: Final = 1e15
_NONE: Final = -1


class Trace:
    """Requests in order. Blocks are numbered from 0 as they first appear.

    parent: of each block, the one before it, or -1. skipped: lines that were left out.
    """

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.parent = array("i")
        self.skipped = 0
        self._numbers: dict[object, int] = {}
        self._blocks = array("i")
        self._ends = array("q")
        self._tokens = array("q")
        self._outputs = array("q")
        self._times = array("d")

    def __len__(self) -> int:
        """Requests."""
        return len(self._ends)

    @property
    def unique(self) -> int:
        """Different blocks."""
        return len(self.parent)

    @property
    def uses(self) -> int:
        """Blocks of all requests together."""
        return len(self._blocks)

    def blocks(self, number: int) -> Sequence[int]:
        """Return the blocks of a request, in order."""
        return self._blocks[self._ends[number - 1] if number else 0 : self._ends[number]]

    def requests(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield blocks and prompt tokens of each request."""
        begin = 0
        for end, tokens in zip(self._ends, self._tokens, strict=True):
            yield self._blocks[begin:end], tokens
            begin = end

    def add(self, time: float, tokens: int, output: int, hashes: Sequence[object]) -> None:
        """Append a request. Raises ConfigError for hashes that do not name prefixes."""
        numbers, parent = self._numbers, self.parent
        above, fresh = _NONE, len(parent)
        found = []
        for one in hashes:
            block = numbers.get(one, _NONE)
            if block == _NONE:
                block = numbers[one] = len(parent)
                parent.append(above)
            elif parent[block] != above:
                del parent[fresh:]
                for late in [name for name, number in numbers.items() if number >= fresh]:
                    del numbers[late]
                raise ConfigError(f"hash_ids: {one!r} stands behind another block than before")
            found.append(block)
            above = block
        self._blocks.extend(found)
        self._ends.append(len(self._blocks))
        self._tokens.append(tokens)
        self._outputs.append(output)
        self._times.append(time)

    def depths(self) -> array[int]:
        """Return how many blocks stand before each block."""
        found = array("i", bytes(4 * self.unique))
        for block, above in enumerate(self.parent):
            found[block] = found[above] + 1 if above != _NONE else 0
        return found

    def time(self, number: int) -> float:
        """Return the time of a request, in the trace's own unit."""
        return self._times[number]

    def output(self, number: int) -> int:
        """Return the tokens of a request's answer."""
        return self._outputs[number]

    def last_time(self) -> float:
        """Return the time of the last request; 0 before the first."""
        return self._times[-1] if self._times else 0.0


def read_trace(
    path: str | Path,
    block_tokens: int,
    *,
    skip_bad: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a trace file.

    block_tokens: tokens of a block, which files do not say. skip_bad: count bad lines instead of
    refusing the file. tell: called now and then with the bytes that are read, of how many.
    Raises ConfigError that names line and field.
    """
    path = Path(path)
    if block_tokens < 1:
        raise ConfigError(f"a block of {block_tokens} tokens; give the size that the hashes are of")
    trace = Trace(path.name, block_tokens)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                try:
                    _add(trace, line)
                except ConfigError as error:
                    if not skip_bad:
                        raise ConfigError(f"{path}, line {number}: {error}") from error
                    trace.skipped += 1
                if tell is not None and not number % 256:
                    tell(file.tell(), size)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not len(trace):
        raise ConfigError(f"{path} has no requests")
    return trace


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines that are not empty, unpacked; a line beyond all measure is cut, and so bad."""
    magic = file.read(4)
    file.seek(0)
    stream: Any = file
    if magic == zstandard.MAGIC_NUMBER.to_bytes(4, "little"):
        stream = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))
    elif magic[:2] == b"\x1f\x8b":
        stream = gzip.GzipFile(fileobj=file)
    while line := stream.readline(_MOST_BYTES):
        if line.strip():
            yield line


def _add(trace: Trace, line: bytes) -> None:
    if len(line) == _MOST_BYTES:
        raise ConfigError(f"it is longer than {_MOST_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError("it is not a JSON object")
    time = _number(fields, "timestamp", float)
    if time < trace.last_time():
        raise ConfigError(f"timestamp: {time:g} lies before the request above; sort the file")
    tokens = int(_number(fields, "input_length", int))
    output = int(_number(fields, "output_length", int))
    said = fields.get("block_tokens", trace.block_tokens)
    if said != trace.block_tokens:
        raise ConfigError(f"block_tokens: recorded with {said}; pass --block-size {said}")
    hashes = fields.get("hash_ids")
    if not isinstance(hashes, list) or len(hashes) > _MOST_BLOCKS:
        raise ConfigError(f"hash_ids: a list of at most {_MOST_BLOCKS} is needed")
    if not all(isinstance(one, int | str) and not isinstance(one, bool) for one in hashes):
        raise ConfigError("hash_ids: numbers or texts are needed")
    most = -(-tokens // trace.block_tokens)
    if len(hashes) > most:
        raise ConfigError(
            f"hash_ids: {len(hashes)} blocks of {trace.block_tokens} tokens are more than the "
            f"{tokens} tokens of input_length have; is --block-size right?"
        )
    if len(hashes) < tokens // trace.block_tokens:
        raise ConfigError(
            f"hash_ids: {len(hashes)} blocks of {trace.block_tokens} tokens are fewer than the "
            f"{tokens} tokens of input_length fill; is --block-size right?"
        )
    trace.add(time, tokens, output, hashes)


def _number(fields: dict[str, Any], name: str, kind: type) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ConfigError(f"{name}: a number is needed, not {value!r}")
    if not 0 <= value < _MOST_NUMBER:
        raise ConfigError(f"{name}: {value!r} is out of range")
    return value
