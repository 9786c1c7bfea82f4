"""A purge of many parts is done in slices: nobody waits for all of it."""

from __future__ import annotations

import asyncio

from kvtier.catalog.catalog import LOT, Catalog
from kvtier.catalog.strays import Strays
from kvtier.catalog.sweep import Sweeper
from kvtier.testing.small_catalog import LMDB, SmallCatalog, chain
from kvtier.tiers.store import Capabilities, Status


class Disk:
    """A tier that forgets what it is told to."""

    capabilities = Capabilities()
    packs = False
    name = "disk"

    def __init__(self) -> None:
        self.store = self

    async def delete(self, names):
        return [Status.OK] * len(names)


def taken_over() -> list[int]:
    """Purge a namespace; return how many records were taken over at a time."""
    small, sizes = SmallCatalog(4), []
    owner = small.catalog.owner(b"its digest")
    for part in chain(3 * LOT):
        small.catalog.stored(part._replace(owner=owner), LMDB, 1)
    take = small.catalog.take_withdrawn

    def counted() -> dict[bytes, int]:
        found = take(LMDB)
        sizes.append(len(found))
        return found

    disk = Disk()
    strays = Strays(disk, counted)
    sweeper = Sweeper(small.catalog, {LMDB: disk}, {LMDB: strays}, small.clock)
    purged = asyncio.run(sweeper.purge(b"its digest", lambda parts: None))
    assert purged == (3 * LOT, 0, ())
    assert sum(sizes) == 3 * LOT
    small.close()
    return sizes


def test_what_the_stores_have_to_delete_is_taken_over_by_and_by():
    assert max(taken_over()) == LOT


def test_a_purge_in_one_piece_would_take_over_all_at_once(monkeypatch):
    whole = Catalog.withdraw_namespace

    def all_of_it(self, digest, start):
        names = []
        while start >= 0:
            lot, start = whole(self, digest, start)
            names += lot
        return names, start

    monkeypatch.setattr(Catalog, "withdraw_namespace", all_of_it)
    assert max(taken_over()) == 3 * LOT
