"""H11: when nothing can be evicted the answer is a miss, at once, and nothing spins."""

from __future__ import annotations

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.testing.toy import BLOCK, CHUNK, prompt

ROOM = 4
TOKENS = ROOM * CHUNK


def leased(toy, tokens):
    lease = toy.cache.fetch(toy.cache.match(tokens), timeout=5, deadline=600).result(20)
    assert lease.chunks == ROOM
    return lease.release


def planned(toy, tokens):
    """A load whose copy has not ended."""
    with toy.cache.fetch(toy.cache.match(tokens), timeout=5, deadline=600).result(20) as lease:
        plan = toy.cache.plan_load(lease, list(range(TOKENS // BLOCK)))
    pages = toy.cache.bind(toy.kv, toy.device)
    return lambda: toy.cache.settle(plan, pages.execute(plan, ()).result(20))


def reserved(toy, tokens):
    """A save whose copy has not ended."""
    plan = toy.cache.plan_save(toy.cache.prefix(prompt(TOKENS, 9)), list(range(TOKENS // BLOCK)))
    assert len(plan.parts) == ROOM
    pages = toy.cache.bind(toy.kv, toy.device)
    return lambda: toy.cache.settle(plan, pages.execute(plan, ()).result(20))


def reading(toy, tokens):
    """A read that hangs in the tier below."""
    toy.disk.gate.clear()
    toy.cache.fetch(toy.cache.match(tokens), timeout=0.01, deadline=600).result(20)
    return toy.disk.gate.set


HOLDERS = {one.__name__: one for one in (leased, planned, reserved, reading)}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_pool_that_is_held_whole_answers_and_recovers(engines, disk, holder, monkeypatch):
    toy, held, wanted = engines(disk, chunks=ROOM), prompt(TOKENS + 1, 1), prompt(TOKENS + 1, 2)
    toy.disk = disk
    toy.save("one", held[:TOKENS])
    toy.save("two", wanted[:TOKENS])
    toy.cache.clear("dram")
    let_go = HOLDERS[holder](toy, held)
    assert toy.cache.figures()["kvtier_leased_parts"] >= ROOM

    asked = []
    hold = Catalog.hold_for_fetch

    def counted(self, *args, **kwargs):
        asked.append(len(args[0]))
        return hold(self, *args, **kwargs)

    monkeypatch.setattr(Catalog, "hold_for_fetch", counted)
    for _ in range(3):
        running = toy.cache.fetch(toy.cache.match(wanted), timeout=600, deadline=600)
        assert running.result(20) is None, "it does not wait for what nobody will give back"
        assert running.poll()
        other = toy.cache.prefix(prompt(TOKENS, 3))
        assert toy.cache.plan_save(other, list(range(TOKENS // BLOCK))) is None
    assert asked == [ROOM] * 3, "once for each question, not again and again"
    assert toy.cache.metrics.get("dropped_saves", reason="busy") == 3 * ROOM

    let_go()
    assert toy.cache.flush(timeout=20)
    toy.until(lambda update: not toy.cache.figures()["kvtier_leased_parts"])
    assert toy.load("three", wanted)[::2] == (TOKENS, True)
    assert toy.load("four", held)[::2] == (TOKENS, True)


@pytest.mark.parametrize("held", range(1, ROOM))
def test_a_pool_that_is_held_in_part_gives_what_fits(engines, disk, held):
    toy, other, wanted = engines(disk, chunks=ROOM), prompt(TOKENS + 1, 1), prompt(TOKENS + 1, 2)
    toy.save("one", other[:TOKENS])
    toy.save("two", wanted[:TOKENS])
    toy.cache.clear("dram")
    match = toy.cache.match(other[: held * CHUNK + 1])
    with toy.cache.fetch(match, timeout=5, deadline=600).result(20):
        assert toy.load("three", wanted)[::2] == (TOKENS - held * CHUNK, True)
    assert toy.load("four", wanted)[::2] == (TOKENS, True)


def test_an_engine_is_told_of_a_miss_and_goes_on(engines, disk):
    """By the connector: asked again at every step, it says pending once and then miss."""
    toy, held, wanted = engines(disk, chunks=ROOM), prompt(TOKENS + 1, 1), prompt(TOKENS + 1, 2)
    toy.save("one", held[:TOKENS])
    toy.save("two", wanted[:TOKENS])
    toy.cache.clear("dram")
    with toy.cache.fetch(toy.cache.match(held), timeout=5, deadline=600).result(20):
        assert toy.load("three", wanted) == (0, None, True)
        toy.save("four", prompt(TOKENS, 3))
    assert toy.load("five", prompt(TOKENS + 1, 3))[0] == 0
    assert toy.load("six", wanted)[::2] == (TOKENS, True)
