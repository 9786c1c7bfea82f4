"""Record what is asked of a cache: a JSON line a request, as ``kvtier replay`` reads them.

Of a prompt only its length and hashes of its blocks are written, never its tokens, and the hashes
are salted, so that a reader cannot try out what the prompt may have been. An engine's thread only
appends to a queue. The flow loop looks into it a few times a second; what blocks, or computes, runs
on one thread of the recorder's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvtier.checks import check_kind, check_whole
from kvtier.clock import Clock
from kvtier.errors import ConfigError, MisuseError
from kvtier.events import Reporter
from kvtier.identity.record import KEY_BYTES, RecordId
from kvtier.metrics import Metrics
from kvtier.prefix import Prefix
from kvtier.seams import CancelledError, Flow, IoPool, ThreadFlow, drawn

RECORD_BYTES: Final = 64 << 20
"""Bytes of a file after which the next one begins."""

_KEPT: Final = 4  # full files, besides the one that is written
_LEAST_BYTES: Final = 1 << 16
_LEAST_SALT: Final = 16  # bytes; fewer could be found by trying
_AGAIN_SECONDS: Final = 2.0
_REMEMBERED: Final = 4096
_MOST_WAITING: Final = 1 << 18  # names of parts: 25 MB
_EVERY_SECONDS: Final = 0.25
_PIECE: Final = 512  # names at a time: their hashes hold the interpreter for half a millisecond
_WRITE_BYTES: Final = 1 << 20
_HASH_BYTES: Final = 12
_CLOSE_SECONDS: Final = 5.0


class Recording(msgspec.Struct, frozen=True):
    """Where to record, and how. most_bytes: of a file. salt: of the hashes; none: a random one.

    Two recordings whose blocks are to be compared, such as those of two hosts, need one salt.
    salt_path: the file that it was read from, if any.
    """

    path: str
    most_bytes: int = RECORD_BYTES
    salt: bytes = b""
    salt_path: str = ""

    def check(self) -> Recording:
        """Return it, with a salt. Raises ConfigError for what cannot be recorded with."""
        check_kind("a recording's path", self.path, str, ConfigError)
        check_whole("a recording's bytes", self.most_bytes, _LEAST_BYTES, error=ConfigError)
        check_kind("a recording's salt", self.salt, bytes, ConfigError)
        if not self.salt:
            return msgspec.structs.replace(self, salt=drawn(_LEAST_SALT))
        if len(self.salt) < _LEAST_SALT:
            raise ConfigError(
                f"a salt of {len(self.salt)} bytes can be guessed, and then the prompts; give at "
                f"least {_LEAST_SALT}, or none, for a random one"
            )
        return self


class _Noted(NamedTuple):
    when: float
    tokens: int
    block_tokens: int
    names: Sequence[Sequence[RecordId]]
    weight: int


class Recorder:
    """Writes requests into a file. Safe from any thread.

    When the file is full it is called ``path.1``, that ``path.2``, and so on up to four; so is one
    that is there, unless it is of the same salt. flow: where it waits; None: on a thread of its
    own. epoch: seconds from 1970 to the zero of the clock. again: one before this one could write
    the file, so that a disk's fault is told, and requests are counted as unrecorded meanwhile.
    Raises ConfigError when the file cannot be written, unless it is made again.
    """

    def __init__(
        self,
        recording: Recording,
        flow: Flow | None,
        metrics: Metrics,
        clock: Clock,
        epoch: float,
        *,
        again: bool = False,
    ) -> None:
        from aiofiles import open as open_file  # an engine that records nothing does without

        recording = recording.check()
        self._open_file: Any = open_file
        self._path = Path(recording.path)
        self._most_bytes = recording.most_bytes
        self._salt = hashlib.sha256(recording.salt).digest()
        self._id = self._hashed(b"recording")[:8]
        self._metrics = metrics
        self._clock = clock
        self._epoch = epoch
        self._report = Reporter(clock)
        self._lock = threading.Lock()
        self._waiting: deque[_Noted] = deque()
        self._weight = 0  # of what waits
        self._closed = False
        self._seen: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        try:
            _check_file(self._path)
        except ConfigError as error:  # each write opens it anew
            if not again:
                raise
            self._report.warn("record", f"requests are not recorded: {error}")
        self._fit = False  # whether the file is of this recording, whole, and has room
        self._writing = asyncio.Lock()
        self._pool = IoPool("record", 1)
        self._own = ThreadFlow("kvtier-record")
        self._flow = flow or self._own
        self._turns = self._flow.spawn(self._run())

    def note(self, prefix: Prefix) -> None:
        """Take note of a prompt. Memory only.

        The same prompt again within two seconds is the same request: engines ask until they may
        run it. When the disk does not keep up, requests are dropped and counted.
        """
        names, tokens, shape = prefix.names, len(prefix.tokens), prefix.shape
        weight = 1 + len(names) * len(shape.names)
        name = (names[-1][0] if names else b"", tokens)
        with self._lock:
            now = self._clock()  # so that lines stand in the order of their times
            before = self._seen.pop(name, None)
            self._seen[name] = now
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            if self._closed or (before is not None and now - before < _AGAIN_SECONDS):
                return
            fits = self._weight + weight <= _MOST_WAITING
            if fits:
                self._weight += weight
                self._waiting.append(_Noted(now, tokens, shape.chunk_tokens, names, weight))
        if not fits:
            self._metrics.add("unrecorded_requests", reason="queue")

    def close(self) -> None:
        """Write what waits, at most five seconds long. Idempotent. Blocks."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = False
        with contextlib.suppress(TimeoutError, CancelledError, MisuseError):  # or the flow is over
            last = self._flow.spawn(self._write())
            try:
                last.result(_CLOSE_SECONDS)
                ended = True
            finally:
                last.cancel()
        self._turns.cancel()
        self._own.close()
        self._pool.close(_CLOSE_SECONDS if ended else 0.0)
        if left := len(self._taken(whole=True)):
            self._metrics.add("unrecorded_requests", left, reason="closed")

    # ---- on the flow loop

    async def _run(self) -> None:
        """Write what waits, now and then: nothing is told, so noting costs no wake-up."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self._write()

    async def _write(self) -> None:
        """Write until nothing waits. A disk's fault costs what was to be written, and a line."""
        async with self._writing:
            while some := self._taken():
                data, count = bytearray(), 0
                try:
                    while some:
                        count += len(some)
                        data += await self._flow.io(self._pool, self._encoded, some)
                        some = self._taken() if len(data) < _WRITE_BYTES else []
                    await self._append(data)
                except Exception as error:  # noqa: BLE001  (no memory, no thread: the next may have)
                    self._metrics.add("unrecorded_requests", count, reason="failed")
                    self._report.warn("record", f"requests are not recorded: {error}")
                except BaseException:  # it is cancelled: a disk that hangs, at the end
                    self._metrics.add("unrecorded_requests", count, reason="closed")
                    raise
                else:
                    self._metrics.add("recorded_requests", count)

    def _taken(self, *, whole: bool = False) -> list[_Noted]:
        """Take a piece of what waits, or all of it."""
        some: list[_Noted] = []
        weight = 0
        with self._lock:
            while self._waiting and (whole or weight < _PIECE):
                some.append(self._waiting.popleft())
                weight += some[-1].weight
            self._weight -= weight
        return some

    async def _append(self, data: bytearray) -> None:
        """Append to the file, all or nothing; to the next one where it is full."""
        if not self._fit:
            await self._flow.io(self._pool, self._begin)
        async with self._open_file(
            self._path, "ab", buffering=0, opener=_private, executor=self._pool
        ) as file:
            end = await file.tell()
            left = memoryview(data)
            try:
                while left:
                    left = left[await file.write(left) :]
            except OSError:
                self._fit = False  # or what follows would stand behind half a line
                with contextlib.suppress(OSError):
                    await file.truncate(end)
                raise
        self._fit = end + len(data) < self._most_bytes

    # ---- on the recorder's thread

    def _encoded(self, some: Sequence[_Noted]) -> bytes:
        return b"".join(map(self._line, some))

    def _line(self, one: _Noted) -> bytes:
        line = {
            "timestamp": round(1000 * (self._epoch + one.when)),
            "input_length": one.tokens,
            "output_length": 0,
            "block_tokens": one.block_tokens,
            "recording": self._id,
            "hash_ids": [self._hashed(names[0][:KEY_BYTES]) for names in one.names],
        }
        return msgspec.json.encode(line) + b"\n"

    def _hashed(self, key: bytes) -> str:
        return hashlib.blake2b(key, digest_size=_HASH_BYTES, key=self._salt).hexdigest()

    def _begin(self) -> None:
        """Go on with a file of this recording that is whole and has room; else begin anew."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if not size:
            return
        with self._path.open("rb") as file:
            known = f'"recording":"{self._id}"'.encode() in file.read(_LEAST_BYTES).split(b"\n")[0]
            file.seek(-1, os.SEEK_END)
            whole = file.read(1) == b"\n"
        if not (known and whole and size < self._most_bytes):
            self._shift()

    def _shift(self) -> None:
        """Number the file, and those that are in its way; the oldest goes.

        Where it fails halfway, the next try begins at the gap, and costs no further file.
        """
        free = 1
        while free < _KEPT and self._numbered(free).exists():
            free += 1
        for number in range(free, 1, -1):
            self._numbered(number - 1).replace(self._numbered(number))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _private(path: str, flags: int) -> int:
    """Open a file that nobody else reads: who asks how much, and when, is nobody's business."""
    return os.open(path, flags | os.O_NONBLOCK, 0o600)  # a pipe without a reader is told, too


def _check_file(path: Path) -> None:
    """Raise ConfigError for a file that cannot be appended to. Leaves it there, for the next."""
    try:
        with open(path, "ab", opener=_private) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot record into {path} ({cause}); name another file") from error
    if not regular:
        raise ConfigError(f"cannot record into {path}: it is no file; name another")
