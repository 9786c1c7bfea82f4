"""H16: a request that is aborted while it loads gives back what it holds, once, and no more."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.catalog.index import NO_ROW
from kvtier.testing.toy import BLOCK, CHUNK, prompt

CHUNKS = 4
TOKENS = CHUNKS * CHUNK
BLOCKS = list(range(128, 128 + TOKENS // BLOCK))


@pytest.fixture
def toy(engines, disk):
    """An engine whose dram has room for one prompt, which lies below it."""
    one = engines(disk, chunks=CHUNKS)
    one.save("one", prompt(TOKENS))
    one.cache.clear("dram")
    yield one
    disk.gate.set()


def stalled(toy, disk):
    """Ask for a prompt whose read does not return."""
    disk.gate.clear()
    assert toy.connector.match("r", prompt(TOKENS + 1), 0).pending
    while toy.cache._desk.depot.arena.slots_in_use < CHUNKS:
        toy.connector.wait(0.01)


def save_other(toy):
    """Try to save another prompt; return whether there was room for it."""
    toy.save("other", prompt(TOKENS, 1))
    return toy.cache.match(prompt(TOKENS + 1, 1)).tokens == TOKENS


def test_slots_follow_a_read_that_nobody_waits_for(toy, disk):
    """(a) Aborted while pending; the read returns later, into slots that are still its own."""
    stalled(toy, disk)
    assert not toy.connector.finish("r"), "no block of the engine was in use"
    toy.cache.fetch(toy.cache.match(prompt(TOKENS + 1)), timeout=0.01, deadline=5).result(20)
    assert not save_other(toy), "its slots are not for others yet"
    disk.gate.set()
    assert toy.cache.flush(timeout=20)
    toy.until(lambda update: not toy.cache.figures()["kvtier_leased_parts"])
    assert save_other(toy)
    assert toy.load("two", prompt(TOKENS + 1, 1))[::2] == (TOKENS, True)
    assert toy.connector.poll() == type(toy.connector.poll())(), "and nothing is reported"


def test_a_read_that_never_returns_is_given_up_by_its_time(toy, disk):
    """(b) The waiter has its answer, and goes on without the tier."""
    stalled(toy, disk)
    match = toy.cache.match(prompt(TOKENS + 1))
    for _ in range(3):
        assert toy.cache.fetch(match, timeout=0.01, deadline=5).result(20) is None
    toy.connector.finish("r")
    disk.gate.set()
    toy.until(lambda update: not toy.cache.figures()["kvtier_leased_parts"])
    assert toy.load("two", prompt(TOKENS + 1))[::2] == (TOKENS, True)


def test_given_to_another_its_slots_would_be_overwritten(engines, disk, caplog, monkeypatch):
    """The twin: slots freed when the waiter gives up, while the read may still write."""
    caplog.set_level("CRITICAL", logger="kvtier")  # a traceback that is kept keeps the arena
    toy = engines(disk, chunks=CHUNKS, recount=False)
    toy.save("one", prompt(TOKENS))
    toy.cache.clear("dram")
    returned, read = threading.Event(), disk.read_many

    def reads(*call):
        found = read(*call)
        returned.set()
        return found

    monkeypatch.setattr(disk, "read_many", reads)
    stalled(toy, disk)
    toy.connector.finish("r")
    fetcher = toy.cache._desk.moves._fetcher

    async def free_now():
        for row in list(fetcher._reading):
            fetcher._end(row, NO_ROW, None)

    toy.cache._desk.depot.flow.spawn(free_now()).result(20)
    toy.compute(prompt(TOKENS, 1), range(TOKENS // BLOCK))
    toy.connector.save("other", prompt(TOKENS, 1), list(range(TOKENS // BLOCK)))
    toy.connector.finish("other")
    toy.until(lambda update: update.released)
    wanted = prompt(TOKENS + 1, 1)
    toy.until(lambda update: toy.cache.match(wanted).tokens == TOKENS)
    lease = toy.cache.lease(toy.cache.match(wanted), deadline=60)
    disk.gate.set()
    assert returned.wait(20)
    with lease:
        plan = toy.cache.plan_load(lease, BLOCKS)
    toy.cache.settle(plan, toy.cache.bind(toy.kv, toy.device).execute(plan, ()).result(20))
    mine = toy.kv[:, :, : TOKENS // BLOCK]
    assert not np.array_equal(toy.kv[:, :, BLOCKS], mine)


def offered(toy):
    offer = toy.connector.match("r", prompt(TOKENS + 1), 0)
    while offer.pending:
        toy.connector.wait(20)
        offer = toy.connector.match("r", prompt(TOKENS + 1), 0)
    assert offer.tokens == TOKENS


def loading(toy):
    offered(toy)
    toy.gate = threading.Event()
    toy.device.stream("load").enqueue(lambda: toy.gate.wait(20))
    toy.connector.load("r", BLOCKS)


def landed(toy):
    """The copy has ended, and the engine has not looked yet."""
    loading(toy)
    toy.gate.set()
    toy.connector.wait(20)


def too_late(toy):
    """The lease ended before the load: nothing is copied."""
    offered(toy)
    toy.connector._states["r"].lease.deadline = 0.0
    toy.connector.load("r", BLOCKS)


@pytest.mark.parametrize("when", [offered, loading, landed, too_late], ids=lambda f: f.__name__)
@pytest.mark.parametrize("twice", [False, True])
def test_aborted_at_any_point_its_blocks_come_back_once(toy, when, twice):
    """twice: a request of the same name begins at once, and is told nothing of the first."""
    when(toy)
    keep = toy.connector.finish("r")
    assert keep == (when in (loading, landed))
    if twice:
        toy.connector.match("r", prompt(TOKENS + 1, 5), 0)
    if keep:
        toy.gate.set()
        update = toy.until(lambda update: update.released)
        assert (update.loaded, update.released) == ((), ("r",))
    toy.kv[:, :, BLOCKS] = 7  # the blocks are another's now
    for _ in range(3):
        assert toy.connector.poll() == type(toy.connector.poll())()
    toy.connector.finish("r")
    assert (toy.kv[:, :, BLOCKS] == 7).all()
    assert toy.cache.figures()["kvtier_leased_parts"] == 0
