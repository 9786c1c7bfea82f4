"""Invalidate, purge, and what is kept for a time, over real tiers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import kvtier
from kvtier.cache import Cache
from kvtier.config import Config, TierConfig
from kvtier.errors import MisuseError, Unavailable
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.hands import Hands
from kvtier.testing.simhost import SharedMemory
from kvtier.testing.toy import BLOCK, CHUNK, CHUNK_BYTES, NAMESPACE, Toy, dram, opened, prompt
from kvtier.tiers.store import Status
from kvtier.transfer import CopyResult, CopyStatus

pytestmark = pytest.mark.everywhere

PROMPT = prompt(257, 1)
WITHIN = 20.0


class Stubborn(SharedMemory):
    """A shared store that deletes only when it likes."""

    willing = True

    def delete_many(self, ids):
        if not self.willing:
            return [Status.FAILED] * len(ids)
        return super().delete_many(ids)


def over(store: MemoryStore, clock=None, **changes) -> Cache:
    tier = TierConfig("memory", "", None, "through", store=store)
    more = {"clock": clock} if clock is not None else {}
    return Cache(Config(32 * CHUNK_BYTES, (tier,)), replace(NAMESPACE, **changes), **more)


def save(cache: Cache, tokens, **kwargs) -> None:
    """Save a prompt's chunks without an engine: whatever is in the slots."""
    prefix = cache.prefix(tokens)
    plan = cache.plan_save(prefix, range(len(prefix.names) * CHUNK // BLOCK), **kwargs)
    if plan is not None:
        cache.settle(plan, CopyResult(CopyStatus.OK))
    assert cache.flush(timeout=WITHIN)


def kept_in(store: MemoryStore) -> int:
    return sum(1 for _ in store.scan())


# --------------------------------------------------------------------------------------- invalidate


def test_what_is_invalidated_is_gone_from_all_tiers_and_comes_back_when_saved(folder):
    one = opened(dram(32), folder)
    one.save("a", PROMPT[:256])
    assert one.cache.invalidate(PROMPT, first=1, timeout=WITHIN) == (3, 0, ())
    assert one.cache.match(PROMPT).chunks == 1
    assert one.cache.figures()['kvtier_tier_parts{tier="lmdb"}'] == 1
    one.save("b", PROMPT[:256])
    one.cache.clear("dram")
    offered, loaded, exact = one.load("c", PROMPT)
    assert (offered, loaded.tokens, exact) == (256, 256, True)
    one.close()


def test_it_is_gone_after_a_restart(folder):
    one = opened(dram(32), folder)
    one.save("a", PROMPT[:256])
    assert one.cache.invalidate(PROMPT).parts == 4  # closing waits for the store
    one.close()
    two = opened(dram(32), folder)
    assert two.cache.match(PROMPT).chunks == 0
    assert two.cache.figures()['kvtier_tier_used_bytes{tier="lmdb"}'] == 0
    two.close()


def test_only_the_same_request_is_meant(toy):
    adapted = kvtier.Request(adapter=b"a" * 32)
    toy.save("a", PROMPT[:256])
    assert toy.cache.invalidate(PROMPT, request=adapted).parts == 0
    assert toy.cache.match(PROMPT).chunks == 4
    assert toy.cache.invalidate(toy.cache.prefix(PROMPT)) == (4, 0, ())
    assert toy.cache.match(PROMPT).chunks == 0


def test_a_load_under_way_ends_with_its_bytes(toy):
    toy.save("a", PROMPT[:256])
    assert toy.connector.match("b", PROMPT, 0).tokens == 256
    toy.cache.invalidate(PROMPT)
    toy.kv[:, :, 128:] = 0
    toy.connector.load("b", list(range(128, 144)))
    assert toy.until(lambda update: update.loaded).loaded[0].tokens == 256
    assert (toy.kv[:, :, 128:144] == toy.kv[:, :, :16]).all()
    toy.connector.finish("b")
    assert toy.cache.figures()["kvtier_leased_parts"] == 0
    assert toy.cache.figures()['kvtier_tier_used_bytes{tier="dram"}'] == 0


def test_a_shared_tier_deletes_what_this_cache_never_saw():
    store = SharedMemory()
    with over(store) as first:
        save(first, PROMPT)
        records = [(header, bytes(header.stored_bytes)) for header in store.scan()]
        assert len(records) == 4
        with over(Kept(store)) as second:
            assert second.match(PROMPT).unknown
            assert second.invalidate(PROMPT, timeout=WITHIN) == (0, 0, ())
    assert kept_in(store) == 0


class Kept(Stubborn):
    """The same records as another store, and not closed with this one."""

    def __init__(self, other: MemoryStore) -> None:
        super().__init__()
        self._records, self._guard = other._records, other._guard

    def close(self) -> None:
        """Leave the records to the other."""


def test_what_a_shared_tier_does_not_delete_is_neither_served_nor_forgotten():
    store = Stubborn()
    with over(store) as cache:
        save(cache, PROMPT)
        store.willing = False
        removed = cache.invalidate(PROMPT, timeout=WITHIN)
        assert removed == (4, 4, ())
        match = cache.match(PROMPT)
        assert (match.chunks, match.unknown) == (0, True)
        assert cache.fetch(match, timeout=WITHIN, deadline=1).result(WITHIN) is None
        assert kept_in(store) == 4
        store.willing = True
        assert cache.flush(timeout=WITHIN)
        assert kept_in(store) == 0


def test_a_shared_record_that_could_not_be_deleted_is_written_anew_and_served():
    store = Stubborn()
    with over(store) as cache:
        save(cache, PROMPT)
        store.willing = False
        cache.invalidate(PROMPT, timeout=WITHIN)
        save(cache, PROMPT)
        store.willing = True
        assert cache.flush(timeout=WITHIN)
        assert kept_in(store) == 4
        cache.clear("dram")
        assert cache.match(PROMPT).tiers == ("memory",) * 4


def test_a_local_tier_owes_the_bytes_until_they_are_deleted():
    """Its budget is never exceeded, whatever the index has forgotten."""
    store = Broken(9 * 4096)
    tier = TierConfig("memory", "", 5 * (CHUNK_BYTES + 256), "through", store=store)
    cache = Cache(Config(32 * CHUNK_BYTES, (tier,)), NAMESPACE)
    save(cache, PROMPT)
    assert kept_in(store) == 4
    store.willing = False
    assert cache.invalidate(PROMPT, timeout=WITHIN) == (4, 4, ())
    save(cache, prompt(257, 2))
    assert kept_in(store) <= 5
    store.willing = True
    save(cache, prompt(257, 3))
    assert kept_in(store) <= 5
    assert cache.match(prompt(257, 3)).chunks == 4
    cache.close()


class Broken(MemoryStore):
    """A local store that deletes only when it likes."""

    willing = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity=None)

    def delete_many(self, ids):
        if not self.willing:
            return [Status.FAILED] * len(ids)
        return super().delete_many(ids)


@pytest.mark.parametrize(
    ("tokens", "changes", "says"),
    [
        ("text", {}, "token ids"),
        ([1.5], {}, "integers"),
        ([-1], {}, "outside"),
        ([[1, 2]], {}, "one dimension"),
        ([1], {"first": -1}, "first chunk"),
        ([1], {"first": 0.5}, "first chunk"),
        ([1], {"timeout": -1}, "timeout"),
        ([1], {"timeout": math.nan}, "timeout"),
    ],
)
def test_what_cannot_be_invalidated_is_refused(toy, tokens, changes, says):
    with pytest.raises(MisuseError, match=says):
        toy.cache.invalidate(tokens, **changes)


def test_beyond_the_last_chunk_there_is_nothing(toy):
    toy.save("a", PROMPT[:256])
    assert toy.cache.invalidate(PROMPT, first=4) == (0, 0, ())
    assert toy.cache.invalidate([], timeout=1) == (0, 0, ())
    assert toy.cache.match(PROMPT).chunks == 4


# -------------------------------------------------------------------------------------------- purge


def test_a_purge_takes_its_own_namespace_and_no_other(folder):
    one = opened(dram(32), folder)
    other = one.cache.share(replace(NAMESPACE, model="other"))
    one.save("a", PROMPT[:256])
    save(other, PROMPT)
    told: list[int] = []
    assert one.cache.purge(progress=told.append, timeout=WITHIN) == (4, 0, ())
    assert told == [4]
    assert one.cache.match(PROMPT).chunks == 0
    assert other.match(PROMPT).chunks == 4
    assert one.cache.figures()['kvtier_tier_parts{tier="lmdb"}'] == 4
    assert one.cache.purge(other.namespace.digest, timeout=WITHIN) == (4, 0, ())
    assert other.match(PROMPT).chunks == 0
    other.close()
    one.close()


def test_a_purge_lists_what_others_wrote_to_a_shared_tier():
    store = SharedMemory()
    with over(store) as cache, over(Kept(store), model="other") as other:
        for seed in range(70):
            save(cache, prompt(257, seed))
        save(other, PROMPT)
        with over(Kept(store)) as second:
            told: list[int] = []
            assert second.purge(timeout=WITHIN, progress=told.append) == (280, 0, ())
            assert told == [256, 280]
        assert kept_in(store) == 4
        assert other.match(PROMPT).chunks == 4


def test_a_tier_that_cannot_be_listed_is_named():
    class Silent(SharedMemory):
        def scan(self):
            raise Unavailable("it does not answer")

    with over(Silent()) as cache:
        save(cache, PROMPT)
        assert cache.purge(timeout=WITHIN) == (4, 0, ("memory",))


@pytest.mark.parametrize("digest", [b"short", bytes(33), "0" * 32, 7])
def test_what_is_no_digest_is_refused(toy, digest):
    with pytest.raises(MisuseError, match="digest"):
        toy.cache.purge(digest)


# ------------------------------------------------------------------------- priorities and times


def test_what_is_kept_for_a_time_leaves_all_tiers_when_it_is_over():
    store, clock = SharedMemory(), Hands(1000.0)
    with over(store, clock) as cache:
        save(cache, PROMPT, retention=[kvtier.Retention(128, None, seconds=60)])
        clock.now += 59
        tick(cache)
        assert cache.match(PROMPT).chunks == 4
        clock.now += 1
        tick(cache)
        assert cache.match(PROMPT).chunks == 2
        assert cache.flush(timeout=WITHIN)
        assert kept_in(store) == 2


def tick(cache: Cache) -> None:
    cache._desk.depot.flow.spawn(cache._desk.moves.sweeper.expire()).result(WITHIN)


def test_the_reaper_sees_to_it(toy):
    save(toy.cache, PROMPT, retention=[kvtier.Retention(0, None, seconds=0.001)])
    toy.until(lambda _: not toy.cache.match(PROMPT).chunks)


def test_a_dear_prompt_outlives_the_usual_ones(toy):
    save(toy.cache, PROMPT, retention=[kvtier.Retention(0, None, priority=50)])
    for seed in range(10, 30):
        save(toy.cache, prompt(257, seed))
    assert toy.cache.match(PROMPT).chunks == 4


def test_saving_it_again_is_enough_to_make_it_dear(toy):
    save(toy.cache, PROMPT)
    save(toy.cache, PROMPT, retention=[kvtier.Retention(0, None, priority=50)])
    for seed in range(10, 30):
        save(toy.cache, prompt(257, seed))
    assert toy.cache.match(PROMPT).chunks == 4


def test_a_save_takes_nothing_but_retentions(toy: Toy):
    prefix = toy.cache.prefix(PROMPT)
    with pytest.raises(MisuseError, match=r"takes kvtier\.Retention"):
        toy.cache.plan_save(prefix, range(16), retention=[(0, 16)])
