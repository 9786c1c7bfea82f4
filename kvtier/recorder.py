"""Record what is asked of a cache: a JSON line a request, as ``kvtier replay`` reads them.

Prompts are recorded by their chunks' hashes, never by their tokens. Writing is done on a thread of
its own; an engine's thread only appends to a list.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.checks import check_whole
from kvtier.clock import Clock
from kvtier.errors import ConfigError, MisuseError
from kvtier.seams import IoPool

__all__ = ["Recorder"]

_log = logging.getLogger("kvtier")
_KEPT: Final = 4  # full files, besides the one that is written
_AGAIN_SECONDS: Final = 2.0
_REMEMBERED: Final = 4096
_MOST_WAITING: Final = 65_536
_HASH_BYTES: Final = 12
_CLOSE_SECONDS: Final = 5.0


class Recorder:
    """Writes requests to `path`. Safe from any thread.

    most_bytes: of a file; then it is called ``path.1``, that ``path.2``, and so on up to four. So
    is one that was there before, whose times are others.
    Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: str | Path, chunk_tokens: int, most_bytes: int, clock: Clock) -> None:
        if not isinstance(path, (str, Path)):
            raise ConfigError(f"a path is needed to record into, and not {path!r}")
        check_whole("a recording's bytes", most_bytes, 1 << 16, error=ConfigError)
        self._path = Path(path)
        self._chunk_tokens = chunk_tokens
        self._most_bytes = most_bytes
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, Sequence[bytes]]] = []
        self._writing = False
        self._begun = False
        self._seen: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        self._pool = IoPool("record", 1)
        self.dropped = 0
        try:
            self._path.open("ab").close()
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot record into {path} ({cause}); name another file") from error

    def note(self, keys: Sequence[bytes], tokens: int) -> None:
        """Take note of a prompt. Memory only.

        The same prompt again within two seconds is the same request: engines ask until they may
        run it. When the disk does not keep up, requests are dropped and counted.
        """
        name = (keys[-1] if keys else b"", tokens)
        with self._lock:
            now = self._clock()  # so that lines stand in the order of their times
            before = self._seen.pop(name, None)
            self._seen[name] = now
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            if before is not None and now - before < _AGAIN_SECONDS:
                return
            if len(self._waiting) >= _MOST_WAITING:
                self.dropped += 1
                return
            self._waiting.append((now, tokens, keys))
            start, self._writing = not self._writing, True
        if start:
            self._submit()

    def close(self) -> None:
        """Write what waits, at most five seconds long. Idempotent. Blocks."""
        self._pool.close(_CLOSE_SECONDS)

    def _submit(self) -> None:
        try:
            self._pool.submit(self._write)
        except MisuseError:  # closed meanwhile
            self._waiting.clear()

    def _write(self) -> None:
        """Write until nothing waits. A disk's fault costs what was to be written, and a line."""
        while True:
            with self._lock:
                some, self._waiting = self._waiting, []
                if not some:
                    self._writing = False
                    return
            try:
                self._append("".join(map(self._line, some)).encode())
            except OSError as error:
                self.dropped += len(some)
                _log.warning("%d requests were not recorded: %s", len(some), error)

    def _append(self, data: bytes) -> None:
        if not self._begun and self._path.exists() and self._path.stat().st_size:
            self._shift()
        self._begun = True
        with self._path.open("ab") as file:
            file.write(data)
            full = file.tell() >= self._most_bytes
        if full:
            self._shift()

    def _shift(self) -> None:
        """Number the file, and those that are numbered higher; the oldest goes."""
        for number in range(_KEPT - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _line(self, one: tuple[float, int, Sequence[bytes]]) -> str:
        when, tokens, keys = one
        return (
            json.dumps(
                {
                    "timestamp": round(1000 * (when - self._began)),
                    "input_length": tokens,
                    "output_length": 0,
                    "hash_ids": [key[:_HASH_BYTES].hex() for key in keys],
                    "block_tokens": self._chunk_tokens,
                }
            )
            + "\n"
        )
