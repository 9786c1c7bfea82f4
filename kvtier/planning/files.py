"""The files of a trace: a recording has several, of which those that were full are numbered."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import zstandard

_NUMBERED: Final = re.compile(r"(.+)\.([1-9][0-9]?)")
_RECORDING: Final = re.compile(rb'"recording": ?"([0-9a-f]+)"')
_BLOCK: Final = re.compile(rb'"block_tokens": ?([1-9][0-9]{0,8})\b')
_LOOKED_AT: Final = 4096  # bytes of a line: hashes stand at its end
_PIECE: Final = 1 << 16
_USUAL_BLOCK: Final = 512  # Mooncake's


@dataclass(frozen=True, slots=True)
class TraceFiles:
    """One trace's, oldest first. others: files beside them that are of other recordings."""

    paths: tuple[Path, ...]
    others: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """The newest, which gives the trace its name."""
        return self.paths[-1]

    @property
    def name(self) -> str:
        """That name; what is no UTF-8 in it as an escape."""
        return self.path.name.encode(errors="backslashreplace").decode()

    def block_tokens(self, given: int | None) -> int:
        """Return the tokens of a block: as given, or as recorded; 512 where neither says it."""
        found = None if given is not None else _BLOCK.search(_head(self.paths[0]))
        return given or (int(found[1]) if found else _USUAL_BLOCK)


def trace_files(named: Iterable[str | Path]) -> list[TraceFiles]:
    """Return the files of each trace that was named.

    ``r.jsonl`` stands for ``r.jsonl.1`` and so on, too, as far as they are of the same recording.
    Such files that are named themselves are one trace if they are of one recording.
    """
    groups: dict[Path, dict[int, Path]] = {}
    wanted: dict[Path, None] = {}
    for path in map(Path, named):
        found = _NUMBERED.fullmatch(path.name)
        base, number = (path.with_name(found[1]), int(found[2])) if found else (path, 0)
        group = groups.setdefault(base, {})
        if not number:
            group.update(_siblings(path))
            if group and not _is_file(path):  # it is full, and the next one has not begun
                number = min(group)
        wanted[group.setdefault(number, path)] = None
    return [files for group in groups.values() for files in _apart(group, wanted)]


def check_regular(path: Path) -> None:
    """Raise OSError for what is no file that ends: a pipe may wait for a writer for ever."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise OSError(f"it is {what}; give a file")


class _Unpacked(io.RawIOBase):
    """What a file of zstd frames holds. Raises EOFError where the last one is cut off."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False  # whether the frame is
        self._packed = b""
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """See RawIOBase."""
        return True

    def readinto(self, target: Any) -> int:
        """See RawIOBase."""
        while not self._left:
            self._packed = self._packed or self._file.read(_PIECE)
            if not self._packed:
                if self._begun:
                    raise EOFError("it is cut off: its last zstd frame has no end")
                return 0
            self._begun = True
            self._left = memoryview(self._frame.decompress(self._packed))
            self._packed = b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._begun = False
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def unpacked(file: IO[bytes]) -> Any:
    """Return a file's bytes as a stream, which is the file itself where it is not packed."""
    magic = file.read(4)
    file.seek(0)
    if magic == zstandard.MAGIC_NUMBER.to_bytes(4, "little"):
        return io.BufferedReader(_Unpacked(file), _PIECE)
    return gzip.GzipFile(fileobj=file) if magic[:2] == b"\x1f\x8b" else file


def _apart(group: dict[int, Path], wanted: dict[Path, None]) -> list[TraceFiles]:
    """Part the files of one name by what they were recorded with; what is no recording is alone."""
    recordings: dict[bytes, list[Path]] = {}
    for number in sorted(group, reverse=True):
        path = group[number]
        found = _RECORDING.search(_head(path)) if len(group) > 1 else None
        recordings.setdefault(found[1] if found else os.fsencode(path), []).append(path)
    others = [paths for paths in recordings.values() if not any(path in wanted for path in paths)]
    left = tuple(path for paths in others for path in paths)
    found_all = [tuple(paths) for paths in recordings.values() if paths not in others]
    return [
        *(TraceFiles(paths) for paths in found_all[:-1]),
        TraceFiles(found_all[-1], left),
    ]


def _siblings(path: Path) -> dict[int, Path]:
    """Return the numbered files of a name; a folder such as / has none."""
    if not path.name:
        return {}
    beside = {number: path.with_name(f"{path.name}.{number}") for number in range(1, 100)}
    return {number: one for number, one in beside.items() if _is_file(one)}


def _is_file(path: Path) -> bool:
    """Tell whether a file is there; a name that no file can have is told where it is opened."""
    try:
        return path.is_file()
    except OSError:
        return False


def _head(path: Path) -> bytes:
    """Return how a file begins; nothing where it cannot be read, which is told later."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            head: bytes = unpacked(file).read(_LOOKED_AT)
    except (OSError, EOFError, ValueError, zlib.error, zstandard.ZstdError):
        return b""
    return head.split(b"\n", 1)[0]
