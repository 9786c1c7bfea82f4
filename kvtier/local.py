"""The Desk of this process: a cache's calls on the Depot that it shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from kvtier.catalog.catalog import LOT, Found
from kvtier.catalog.explain import ChunkPlace, End, Explanation, PartPlace, find_end
from kvtier.catalog.lease import Lease
from kvtier.catalog.sweep import Removed
from kvtier.depot import Depot
from kvtier.desk import Health, Issued, Match, Reserved
from kvtier.errors import MisuseError
from kvtier.flow import Saved
from kvtier.identity.geometry import Geometry
from kvtier.identity.namespace import Namespace
from kvtier.identity.record import PartName
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Arena
from kvtier.prefix import Prefix
from kvtier.retention import Term
from kvtier.seams import CancelledError, Future

T = TypeVar("T")

_LOOKED_AT: Final = 64  # chunks that explain looks at under one lock


class LocalDesk:
    """See Desk. owner: the number that the depot gave to the namespace."""

    def __init__(self, depot: Depot, namespace: Namespace, shape: Shape, owner: int) -> None:
        self.depot = depot
        self.catalog = depot.catalog
        self.moves = depot.moves
        self.metrics = depot.metrics
        self.owner = owner
        self.tiers = tuple(depot.numbers)
        self.number = next(depot.cache_numbers)
        self.leaving = False
        self._digest = namespace.digest
        self.shape = shape
        self._labels = [_label(namespace.geometry, part) for part in shape.names]

    @property
    def arena(self) -> Arena:
        """See Desk."""
        return self.depot.arena

    def arena_of(self, issued: Issued) -> int:
        """See Desk."""
        del issued
        return self.depot.arena.id

    def join(self, namespace: Namespace, shape: Shape, ranks: tuple[int, int]) -> LocalDesk:
        """See Desk."""
        del ranks
        return LocalDesk(self.depot, namespace, shape, self.depot.join(namespace, shape))

    # ---- match, lease, fetch

    def match(self, prefix: Prefix, *, counted: bool = True) -> Match:
        """See Desk."""
        if self.bypass:
            self.metrics.add("bypassed_matches", int(counted))
            return Match(prefix, 0)
        limit = prefix.limit
        found = self.catalog.match(prefix.names, self.shape, limit)
        self.metrics.add("match_tokens", len(prefix.tokens) if counted else 0)
        unknown = (
            found.chunks < len(prefix.names)
            and found.chunks * self.shape.chunk_tokens < limit
            and self.moves.asking.worth(prefix.names[found.chunks][0])
        )
        where = bytes(found.tiers)
        return Match(prefix, found.tokens, where, self.tiers, found.chunks, unknown)

    def lease(self, match: Match, first: int, seconds: float) -> Lease | None:
        """See Desk."""
        if self.bypass:
            return None
        names = match.prefix.names
        return self.catalog.lease(names, self.shape, first, match.tokens, seconds, whole=True)

    def fetch(
        self, match: Match, first: int, *, within: float, hold: float, pin: bool
    ) -> Future[Lease | None]:
        """See Desk."""
        number = self.number if pin else 0
        return self.depot.flow.spawn(self._brought(match, first, within, hold, number))

    async def _brought(
        self, match: Match, first: int, within: float, hold: float, pin: int
    ) -> Lease | None:
        """Fetch, unless this namespace goes without; a pin does not outlive its cache."""
        if self.bypass:
            return None
        found = Found(match.tokens, [], match.known)
        lease = await self.moves.fetch(
            match.prefix, first, found, ask=match.unknown, within=within, hold=hold, pin=pin
        )
        if lease is not None and lease.pinned and self.leaving:
            with lease:
                return None
        return lease

    def prefetch(self, match: Match, within: float) -> Future[int | None]:
        """See Desk."""
        if self.bypass:
            return self.depot.flow.spawn(_nothing())
        found = Found(match.tokens, [], match.known)
        work = self.moves.prefetch(match.prefix, found, ask=match.unknown, within=within)
        return self.depot.flow.spawn(work)

    # ---- plans

    def issue(self, lease: Lease) -> int:
        """See Desk."""
        return next(self.depot.plan_ids) if self.catalog.issue(lease, self.owner) else 0

    def reserve(
        self,
        prefix: Prefix,
        first: int,
        places: Sequence[Sequence[int]],
        kept: Sequence[Term],
    ) -> Reserved:
        """See Desk."""
        if self.bypass:
            return Reserved(0, [], 0)
        wanted = [
            [
                prefix.part(chunk, at, kept[chunk]) if kept else prefix.part(chunk, at)
                for at in positions
            ]
            for chunk, positions in enumerate(places, first)
        ]
        if behind := dict.fromkeys(prefix.outgrown(first)):
            wanted = [[one._replace(outgrown=one.name in behind) for one in c] for c in wanted]
            self.catalog.outgrown(behind)
        taken, refused = self.catalog.reserve(wanted)
        if refused:
            self.metrics.add("dropped_saves", refused, reason="busy")
        return Reserved(next(self.depot.plan_ids) if taken else 0, taken, refused)

    def settle(self, plan: int, issued: Issued, *, ok: bool) -> None:
        """See Desk."""
        del plan
        if isinstance(issued, Lease):
            self.catalog.settle(issued)
        else:
            self.moves.saved([Saved(part, slot, ok) for part, slot in issued])

    def loaded(self, match: Match, tiers: Mapping[str, int], first: int) -> None:
        """See Desk."""
        for tier, tokens in tiers.items():
            self.metrics.add("hit_tokens", int(tokens), tier=tier)
        if self.moves.counts_uses:
            self.moves.used([name for chunk in match.prefix.names[first:] for name in chunk])

    # ---- what an operator asks

    def invalidate(self, prefix: Prefix, first: int, timeout: float) -> Removed:
        """See Desk."""
        names = [name for chunk in prefix.names[first:] for name in chunk]
        parts = records = 0
        for start in range(0, len(names), LOT):
            lot = self.catalog.withdraw(names[start : start + LOT], "invalidated")
            parts, records = parts + lot[0], records + lot[1]
        if records:
            deleting = self.depot.flow.spawn(self.moves.sweeper.sweep_for(names))
            with contextlib.suppress(TimeoutError):
                records = _result(deleting, timeout)
        return Removed(parts, records)

    def purge(self, digest: bytes, timeout: float, progress: Callable[[int], None]) -> Removed:
        """See Desk."""
        work = self.depot.flow.spawn(self.moves.sweeper.purge(digest, progress))
        return _result(work, timeout)

    def clear(self, tier: str, timeout: float) -> None:
        """See Desk."""
        number = self.depot.numbers[tier]
        _result(self.depot.flow.spawn(self.moves.clear(number)), timeout)

    def flush(self, timeout: float) -> bool:
        """See Desk."""
        return self.depot.flush(timeout)

    def explain(self, prefix: Prefix) -> Explanation:
        """See Desk."""
        shape, names = self.shape, prefix.names
        chunks: list[ChunkPlace] = []
        for start in range(0, len(names), _LOOKED_AT):  # engine threads want the Catalog's lock
            some = names[start : start + _LOOKED_AT]
            chunks += self.catalog.places(some, self._labels, shape, start)
        usable, end = find_end(shape, chunks, prefix.limit)
        if self.bypass:
            usable, end = 0, End(0, "the namespace goes without its cache.")
        elif end.chunk is not None and any(not part.tiers for part in chunks[end.chunk].parts):
            end = End(end.chunk, end.why + self.moves.asking.asked(names[end.chunk][0]))
        if len(prefix.tokens) > len(names) * shape.chunk_tokens:
            rest = PartPlace("", (), reason="incomplete")
            first, stop = len(names) * shape.chunk_tokens, len(prefix.tokens)
            chunks.append(ChunkPlace(len(names), first, stop, (rest,)))
        return Explanation(len(prefix.tokens), usable, end, tuple(chunks))

    def figures(self) -> dict[str, float]:
        """See Desk."""
        self.catalog.figures()
        for tier in self.depot.tiers.values():
            tier.figures()
        return self.metrics.snapshot()

    def health(self) -> Health:
        """See Desk."""
        return Health(self.depot.troubles())

    @property
    def bypass(self) -> bool:
        """Whether the namespace goes without its cache: for all that share the depot."""
        return self._digest in self.depot.bypassed

    @bypass.setter
    def bypass(self, on: bool) -> None:
        if on:
            self.depot.bypassed[self._digest] = None
        else:
            self.depot.bypassed.pop(self._digest, None)

    def here(self) -> bool:
        """See Desk."""
        return self.depot.flow.here()

    def unpin(self) -> None:
        """See Desk. A pin that is on its way ends when it arrives."""
        self.leaving = True
        self.catalog.unpin(self.number)

    def leave(self) -> None:
        """See Desk."""
        self.depot.leave()


def _result(work: Future[T], timeout: float) -> T:
    """Wait for what runs on the flow loop. Raises MisuseError when that is closed meanwhile."""
    try:
        return work.result(timeout)
    except CancelledError:
        raise MisuseError("this cache is closed") from None


async def _nothing() -> int:
    """Bring up nothing."""
    return 0


def _label(geometry: Geometry, part: PartName) -> str:
    """Return the name of a part, as people are told it."""
    label = geometry.components[part.component].name
    if part.shards > 1:
        label += f" shard {part.shard}"
    return f"{label} stage {part.stage}" if part.stages > 1 else label
