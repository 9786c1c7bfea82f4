"""What a Cache holds, for how long, and what it says to misuse."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvtier
from kvtier.copyplan import CopyPlan
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.record import checksum
from kvtier.testing.toy import (
    NAMESPACE,
    dram,
    opened,
    prompt,
)
from kvtier.transfer import CopyResult, CopyStatus

pytestmark = pytest.mark.everywhere

# ------------------------------------------------------------------------------- holds and time


def test_a_full_arena_answers_at_once_and_recovers(folder):
    """H11: every slot leased, so a fetch gives nothing, quickly; a release heals it."""
    one = opened(dram(4), folder)
    first, second = prompt(257, 1), prompt(257, 2)
    one.save("a", first[:256])
    one.save("b", second[:256])
    match = one.cache.match(first)
    lease = one.cache.fetch(match, timeout=5, deadline=60).result(20)
    assert lease.chunks == 4
    begin, used = time.monotonic(), time.process_time()
    assert one.cache.fetch(one.cache.match(second), timeout=0.2, deadline=60).result(20) is None
    assert time.monotonic() - begin < 2
    assert time.process_time() - used < 0.5
    lease.release()
    assert one.load("c", second)[0] == 256
    one.close()


def test_a_request_that_never_loads_frees_its_lease_when_it_ends(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    for turn in range(200):
        assert toy.connector.match(f"r{turn}", tokens, 0).tokens == 256
        toy.connector.finish(f"r{turn}")
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


@pytest.mark.inside("lets a deadline pass")
def test_a_lease_that_ended_before_the_load_is_taken_anew(toy):
    """A request may wait for blocks longer than a lease lasts; its bytes are there all the same."""
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    assert toy.connector.match("b", tokens, 0).tokens == 256
    toy.connector._states["b"].lease.deadline = 0.0
    toy.cache._desk.catalog.expire()
    assert toy.load("b", tokens)[1].tokens == 256


@pytest.mark.inside("counts slots")
def test_a_plan_that_does_not_fit_the_blocks_holds_nothing(toy):
    tokens = prompt(257)
    with pytest.raises(ProtocolError, match="of 256"):
        toy.connector.save("a", tokens[:256], list(range(250, 266)))
    toy.connector.finish("a")
    toy.cache.flush(timeout=5)
    assert toy.cache._desk.depot.arena.slots_in_use == 0
    toy.save("b", tokens[:256])
    assert toy.connector.match("c", tokens, 0).tokens == 256
    with pytest.raises(ProtocolError, match="of 256"):
        toy.connector.load("c", list(range(250, 266)))
    toy.connector.finish("c")
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


@pytest.mark.inside("counts slots")
def test_a_plan_whose_memory_cannot_be_pinned_holds_nothing(toy, monkeypatch):
    def refuse(*_, **__):
        raise ConfigError("CUDA does not pin the arena of the daemon that came after")

    tokens = prompt(257)
    with monkeypatch.context() as patch:
        patch.setattr(toy.connector._pages, "execute", refuse)
        with pytest.raises(ConfigError, match="does not pin"):
            toy.connector.save("a", tokens[:256], list(range(16)))
    toy.connector.finish("a")
    toy.cache.flush(timeout=5)
    assert toy.cache._desk.depot.arena.slots_in_use == 0


@pytest.mark.inside("stands in for the catalog")
def test_clearing_ends_while_others_go_on_saving(toy, monkeypatch):
    monkeypatch.setattr(toy.cache._desk.catalog, "clear", lambda *_: ["just saved"])
    toy.cache.clear("dram", timeout=5)


@pytest.mark.inside("lets memory run out")
def test_a_part_that_cannot_be_sealed_gives_its_slot_back(toy, monkeypatch):
    tokens = prompt(257)
    left = [3]

    def no_memory(data):
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return checksum(data)

    monkeypatch.setattr("kvtier.flow.checksum", no_memory)
    toy.save("a", tokens[:256])
    assert toy.cache._desk.depot.arena.slots_in_use == 2
    assert toy.cache.metrics.get("dropped_saves", reason="failed") == 1
    assert toy.cache.metrics.get("dropped_saves", reason="orphan") == 1
    toy.save("b", tokens[:256])
    assert toy.load("c", tokens)[2]
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


def test_blocks_are_kept_while_a_save_reads_them(toy):
    """H15: a preempted request's blocks are not for others until its save is done."""
    tokens = prompt(257)
    toy.compute(tokens, range(16))
    gate = threading.Event()
    toy.device.stream("store").enqueue(lambda: gate.wait(10))
    toy.connector.save("a", tokens[:256], list(range(16)))
    assert toy.connector.finish("a")
    assert toy.connector.poll().released == ()
    gate.set()
    toy.until(lambda update: update.released == ("a",))
    toy.cache.flush(timeout=20)
    assert toy.load("b", tokens)[2]


