"""Upkeep: what an operator does to a cache. Clear, invalidate, purge, flush, figures, close.

These may block, where they say so; an engine's threads have no use for them. Those that wait raise
MisuseError in a transfer's callback (``on_settled``): they would wait for themselves.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from kvtier.catalog.explain import Explanation
from kvtier.catalog.sweep import Removed
from kvtier.checks import check_first, check_kind, check_wait
from kvtier.clock import epoch, monotonic
from kvtier.desk import Desk, Health
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.keys import TokenIds
from kvtier.identity.namespace import Namespace, Request
from kvtier.identity.record import KEY_BYTES
from kvtier.local import LocalDesk
from kvtier.prefix import Namer, Prefix
from kvtier.recorder import RECORD_BYTES, Recorder, Recording

__all__ = ["Removed", "Upkeep"]

_CLEAR_SECONDS: Final = 30.0
_PURGE_SECONDS: Final = 600.0


def _untold(parts: int) -> None:
    del parts


class Upkeep:
    """One of the caches that share a catalog. Safe from any thread, not across fork."""

    def __init__(self, desk: Desk, namespace: Namespace, namer: Namer) -> None:
        self.namespace = namespace
        self.metrics = desk.metrics
        self._desk = desk
        self._namer = namer
        self._pid = os.getpid()
        self._closing = threading.RLock()  # a signal's handler may close it again
        self._closed = False
        self._recorder: Recorder | None = None

    def clear(self, tier: str, *, timeout: float = _CLEAR_SECONDS) -> None:
        """Take everything that nobody holds out of a tier. Blocks.

        Raises ConfigError for a tier that this cache has not, and TimeoutError after `timeout`
        seconds; it goes on then.
        """
        self._check_waiting()
        check_wait("a timeout", timeout)
        check_kind("a tier's name", tier, str, ConfigError)
        tiers = self._desk.tiers
        if tier not in tiers:
            raise ConfigError(f"no tier {tier!r}; this cache has {', '.join(tiers)}")
        self._desk.clear(tier, timeout)

    def invalidate(
        self,
        tokens: TokenIds | Prefix,
        *,
        request: Request | None = None,
        first: int = 0,
        timeout: float = 0.0,
    ) -> Removed:
        """Forget the chunks of a prompt, from `first` on, in all tiers.

        From the moment it returns they are matched no more: by memory alone, at once. What is
        leased, pinned, or in a plan, stays its holder's until that ends; a save, write or read of
        them that is under way comes to nothing. Other prompts' chunks below them are not served
        any more either, and leave first. The Stores' records are deleted in the background;
        it waits for that `timeout` seconds at most. On a shared tier it deletes what others may
        have written, too. Saved anew, the chunks are there again.
        Raises MisuseError for what are no tokens, and no such chunk or time.
        """
        self._check_waiting()
        check_first(first)
        check_wait("a timeout", timeout)
        prefix = self._mine(tokens, request)
        return self._desk.invalidate(prefix, first, timeout)

    def purge(
        self,
        digest: bytes | None = None,
        *,
        timeout: float = _PURGE_SECONDS,
        progress: Callable[[int], None] = _untold,
    ) -> Removed:
        """Take all that there is of one namespace out of all tiers. Blocks.

        digest: of another namespace than this cache's own, as records carry it. Shared tiers are
        listed. What others hold stays theirs until that ends; what they save meanwhile may
        stay. progress: called with the number of parts, from the thread that moves them.
        Raises MisuseError for what is no digest, and TimeoutError after `timeout` seconds; it
        goes on then.
        """
        self._check_waiting()
        digest = self.namespace.digest if digest is None else digest
        _check_digest(digest)
        check_wait("a timeout", timeout)
        if not callable(progress):
            raise MisuseError(f"progress is called with a number of parts; {progress!r} cannot be")
        return self._desk.purge(digest, timeout, progress)

    def flush(self, *, timeout: float) -> bool:
        """Wait until nothing waits to be published or written down; False when time runs out.

        By then each part was written, or dropped and counted: a tier that fails, or is left alone,
        keeps nobody waiting. ``kvtier_dropped_spills_total{reason="failed"}`` says whether it did.
        """
        self._check_waiting()
        check_wait("a timeout", timeout)
        return self._desk.flush(timeout)

    def explain(self, tokens: TokenIds | Prefix, *, request: Request | None = None) -> Explanation:
        """Say for each chunk of a prompt where it is, or why it is not. Print what it returns.

        That is where to look when hits are few: it names the chunk that ends the match, and
        whether that was evicted, lost, cleared, never saved, or never seen. Of what left the last
        8192 parts are known. Memory only; nothing counts as used.
        Raises MisuseError for a prompt that another cache has named.
        """
        self._check()
        return self._desk.explain(self._mine(tokens, request))

    def record(
        self, path: str | Path | None, *, most_bytes: int = RECORD_BYTES, salt: bytes = b""
    ) -> None:
        """Record each prompt that is matched from now on, for ``kvtier replay``; None: no more.

        path: a file that gets a JSON line a request, with salted hashes and no tokens. Beyond
        `most_bytes` it becomes ``path.1``, as does one that is there with another salt; four such
        are kept. salt: 16 bytes or more that other recordings share, so that their blocks can be
        compared; by default a random one. Blocks briefly.
        Raises ConfigError when it cannot be written, and for sizes and salts that are none; what
        is recorded already goes on then.
        """
        self._check_waiting()
        with self._closing:
            self._check()  # or nobody would close what is begun here
            following = self._recorder_of(path, most_bytes, salt) if path is not None else None
            if self._recorder is not None:
                self._recorder.close()  # before the next one notes: it may be the same file
            self._recorder = following

    def _recorder_of(self, path: str | Path, most_bytes: int, salt: bytes) -> Recorder:
        """Return one that has written nothing yet."""
        recording = Recording(str(path) if isinstance(path, Path) else path, most_bytes, salt)
        flow = self._desk.depot.flow if isinstance(self._desk, LocalDesk) else None
        return Recorder(recording, flow, self.metrics, monotonic, epoch())

    def figures(self) -> dict[str, float]:
        """Return all metrics, gauges brought up to date. Memory only; also once it is closed."""
        self._check_process()
        return self._desk.figures()

    def health(self) -> Health:
        """Say which tiers are not served at the moment, and why. Memory only.

        A tier that fails is left alone until a call works again. Whatever this says, calls go on:
        what such a tier has is a miss.
        """
        self._check()
        return self._desk.health()

    @property
    def bypass(self) -> bool:
        """Whether this namespace goes without its cache. Set it, and that is so at once.

        While it is on, no prompt matches, nothing is saved, and nothing is brought up from below;
        leases and plans that are out go on. What is stored stays, and hits again afterwards.
        Other namespaces of the same tiers do not notice. Memory only.
        """
        return self._desk.bypass

    @bypass.setter
    def bypass(self, on: bool) -> None:
        self._check()
        check_kind("bypass", on, bool)
        self._desk.bypass = on

    # ---- life

    def close(self) -> None:
        """Write down what waits, and end all threads. Idempotent. Blocks.

        Half a minute at most for what waits, and ten seconds for each tier in which calls hang.
        Its pins end. What other caches share with it goes on until the last of them is closed.
        Copies in flight may go on: their slots' memory stays mapped until the last has ended.
        """
        self._check_here()
        if os.getpid() != self._pid:
            return
        with self._closing:  # a second call returns when the first has
            if self._closed:
                return
            self._closed = True
            with contextlib.ExitStack() as ending:
                ending.callback(self._desk.leave)
                if self._recorder is not None:
                    ending.callback(self._recorder.close)
                self._desk.unpin()

    def __enter__(self) -> Self:
        """Return the cache."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _mine(self, tokens: TokenIds | Prefix, request: Request | None = None) -> Prefix:
        """Return a prompt's prefix, as this cache names it."""
        if not isinstance(tokens, Prefix):
            return self._namer.prefix(tokens, request, None)
        if tokens.shape is not self._namer.shape:
            raise MisuseError("this prompt was named by another cache; each names its own")
        if request is not None and request != tokens.request:
            raise MisuseError("this prompt was named for another request; name its tokens anew")
        return tokens

    def _check(self) -> None:
        if self._closed:
            raise MisuseError("this cache is closed")
        self._check_process()

    def _check_waiting(self) -> None:
        """Refuse what waits where that would wait for itself, and all that ``_check`` does."""
        self._check()
        self._check_here()

    def _check_here(self) -> None:
        if self._desk.here():
            raise MisuseError(
                "this waits for what the calling thread does: it is a transfer's callback; call it "
                "from a thread of your own"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError("a cache does not cross fork; open one in the child")


def _check_digest(digest: object) -> None:
    if not isinstance(digest, bytes) or len(digest) != KEY_BYTES:
        raise MisuseError(f"a namespace's digest is {KEY_BYTES} bytes, and not {digest!r}")
