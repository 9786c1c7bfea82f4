"""The Depot: what the caches of one process share. Arena, tiers, catalog, and the flow loop."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from typing import Final

from kvtier.catalog.catalog import Catalog, Shelf
from kvtier.clock import Clock
from kvtier.config import Config
from kvtier.errors import ConfigError, MisuseError
from kvtier.flow import Moves
from kvtier.identity.namespace import Namespace
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Arena, slot_bytes_for
from kvtier.metrics import Metrics
from kvtier.opening import index_tiers, open_tiers
from kvtier.policies.lru import Lru
from kvtier.seams import CancelledError, Flow
from kvtier.units import format_bytes, format_least

__all__ = ["Depot"]

_CLOSE_SECONDS: Final = 30.0


class Depot:
    """Opened for one namespace; others may join. It closes when the last cache leaves it.

    Raises ConfigError with cause and remedy. Opening and closing block.
    """

    def __init__(
        self, config: Config, namespace: Namespace, shape: Shape, clock: Clock, flow: Flow
    ) -> None:
        self.metrics = Metrics()
        self.flow = flow
        self.clock = clock
        self.plan_ids = itertools.count(1)
        self.cache_numbers = itertools.count(1)
        self.bypassed: dict[bytes, None] = {}  # digests of namespaces
        self._lock = threading.Lock()
        self._caches = 1
        self.arena = Arena(config.dram, shape.nbytes)
        self.arena_id = os.fstat(self.arena.fd).st_ino
        with contextlib.ExitStack() as undo:
            undo.callback(self.arena.close)
            undo.callback(flow.close)
            self.tiers = open_tiers(config, flow, self.metrics, clock, shape.nbytes)
            for tier in self.tiers.values():
                undo.callback(tier.close)
            self._start(config, namespace, shape)
            undo.pop_all()

    def _start(self, config: Config, namespace: Namespace, shape: Shape) -> None:
        """Index what the tiers have, and start what runs in the background. Blocks."""
        shelves = [Shelf("dram", Lru.together(), self.arena.nbytes)] + [
            Shelf(tier.name, Lru.together(), setting.capacity, tier.store.capabilities.shared)
            for tier, setting in zip(self.tiers.values(), config.tiers, strict=True)
        ]
        self._shelves = shelves
        self._quotas = config.quotas
        self._check_ceiling(namespace.tenant, shape)
        self.numbers = {shelf.name: number for number, shelf in enumerate(shelves)}
        self.catalog = Catalog(self.arena, shelves, self.clock, self.metrics, config.quotas)
        self.catalog.silent = self._silent
        self.moves = Moves(
            self.catalog, self.arena, self.tiers, self.flow, self.clock, self.metrics
        )
        self.catalog.owner(namespace.digest, namespace.tenant)
        sizes = {
            (namespace.digest, name): size
            for name, size in zip(shape.names, shape.nbytes, strict=True)
        }
        index_tiers(self.catalog, self.tiers, sizes)
        self._reaper = self.flow.spawn(self.moves.reap())

    def _silent(self) -> int:
        """Return the bits of the tiers that would not be asked now."""
        return sum(1 << number for number, tier in self.tiers.items() if tier.silent)

    def join(self, namespace: Namespace, shape: Shape) -> int:
        """Let one more cache use it; return the number of its namespace.

        Raises ConfigError when its parts are larger than the arena was cut for, or one chunk
        than its tenant may have, and MisuseError once the last cache has left.
        """
        largest = max(shape.nbytes)
        if not self.arena.fits(largest):
            raise ConfigError(
                f"parts of {format_bytes(largest)} do not fit this cache's memory, which was cut "
                "for smaller ones; open the cache with the namespace that has the largest first"
            )
        self._check_ceiling(namespace.tenant, shape)
        with self._lock:
            if not self._caches:  # it is being closed, or has been
                raise MisuseError("this cache is closed")
            self._caches += 1
        return self.catalog.owner(namespace.digest, namespace.tenant)

    def _check_ceiling(self, tenant: str, shape: Shape) -> None:
        """Refuse a tenant that could not keep a single chunk in some tier."""
        ceiling = self._quotas[tenant].ceiling if tenant in self._quotas else 1.0
        for number, shelf in enumerate(self._shelves):
            footprint = self.tiers[number].footprint if number else slot_bytes_for
            need = sum(footprint(nbytes) for nbytes in shape.nbytes)
            if shelf.capacity is not None and ceiling * shelf.capacity < need:
                raise ConfigError(
                    f"tenant {tenant!r} may have {format_bytes(int(ceiling * shelf.capacity))} of "
                    f"{shelf.name}, {ceiling:.1%}, and one chunk takes {format_least(need)} "
                    "there; raise its ceiling, or the tier's capacity"
                )

    def leave(self) -> None:
        """Let one cache go. The last one writes down what waits, bounded, and ends all threads."""
        with self._lock:
            self._caches -= 1
            last = not self._caches
        try:
            self.flush(_CLOSE_SECONDS)
        finally:
            if last:
                self._close()

    def flush(self, timeout: float) -> bool:
        """Wait until all saves are published and written down; False when time runs out."""
        try:
            self.flow.spawn(self.moves.drained()).result(timeout)
        except (TimeoutError, CancelledError, MisuseError):  # the last: it was closed meanwhile
            return False
        return True

    def _close(self) -> None:
        self._reaper.cancel()
        self.moves.close()
        for tier in self.tiers.values():
            tier.close()
        self.flow.close()
        self.arena.close()