def test_reusing_blocks_too_early_would_store_the_wrong_bytes(toy):
    """The twin: what `finish` returning True is for."""
    tokens = prompt(257)
    toy.compute(tokens, range(16))
    gate = threading.Event()
    toy.device.stream("store").enqueue(lambda: gate.wait(10))
    toy.connector.save("a", tokens[:256], list(range(16)))
    toy.connector.finish("a")
    toy.kv[:, :, :16] = 7  # another request writes before `released`
    gate.set()
    toy.until(lambda update: update.released == ("a",))
    toy.cache.flush(timeout=20)
    assert not toy.load("b", tokens)[2]


def test_an_aborted_load_reports_its_blocks_once(toy):
    """H16: aborted while loading, the blocks come back exactly once, after the copy."""
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    gate = threading.Event()
    toy.device.stream("load").enqueue(lambda: gate.wait(10))
    assert toy.connector.match("b", tokens, 0).tokens == 256
    toy.connector.load("b", list(range(128, 144)))
    assert toy.connector.finish("b")
    assert toy.connector.poll() == type(toy.connector.poll())()
    gate.set()
    update = toy.until(lambda update: update.released)
    assert update.released == ("b",)
    assert update.loaded == ()
    assert toy.connector.poll().released == ()
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


def test_a_failed_copy_is_a_load_of_nothing(toy, monkeypatch):
    """H02: a copy that fails is reported, and claims no block."""
    tokens = prompt(257)
    toy.save("a", tokens[:256])

    def broken(*_args, **_kwargs):
        raise OSError("the link is down")

    monkeypatch.setattr("kvtier.device.cpu._copy", broken)
    assert toy.connector.match("b", tokens, 0).tokens == 256
    toy.connector.load("b", list(range(128, 144)))
    assert toy.until(lambda update: update.loaded).loaded[0].tokens == 0
    toy.connector.finish("b")
    monkeypatch.undo()
    assert toy.load("c", tokens)[2]


def test_a_failed_gather_is_never_stored(toy, monkeypatch):
    """H01: what did not copy is not visible, and can be saved again."""
    tokens = prompt(257)

    def broken(*_args, **_kwargs):
        raise OSError("the link is down")

    monkeypatch.setattr("kvtier.device.cpu._copy", broken)
    toy.save("a", tokens[:256])
    monkeypatch.undo()
    assert toy.load("b", tokens)[0] == 0
    toy.save("c", tokens[:256])
    assert toy.load("d", tokens)[2]


# -------------------------------------------------------------------------------- plans, misuse


