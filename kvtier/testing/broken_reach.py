"""Quotas, pins, prefetches and going without, each with one guard less."""

from __future__ import annotations

from typing import Any, Final

from kvtier.cache import Cache
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.lease import Leases
from kvtier.catalog.order import Order
from kvtier.catalog.pins import Pins
from kvtier.catalog.shelf import Room, Victims
from kvtier.flow import Moves
from kvtier.testing.inside import inside
from kvtier.testing.mutation import Mutation, Patch, collector

__all__ = ["REACH"]

REACH: Final[list[Mutation]] = []
_takes_away = collector(REACH)


@_takes_away("what is below a tenant's floor nobody else takes", "below its floor")
def take_what_is_below_a_floor() -> list[Patch]:
    def broken(self: Order, row: int, share: int | None, _by: int) -> bool:
        return share in (None, self._share(row))

    return [(Order, "_may_take", broken)]


@_takes_away("a tenant takes no slot above its ceiling", "above its ceiling")
def take_a_slot_above_the_ceiling() -> list[Patch]:
    return [(Victims, "_full", lambda _self, _nbytes: False)]


@_takes_away("a tier is written to up to a tenant's ceiling only", "above its ceiling")
def write_above_the_ceiling() -> list[Patch]:
    def broken(_self: Catalog, _tier: int, parts: Any) -> list[bool]:
        return [False for _ in parts]

    return [(Catalog, "over_ceilings", broken), (Room, "over_ceiling", _over_in_dram)]


def _over_in_dram(self: Room, share: int, tier: int, nbytes: int) -> bool:
    return not tier and _over_ceiling(self, share, tier, nbytes)


_over_ceiling = Room.over_ceiling


@_takes_away("pins hold half of DRAM at most", "more than half of DRAM")
def pin_all_of_dram() -> list[Patch]:
    return [(Pins, "fit", lambda _self, _parts: True)]


@_takes_away("a pin that ended counts no more", "are pinned, counted|bytes that pins hold")
def count_pins_for_ever() -> list[Patch]:
    return [(Pins, "drop", lambda _self, _rows: None)]


@_takes_away("a pin whose time is over is not renewed", "a pin was renewed|loaded|leased")
def renew_a_pin_that_is_over() -> list[Patch]:
    def broken(self: Leases, lease: Any, seconds: float) -> bool:
        lease.deadline = self._clock() + seconds
        return True

    return [(Leases, "renew", broken)]


@_takes_away("a prefetch holds nothing when it ends", "a lease is left|held for ever|are held")
def hold_what_was_prefetched() -> list[Patch]:
    fetch = Moves.fetch

    async def broken(self: Moves, *args: Any, **more: Any) -> Any:
        lease = await fetch(self, *args, **more)
        if lease is not None and more.get("ahead"):
            self._catalog._index.hold(lease.rows[0], 1)
        return lease

    return [(Moves, "fetch", broken)]


@_takes_away("a namespace that goes without matches nothing", "goes without has a match")
def match_although_it_goes_without() -> list[Patch]:
    match = Cache.match

    def broken(self: Cache, tokens: Any, request: Any = None) -> Any:
        with _Seen(self):
            return match(self, tokens, request)

    return [(Cache, "match", broken)]


class _Seen:
    """Lets a cache see itself as one that does not go without."""

    def __init__(self, cache: Cache) -> None:
        self._bypassed, self._digest = inside(cache).depot.bypassed, cache.namespace.digest
        self._on = self._digest in self._bypassed

    def __enter__(self) -> None:
        self._bypassed.pop(self._digest, None)

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._bypassed[self._digest] = None
