"""Traces: recorded requests, each with its time, its lengths and the hashes of its blocks.

Reads the JSON lines of Mooncake, Bailian and ``Cache.record``, plain, gzip or zstd: an object a
line with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, of which each names
a block of tokens and all before it.
"""

from __future__ import annotations

import itertools
import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import zstandard

from kvtier.checks import shown, what_is_wrong
from kvtier.errors import ConfigError
from kvtier.planning.files import TraceFiles, check_regular, trace_files, unpacked

_MOST_BYTES: Final = 16 << 20
_MOST_BLOCKS: Final = 1 << 20
_MOST_NUMBER: Final = 1e15
_NONE: Final = -1


class Trace:
    """Requests in order. Blocks are numbered from 0 as they first appear.

    parent: of each block, the one before it, or -1. recording: whose salt the hashes have, if
    that is said. skipped: bad lines that were left out. notes: what else is to be known, in words.
    seconds_per_unit: of the times.
    """

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.parent = array("i")
        self.recording = ""
        self.seconds_per_unit = 1e-3
        self.skipped = 0
        self.notes: list[str] = []
        self._numbers: dict[object, int] = {}
        self._blocks = array("i")
        self._asked = array("q")  # where a prompt ends in the blocks
        self._ends = array("q")  # where its answer does
        self._uses = 0
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
        """Blocks of all prompts together."""
        return self._uses

    @property
    def entries(self) -> int:
        """The same with those of the answers."""
        return len(self._blocks)

    def blocks(self, number: int) -> Sequence[int]:
        """Return the blocks of a prompt, in order."""
        return self._blocks[self._ends[number - 1] if number else 0 : self._asked[number]]

    def computed(self, number: int) -> Sequence[int]:
        """Return the blocks that are there when a request has been served: its answer's, too."""
        return self._blocks[self._ends[number - 1] if number else 0 : self._ends[number]]

    def requests(self) -> Iterator[tuple[Sequence[int], int]]:
        """Yield blocks and tokens of each prompt."""
        for blocks, asked, tokens in self.served():
            yield blocks[:asked], tokens

    def served(self) -> Iterator[tuple[Sequence[int], int, int]]:
        """Yield the blocks of each prompt and its answer, how many are the prompt's, its tokens."""
        begin = 0
        for asked, end, tokens in zip(self._asked, self._ends, self._tokens, strict=True):
            yield self._blocks[begin:end], asked - begin, tokens
            begin = end

    def add(
        self,
        time: float,
        tokens: int,
        output: int,
        hashes: Sequence[object],
        answer: Sequence[object] = (),
    ) -> None:
        """Append a request. answer: hashes of the blocks that the answer fills, if known.

        Raises ConfigError for hashes that do not name prefixes.
        """
        numbers, parent = self._numbers, self.parent
        above, fresh = _NONE, len(parent)
        found = []
        for one in itertools.chain(hashes, answer):
            block = numbers.get(one, _NONE)
            if block == _NONE:
                block = numbers[one] = len(parent)
                parent.append(above)
            elif parent[block] != above:
                del parent[fresh:]
                while len(numbers) > fresh:
                    numbers.popitem()  # the last that came
                raise ConfigError(f"hash_ids: {shown(one)} stands behind another block than before")
            found.append(block)
            above = block
        self._blocks.extend(found)
        self._ends.append(len(self._blocks))
        self._asked.append(len(self._blocks) - len(answer))
        self._uses += len(hashes)
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

    def tokens(self, number: int) -> int:
        """Return the tokens of a prompt."""
        return self._tokens[number]

    def output(self, number: int) -> int:
        """Return the tokens of a request's answer."""
        return self._outputs[number]

    def last_time(self) -> float:
        """Return the time of the last request; 0 before the first."""
        return self._times[-1] if self._times else 0.0


