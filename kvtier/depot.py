"""The Depot: what the caches of one process share. Arena, tiers, catalog, and the flow loop."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Final

from kvtier.catalog.catalog import Catalog, Shelf
from kvtier.clock import Clock
from kvtier.config import Config, TierConfig
from kvtier.errors import ConfigError, MisuseError
from kvtier.flow import Moves
from kvtier.identity.geometry import DTYPE_BYTES
from kvtier.identity.namespace import Namespace
from kvtier.identity.record import PartName
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Arena, slot_bytes_for
from kvtier.metrics import Metrics
from kvtier.opening import check_room, index_tiers, open_late, open_tiers
from kvtier.policies.ages import Ages
from kvtier.policies.door import load_policy
from kvtier.seams import CancelledError, Flow
from kvtier.tiers.unopened import UnopenedStore
from kvtier.units import format_bytes, format_least

_CLOSE_SECONDS: Final = 30.0
_SAID: Final = 500  # characters of a cause


class Depot:
    """Opened for one namespace, or for none yet; others may join. The last that leaves closes it.

    arena: memory that is there already, in place of what `config` would have taken. The Depot
    closes it. again: see ``open_tiers``. Raises ConfigError with cause and remedy. Opening and
    closing block.
    """

    def __init__(
        self,
        config: Config,
        namespace: Namespace | None,
        shape: Shape | None,
        clock: Clock,
        flow: Flow,
        arena: Arena | None = None,
        *,
        again: bool = False,
    ) -> None:
        self.metrics = Metrics()
        self.flow = flow
        self.clock = clock
        self.plan_ids: Iterator[int] = itertools.count(1)
        self.cache_numbers: Iterator[int] = itertools.count(1)
        self.bypassed: dict[bytes, None] = {}  # digests of namespaces
        self._lock = threading.Lock()
        self._caches = 1
        part_bytes = shape.nbytes if shape else ()
        self.arena = arena or Arena(config.dram, part_bytes, nodes=config.numa)
        with contextlib.ExitStack() as undo:
            undo.callback(self.arena.close)
            undo.callback(flow.close)
            self.tiers = open_tiers(config, flow, self.metrics, clock, part_bytes, again=again)
            for tier in self.tiers.values():
                undo.callback(tier.close)
            self._start(config, namespace, shape)
            undo.pop_all()

    @classmethod
    def open(
        cls,
        config: Config,
        clock: Clock,
        flow: Flow,
        arena: Arena | None = None,
        *,
        again: bool = False,
    ) -> Depot:
        """Open one that no namespace uses yet. Whoever opens it leaves it, too. Blocks."""
        return cls(config, None, None, clock, flow, arena, again=again)

    def _start(self, config: Config, namespace: Namespace | None, shape: Shape | None) -> None:
        """Index what the tiers have, and start what runs in the background. Blocks."""
        shelves = [
            Shelf("dram", load_policy(config.policy), self.arena.nbytes, ages=self._ages(config))
        ]
        for tier, setting in zip(self.tiers.values(), config.tiers, strict=True):
            shared, policy = tier.store.capabilities.shared, load_policy(setting.policy)
            if shared and setting.ttl is not None:
                raise ConfigError(
                    f"{tier.name} is shared, and who else uses what it has is not known here: "
                    "leave its ttl out, and let `kvtier gc --max-age` collect there"
                )
            ages = self._ages(setting)
            unlisted = not shared and isinstance(tier.store, UnopenedStore)
            shelves.append(Shelf(tier.name, policy, setting.capacity, shared, unlisted, ages))
        self._shelves = shelves
        self._quotas = config.quotas
        self.numbers = {shelf.name: number for number, shelf in enumerate(shelves)}
        self.catalog = Catalog(self.arena, shelves, self.clock, self.metrics, config.quotas)
        self.catalog.silent = self._silent
        sizes: dict[tuple[bytes, PartName], int] = {}
        if namespace and shape:
            self._check_ceiling(namespace.tenant, shape)
            self._admit(namespace)
            self.catalog.owner(namespace.digest, namespace.tenant)
            for name, size in zip(shape.names, shape.nbytes, strict=True):
                sizes[namespace.digest, name] = size
        self.moves = Moves(
            self.catalog, self.arena, self.tiers, self.flow, self.clock, self.metrics
        )
        index_tiers(self.catalog, self.tiers, sizes)
        self._reaper = self.flow.spawn(self.moves.reap())
        for number, tier in self.tiers.items():
            if isinstance(tier.store, UnopenedStore):
                strays = self.moves.strays[number]
                self.flow.spawn(open_late(number, tier, self.catalog, strays))

    def _ages(self, setting: Config | TierConfig) -> Ages | None:
        return None if setting.ttl is None else Ages(setting.ttl, self.clock)

    def _silent(self) -> int:
        """Return the bits of the tiers that would not be asked now."""
        return sum(1 << number for number, tier in self.tiers.items() if tier.silent)

    def troubles(self) -> dict[str, str]:
        """Return the tiers that are left alone at the moment, with the reason."""
        found = {tier.name: tier.trouble for tier in self.tiers.values()}
        return {name: why[:_SAID] for name, why in found.items() if why}

    def join(self, namespace: Namespace, shape: Shape) -> int:
        """Let one more cache use it; return the number of its namespace.

        What the tiers have of it was indexed by the sizes that records give themselves. Reading
        them up, and saving them anew, takes those of the shape.
        Raises ConfigError when its parts are larger than those for which the arena in use was
        cut, or one chunk than a tier, or than its tenant may have, and MisuseError once the last
        cache has left.
        """
        self.catalog.cut_for(shape.nbytes)
        for tier, shelf in zip(self.tiers.values(), self._shelves[1:], strict=True):
            check_room(tier, shelf.capacity, shape.nbytes)
        self._check_ceiling(namespace.tenant, shape)
        self._admit(namespace)
        with self._lock:
            if not self._caches:  # it is being closed, or has been
                raise MisuseError("this cache is closed")
            self._caches += 1
        return self.catalog.owner(namespace.digest, namespace.tenant)

    def _admit(self, namespace: Namespace) -> None:
        """Let the codecs of the tiers encode what they are for."""
        codings = [tier.coding for tier in self.tiers.values() if tier.coding is not None]
        for coding in codings:
            if coding.element_bytes in (0, DTYPE_BYTES[namespace.geometry.dtype]):
                coding.admit(namespace.digest)

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

    def leave(self, *, flush: bool = True) -> None:
        """Let one cache go. The last one ends all threads.

        flush: write down what waits before that, bounded.
        """
        with self._lock:
            self._caches -= 1
            last = not self._caches
        try:
            if flush:
                self.flush(_CLOSE_SECONDS)
        finally:
            if last:
                self._close()

    def flush(self, timeout: float) -> bool:
        """See ``Cache.flush``."""
        try:
            self.flow.spawn(self.moves.drained()).result(timeout)
        except (TimeoutError, CancelledError, MisuseError):  # the last: it was closed meanwhile
            return False
        return True

    def _close(self) -> None:
        self._reaper.cancel()
        for tier in self.tiers.values():
            tier.close()
        self.flow.close()
        self.moves.close()
        self.arena.close()