def test_a_plan_crosses_as_bytes_and_is_settled_once(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    match = toy.cache.match(tokens)
    lease = toy.cache.lease(match, deadline=60)
    plan = toy.cache.plan_load(lease, list(range(128, 144)))
    again = CopyPlan.decode(bytes(plan))
    assert again == plan
    pages = toy.cache.bind(toy.kv, toy.device)
    result = pages.execute(again, after=()).result(20)
    assert result == CopyResult(CopyStatus.OK, 256)
    toy.cache.settle(again, result)
    with pytest.raises(MisuseError):
        toy.cache.settle(again, result)
    lease.release()
    assert toy.cache.figures()["kvtier_leased_parts"] == 0


def test_a_plan_that_timed_out_is_not_settled(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    lease = toy.cache.lease(toy.cache.match(tokens), deadline=60)
    plan = toy.cache.plan_load(lease, list(range(128, 144)))
    with pytest.raises(MisuseError, match="not ended"):
        toy.cache.settle(plan, CopyResult(CopyStatus.TIMEOUT))
    toy.cache.settle(plan, CopyResult(CopyStatus.FAILED))
    lease.release()


def test_loading_more_than_was_leased_is_misuse(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    lease = toy.cache.lease(toy.cache.match(tokens), deadline=60)
    for blocks, start in ((17, None), (4, 8), (4, 208)):
        with pytest.raises(MisuseError):
            toy.cache.plan_load(lease, list(range(blocks)), start=start)
    lease.release()


@pytest.mark.inside("counts slots")
def test_a_block_table_that_is_too_short_is_misuse(toy):
    """Or the rest of a slot would be stored as it happens to be, under the chunk's name."""
    with pytest.raises(MisuseError, match="15 blocks do not hold 4 chunks"):
        toy.cache.plan_save(toy.cache.prefix(prompt(257)), list(range(15)))
    assert toy.cache._desk.depot.arena.slots_in_use == 0


def test_a_block_before_the_first_is_refused(toy):
    plan = toy.cache.plan_save(toy.cache.prefix(prompt(65)), [0, 1, -2, 3])
    pages = toy.cache.bind(toy.kv, toy.device)
    with pytest.raises(ProtocolError, match="blocks -2 to 3 of 256"):
        pages.execute(plan, after=())
    toy.cache.settle(plan, CopyResult(CopyStatus.FAILED))


def test_after_close_every_call_says_so(toy):
    toy.cache.close()
    with pytest.raises(MisuseError, match="closed"):
        toy.cache.match(prompt(100))
    toy.cache.close()


def test_an_engine_may_end_its_copies_after_the_cache_has_closed(toy):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    gate = threading.Event()
    for role in ("store", "load"):
        toy.device.stream(role).enqueue(lambda: gate.wait(10))
    toy.compute(prompt(129, 1), range(16))
    assert toy.connector.match("c", tokens, 0).tokens == 256
    toy.connector.load("c", list(range(128, 144)))
    toy.connector.save("b", prompt(129, 1)[:128], list(range(8)))
    toy.cache.close()
    gate.set()
    assert toy.until(lambda update: update.loaded).loaded[0].tokens == 256
    toy.connector.close()
    toy.cache.close()


def test_threads_that_close_together_close_once(toy):
    with ThreadPoolExecutor(8) as pool:
        for closing in [pool.submit(toy.cache.close) for _ in range(8)]:
            assert closing.result(30) is None


@pytest.mark.inside("lets a flush fail")
def test_a_close_whose_flush_fails_still_closes(toy, monkeypatch):
    monkeypatch.setattr(toy.cache._desk.depot, "flush", lambda timeout: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        toy.cache.close()
    assert toy.cache._desk.depot.arena.closed
    assert not [one for one in threading.enumerate() if one.name == "kvtier-flow"]


def test_a_load_that_ends_after_the_cache_is_closed_raises_nothing(tmp_path):
    """P2: with a tier that admits on second touch, a load's end offers chunks to it."""
    one = opened(dram(8), f"lmdb:{tmp_path}/kv?capacity=64MiB&admission=second-touch")
    tokens = prompt(257)
    one.save("a", tokens[:256])
    assert one.connector.match("b", tokens, 0).tokens == 256
    one.connector.load("b", list(range(128, 144)))
    one.cache.close()
    assert one.until(lambda update: update.loaded).loaded[0].tokens == 256
    one.device.close()


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (["dram:1KiB"], "below one chunk"),
        (["dram:900TiB"], "available"),
        (["lmdb:/somewhere?capacity=1GiB"], "begins with one dram"),
        (["dram:1MiB", "lmbd:/x?capacity=1GiB"], "did you mean 'lmdb'"),
        (["dram:1MiB", "lmdb:/proc/nowhere?capacity=1GiB"], "/proc"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing_open(urls, words):
    with pytest.raises(ConfigError, match=words):
        kvtier.open(*urls, namespace=NAMESPACE)


def test_blocks_of_another_shape_are_refused(toy):
    for shape in ((2, 2, 8, 32, 2, 8), (2, 2, 8, 16, 2, 4), (3, 2, 8, 16, 2, 8)):
        with pytest.raises(ConfigError):
            toy.cache.bind(np.zeros(shape, np.uint16), toy.device)