def read_trace(
    source: str | Path | TraceFiles,
    block_tokens: int | None,
    *,
    skip_bad: bool = False,
    tell: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a trace: a file, or all those of a recording, see ``trace_files``.

    block_tokens: tokens of a block, and what was recorded with others is left out; None: as
    recorded, or 512. skip_bad: count bad lines instead of refusing the file. tell: called now and
    then with the bytes that are read, of how many.
    The last line of a file may be torn: who wrote it was killed. That is a note.
    Raises ConfigError that names line and field.
    """
    files = source if isinstance(source, TraceFiles) else trace_files([source])[0]
    size = files.block_tokens(block_tokens)
    if size < 1:
        raise ConfigError(f"a block of {size} tokens; give the size that the hashes are of")
    trace = Trace(files.name, size)
    if files.others:
        names = " and ".join(path.name for path in files.others)
        trace.notes.append(f"{names}: of another recording, left out; name them to read them")
    left_out = _LeftOut(trace, skip_bad=skip_bad, chosen=block_tokens is not None)
    behind, path = 0, files.path
    try:
        total = sum(path.stat().st_size for path in files.paths)
        for path in files.paths:
            check_regular(path)
            with path.open("rb") as file:
                for number, line in _lines(file):
                    if tell is not None and not number % 256:
                        tell(behind + file.tell(), total)
                    try:
                        _add(trace, line)
                    except ConfigError as error:
                        left_out.add(error, f"{path}, line {number}")
            behind += path.stat().st_size
    except (OSError, EOFError, ValueError, zlib.error, zstandard.ZstdError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {cause}") from error
    left_out.end(path)
    return trace


class _TornError(ConfigError):
    """The last line ends before it is whole."""


class _OtherSizeError(ConfigError):
    """A request of a model with chunks of another size: nothing is bad about it."""

    def __init__(self, size: int, above: int) -> None:
        self.size = size
        super().__init__(
            f"block_tokens: {size}, and {above} above: models with chunks of two sizes were "
            f"recorded here; --block-size {size} or --block-size {above} replays those of one"
        )


class _LeftOut:
    """Lines that are left out. chosen: whether the size of blocks was, so that others may be."""

    def __init__(self, trace: Trace, *, skip_bad: bool, chosen: bool) -> None:
        self._trace = trace
        self._skip_bad = skip_bad
        self._chosen = chosen
        self._others: Counter[int] = Counter()

    def add(self, error: ConfigError, where: str) -> None:
        """Take note of a line. Raises ConfigError for one that may not be left out."""
        if isinstance(error, _OtherSizeError) and self._chosen:
            self._others[error.size] += 1
        elif isinstance(error, _TornError):
            self._trace.notes.append(f"{where}: it is torn, as by a kill, and left out")
        elif self._skip_bad and not isinstance(error, _OtherSizeError):
            self._trace.skipped += 1
        else:
            raise ConfigError(f"{where}: {error}") from error

    def end(self, path: Path) -> None:
        """Tell of models that were left out. Raises ConfigError where nothing else is there."""
        trace = self._trace
        trace.notes += [
            f"{trace.name}: left out: {count:,} with chunks of {size} tokens, of another model; "
            f"--block-size {size} replays them"
            for size, count in sorted(self._others.items())
        ]
        if not len(trace):
            bad = [f"{trace.skipped:,} bad lines were left out"] if trace.skipped else []
            raise ConfigError("; ".join((f"{path} has no requests", *bad, *trace.notes)))


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not empty, unpacked, with their numbers.

    A line beyond all measure is cut, and so bad.
    """
    stream = unpacked(file)
    number = 0
    while line := stream.readline(_MOST_BYTES):
        number += 1
        rest = line
        while len(rest) == _MOST_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(_MOST_BYTES)
        if stream is not file and not line.endswith(b"\n"):
            line += b"\n"  # what was packed was whole: this is no tear
        if line.strip():
            yield number, line


def _add(trace: Trace, line: bytes) -> None:
    if len(line) == _MOST_BYTES:
        raise ConfigError(f"it is longer than {_MOST_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        kind = ConfigError if line.endswith(b"\n") else _TornError
        raise kind(f"it is not JSON ({what_is_wrong(error)})") from error
    if not isinstance(fields, dict):
        raise ConfigError("it is not a JSON object")
    time = _number(fields, "timestamp", float)
    if time < trace.last_time():
        raise ConfigError(f"timestamp: {time:.15g} lies before the request above; sort the file")
    tokens = int(_number(fields, "input_length", int))
    output = int(_number(fields, "output_length", int))
    recording = _recording(trace, fields)
    if "hash_ids" not in fields:
        raise ConfigError("hash_ids: it is missing")
    hashes = fields["hash_ids"]
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
    trace.recording = recording


def _recording(trace: Trace, fields: dict[str, Any]) -> str:
    """Return what a line was recorded with. Raises ConfigError where that is not the trace's."""
    if "block_tokens" in fields:
        said = int(_number(fields, "block_tokens", int, least=1))
        if said != trace.block_tokens:
            raise _OtherSizeError(said, trace.block_tokens)
    recording = fields.get("recording", trace.recording)
    if not isinstance(recording, str) or recording != (trace.recording or recording):
        raise ConfigError(
            f"recording: {shown(recording)}, and {trace.recording!r} above; hashes of two salts "
            "never match: record with one, or replay them apart"
        )
    return recording


def _number(fields: dict[str, Any], name: str, kind: type, least: int = 0) -> float:
    if name not in fields:
        raise ConfigError(f"{name}: it is missing")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ConfigError(f"{name}: a number is needed, not {shown(value)}")
    if not least <= value < _MOST_NUMBER:
        raise ConfigError(f"{name}: {shown(value)} is out of range")
    return value
