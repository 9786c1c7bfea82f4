"""Upkeep: what an operator does to a cache. Clear, flush, look at the figures, close.

These may block, where they say so; an engine's threads have no use for them.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Final, Self

from kvtier.depot import Depot
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.namespace import Namespace

__all__ = ["Upkeep"]

_CLEAR_SECONDS: Final = 30.0


class Upkeep:
    """One of the caches that share a Depot. Safe from any thread, not across fork."""

    def __init__(self, depot: Depot, namespace: Namespace) -> None:
        self.namespace = namespace
        self.metrics = depot.metrics
        self._depot = depot
        self._catalog = depot.catalog
        self._moves = depot.moves
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False

    def clear(self, tier: str, *, timeout: float = _CLEAR_SECONDS) -> None:
        """Take everything that nobody holds out of a tier. Blocks.

        Raises ConfigError for a tier that this cache has not, and TimeoutError after `timeout`
        seconds; it goes on then.
        """
        self._check()
        numbers = self._depot.numbers
        if tier not in numbers:
            raise ConfigError(f"no tier {tier!r}; this cache has {', '.join(numbers)}")
        self._depot.flow.spawn(self._moves.clear(numbers[tier])).result(timeout)

    def flush(self, *, timeout: float) -> bool:
        """Wait until all saves are published and written down; False when time runs out."""
        self._check()
        return self._depot.flush(timeout)

    def figures(self) -> dict[str, float]:
        """Return all metrics, gauges brought up to date. Memory only; also once it is closed."""
        self._check_process()
        self._catalog.figures()
        return self.metrics.snapshot()

    @property
    def bypass(self) -> bool:
        """Whether this namespace goes without its cache. Set it, and that is so at once.

        While it is on, no prompt matches, nothing is saved, and nothing is brought up from below;
        leases and plans that are out go on. What is stored stays, and hits again afterwards.
        Other namespaces of the same tiers do not notice. Memory only.
        """
        return self.namespace.digest in self._depot.bypassed

    @bypass.setter
    def bypass(self, on: bool) -> None:
        self._check()
        if on:
            self._depot.bypassed[self.namespace.digest] = None
        else:
            self._depot.bypassed.pop(self.namespace.digest, None)

    # ---- life

    def close(self) -> None:
        """Write down what waits, bounded, and end all threads. Idempotent. Blocks.

        What other caches share with it goes on until the last of them is closed. Copies in flight
        may go on: their slots' memory stays mapped until the last has ended.
        """
        if os.getpid() != self._pid or not self._closing.acquire(blocking=False):
            return
        try:
            self._depot.leave()
        finally:
            self._closed = True

    def __enter__(self) -> Self:
        """Return the cache."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def _check(self) -> None:
        if self._closed:
            raise MisuseError("this cache is closed")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError("a cache does not cross fork; open one in the child")
