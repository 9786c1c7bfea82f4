"""A tier that is opened late: what its Store has by then is indexed, and paid for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvtier import opening
from kvtier.catalog.catalog import Parts
from kvtier.catalog.strays import Strays
from kvtier.clock import monotonic
from kvtier.config import load_store, store_types
from kvtier.identity.record import CODEC_LOSSLESS, RECORD_ID_BYTES
from kvtier.metrics import Metrics
from kvtier.seams import ThreadFlow
from kvtier.testing.records import make_record
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain
from kvtier.testing.small_spill import Disk
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Tier
from kvtier.tiers.unopened import UnopenedStore


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let nobody wait for the next attempt."""
    monkeypatch.setattr(opening, "AGAIN_SECONDS", 0.0)


def columns(parts) -> Parts:
    """Return parts as a Store lists them."""
    return Parts(
        [part.name for part in parts],
        b"".join(part.parent or bytes(RECORD_ID_BYTES) for part in parts),
        np.array([part.depth for part in parts], np.int32),
        np.array([part.nbytes for part in parts], np.int64),
        np.array([part.owner for part in parts], np.uint16),
        np.array([part.nbytes for part in parts], np.int64),
    )


@pytest.mark.parametrize("noted", [True, False])
def test_what_is_withdrawn_just_then_is_not_indexed(monkeypatch, noted):
    """The twin, in which nobody notes it meanwhile, has it again."""
    small, parts = SmallCatalog(4), chain(2)
    catalog = small.catalog

    class Sly:
        def __contains__(self, name):
            catalog.withdraw([name], "invalidated")
            return False

    if not noted:
        monkeypatch.setattr(catalog, "watch", dict)
    asyncio.run(opening._take_in(columns(parts), LMDB, catalog, Sly()))
    assert small.found(parts) == ([] if noted else [LMDB] * 2)
    small.close()


def test_what_was_withdrawn_before_is_not_indexed_but_paid_for():
    small, parts = SmallCatalog(4), chain(3)
    small.catalog._shelves[LMDB].unlisted = True
    small.catalog.withdraw([parts[2].name], "invalidated")
    tier: Any = Disk(small.clock)
    strays = Strays(tier, functools.partial(small.catalog.take_withdrawn, LMDB))
    assert (len(strays), strays.nbytes) == (1, 0)
    asyncio.run(opening._take_in(columns(parts), LMDB, small.catalog, strays))
    assert small.found(parts) == [LMDB] * 2
    assert (len(strays), strays.nbytes) == (1, PART_BYTES)
    asyncio.run(strays.delete({}))
    assert (len(strays), strays.nbytes) == (0, 0)
    small.close()


@pytest.mark.parametrize("step", ["_take_in", "take"])
def test_what_fails_once_it_is_open_is_said_and_tried_again(tmp_path, monkeypatch, step):
    """Each time it is opened anew: the attempt before has let go of it, and of its lock."""
    small, flow, opened = SmallCatalog(4), ThreadFlow(), []
    kind = load_store(store_types()["lmdb"])

    def opens():
        opened.append(kind.open(str(tmp_path / "kv"), 16 << 20, {}))
        return opened[-1]

    tier = Tier("lmdb", UnopenedStore(kind, opens, "away"), flow, Metrics(), monotonic)
    place, name = (opening, step) if step == "_take_in" else (tier, step)
    sound, troubles = getattr(place, name), []

    def fails(*args):
        if len(opened) == 3:
            monkeypatch.setattr(place, name, sound)
            return sound(*args)
        troubles.append(tier.trouble)
        raise ValueError("a defect")

    monkeypatch.setattr(place, name, fails)
    flow.spawn(opening.open_late(LMDB, tier, small.catalog, Strays(tier))).result(20)
    assert troubles == ["open: away", "open: ValueError: a defect"]
    assert (tier.trouble, tier.available) == ("", True)
    assert tier.store is opened[2]
    tier.close()
    flow.close()
    small.close()


def test_it_ends_with_its_tier(caplog):
    small, flow = SmallCatalog(4), ThreadFlow()
    unopened = UnopenedStore(load_store(store_types()["lmdb"]), lambda: None, "away")
    tier = Tier("lmdb", unopened, flow, Metrics(), monotonic)
    tier.close()
    flow.spawn(opening.open_late(LMDB, tier, small.catalog, Strays(tier))).result(20)
    assert "closed" not in caplog.text
    flow.close()
    small.close()


def test_what_a_codec_left_is_charged_as_the_store_that_is_opened_says(tmp_path):
    """The Store in whose place it comes does not know that it takes other room than raw bytes."""
    small, raw = SmallCatalog(4), make_record(0, 1_400_000)
    header = structs.replace(raw.header, codec=CODEC_LOSSLESS, raw_bytes=2_000_000)
    kind, flow = load_store(store_types()["lmdb"]), ThreadFlow()
    unopened = UnopenedStore(kind, lambda: None, "no such device")
    tier = Tier("lmdb", unopened, flow, Metrics(), monotonic)
    with contextlib.closing(kind.open(str(tmp_path / "kv"), 16 << 20, {})) as store:
        assert store.write_many([Write(header, raw.data)]) == [Status.OK]
        parts = opening.listed(small.catalog, tier, store, {})
        assert parts.charged.tolist() == [store.encoded_footprint(1_400_000)]
        assert store.encoded_footprint(1_400_000) > kind.footprint(1_400_000)
    tier.close()
    flow.close()
    small.close()
