"""The Desk: what one cache asks of the catalog of its namespace, here or in a daemon.

The Cache checks what callers pass, and builds plans; its Desk answers. ``kvtier.local`` answers
from this process, ``kvtier.daemon.client`` over a Unix socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.catalog.catalog import Part
from kvtier.catalog.explain import Explanation
from kvtier.catalog.lease import Lease
from kvtier.catalog.sweep import Removed
from kvtier.identity.namespace import Namespace
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Memory, Slot
from kvtier.metrics import Metrics
from kvtier.prefix import Prefix
from kvtier.retention import Term
from kvtier.seams import Future


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt the tiers have. A value: it holds nothing and may go stale.

    tokens: usable, a multiple of the engine's block, below the prompt's length. chunks: those
    that cover them; tiers: for each chunk, the slowest tier that one of its parts needs: a byte
    in ``where``, its place in ``stack``, which names all tiers, DRAM first.
    known: chunks, from the first, that the index knows, usable or not. unknown: a shared tier may
    have more; ``fetch`` asks it. pending: a daemon has not answered yet; ask again.
    """

    prefix: Prefix
    tokens: int
    where: bytes = b""
    stack: tuple[str, ...] = ()
    known: int = 0
    unknown: bool = False
    pending: bool = False

    @property
    def chunks(self) -> int:
        """Chunks that cover the usable tokens."""
        return len(self.where)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names, chunk by chunk."""
        return tuple(map(self.stack.__getitem__, self.where))


@dataclass(frozen=True, slots=True)
class Health:
    """How a cache is. troubles: what of it is not served, and why, by the name of the tier.

    ``daemon`` stands there for all of it, while a daemon does not answer.
    """

    troubles: Mapping[str, str]

    @property
    def status(self) -> str:
        """``ok``, or ``degraded``: the engine goes on, with what is left."""
        return "degraded" if self.troubles else "ok"


Issued = Lease | list[tuple[Part, Slot]]
"""What a plan still holds: a load its lease, a save the slots it fills."""


class Reserved(NamedTuple):
    """Slots for a save. plan: its id; refused: chunks that found no room."""

    plan: int
    taken: list[tuple[Part, Slot]]
    refused: int


class Desk(Protocol):
    """One cache's. Safe from any thread. Where nothing else is said, calls do not wait.

    owner: the namespace, as its catalog numbers it. tiers: their names, DRAM first.
    """

    metrics: Metrics
    owner: int
    tiers: tuple[str, ...]
    bypass: bool

    @property
    def arena(self) -> Memory:
        """The memory of the slots."""
        ...

    def arena_of(self, issued: Issued) -> int:
        """Return the arena that a plan's slots are in."""
        ...

    def join(self, namespace: Namespace, shape: Shape, ranks: tuple[int, int]) -> Desk:
        """See ``Cache.share``. ranks: shards, and stages. May wait."""
        ...

    def match(self, prefix: Prefix, *, counted: bool = True) -> Match:
        """See ``Cache.match``. counted: as a request; the cache may look for itself, too."""
        ...

    def lease(self, match: Match, first: int, seconds: float) -> Lease | None:
        """See ``Cache.lease``."""
        ...

    def fetch(
        self, match: Match, first: int, *, within: float, hold: float, pin: bool
    ) -> Future[Lease | None]:
        """See ``Cache.fetch`` and ``Cache.pin``."""
        ...

    def prefetch(self, match: Match, within: float) -> Future[int | None]:
        """See ``Cache.prefetch``."""
        ...

    def issue(self, lease: Lease) -> int:
        """Note that a plan of the lease goes out; return its id, 0 when the lease has ended.

        Raises MisuseError for a lease of another cache.
        """
        ...

    def reserve(
        self,
        prefix: Prefix,
        first: int,
        places: Sequence[Sequence[int]],
        kept: Sequence[Term],
    ) -> Reserved:
        """Hand out slots for the parts at `places` of chunks from `first` on.

        places: for each chunk, positions in the shape. kept: of all chunks from the prompt's
        first, or none.
        """
        ...

    def settle(self, plan: int, issued: Issued, *, ok: bool) -> None:
        """Note that a plan's copies have ended everywhere. ok: whether what it saved is whole."""
        ...

    def loaded(self, match: Match, tiers: Mapping[str, int], first: int) -> None:
        """See ``Cache.loaded``."""
        ...

    def invalidate(self, prefix: Prefix, first: int, timeout: float) -> Removed:
        """See ``Cache.invalidate``. Waits `timeout` seconds at most."""
        ...

    def purge(self, digest: bytes, timeout: float, progress: Callable[[int], None]) -> Removed:
        """See ``Cache.purge``. Waits."""
        ...

    def clear(self, tier: str, timeout: float) -> None:
        """See ``Cache.clear``. Waits."""
        ...

    def flush(self, timeout: float) -> bool:
        """See ``Cache.flush``. Waits."""
        ...

    def explain(self, prefix: Prefix) -> Explanation:
        """See ``Cache.explain``."""
        ...

    def figures(self) -> dict[str, float]:
        """See ``Cache.figures``."""
        ...

    def health(self) -> Health:
        """See ``Cache.health``."""
        ...

    def here(self) -> bool:
        """Say whether the calling thread is one that those who wait here need."""
        ...

    def unpin(self) -> None:
        """End the pins of this cache."""
        ...

    def leave(self) -> None:
        """End what this cache asks here. Waits, bounded, for what it saved."""
        ...
