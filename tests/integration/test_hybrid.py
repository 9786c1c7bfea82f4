"""Models of several kinds of layers, and engines of several ranks, on a real Cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import asking
from kvtier.catalog.probe import Ends, ends
from kvtier.config import Config, TierConfig
from kvtier.copyplan import CopyPlan
from kvtier.device.cpu import CpuDevice
from kvtier.identity.geometry import stage_layers
from kvtier.identity.shape import Shape
from kvtier.plans import ABSENT
from kvtier.testing.simhost import PackedMemory
from kvtier.testing.toy import prompt
from kvtier.tiers.store import Status

pytestmark = pytest.mark.everywhere

BLOCK, CHUNK, BLOCKS, PLACES = 4, 16, 64, 16
FULL = kvtier.Component(2, 2, 8)
WINDOW = kvtier.Component(3, 2, 4, name="window", needs=kvtier.Needs.TRAILING, window=20)
STATE = kvtier.Component(1, 2, 10, planes=1, name="state", needs=kvtier.Needs.LAST)
LATENT = kvtier.Component(4, 1, 6, planes=1, name="latent", replicated=True)
HYBRID = (FULL, WINDOW, STATE)
TOKENS = 6 * CHUNK
POISON = 0xABAB


class Rank:
    """One rank's memory. What a block or a place holds says which tokens it is of."""

    def __init__(self, cache: kvtier.Cache, shard: int = 0, stage: int = 0) -> None:
        shards, stages = cache.ranks
        self.kv: list[np.ndarray] = []
        for one in cache.geometry.components:
            heads = one.heads if one.replicated else max(one.heads // shards, 1)
            layers = len(stage_layers(one, stage, stages))
            state = one.needs is kvtier.Needs.LAST
            rows = (PLACES,) if state else (BLOCKS, BLOCK)
            self.kv.append(np.zeros((layers, one.planes, *rows, heads, one.head_size), np.uint16))
        self.device = CpuDevice()
        self.pages = cache.bind(self.kv, self.device, shard=shard, stage=stage)
        self._salt = 1000 * (2 * stage + shard)

    def fill(self, component: int, block: int, mark: int, *, salted: bool = True) -> None:
        self.kv[component][:, :, block] = mark + self._salt * salted

    def holds(self, component: int, block: int, mark: int, *, salted: bool = True) -> bool:
        return bool((self.kv[component][:, :, block] == mark + self._salt * salted).all())

    def close(self) -> None:
        self.device.close()


@pytest.fixture
def opened(tmp_path) -> Iterator[Any]:
    """Open caches, and close all that is open at the end."""
    closing: list[Any] = []

    def opener(
        *components: kvtier.Component, dram: str = "1MiB", store: Any = None, **ranks: int
    ) -> Any:
        geometry = kvtier.Geometry(components, "bfloat16", (BLOCK,), CHUNK)
        namespace = kvtier.Namespace("hybrid", geometry)
        tiers: list[Any] = [f"dram:{dram}", f"lmdb:{tmp_path}/kv?capacity=64MiB&admission=through"]
        if store is not None:
            tiers = [Config(1 << 20, (TierConfig("memory", "", None, "through", store=store),))]
        cache = kvtier.open(*tiers, namespace=namespace, **ranks)
        shards, stages = cache.ranks
        members = [Rank(cache, *at) for at in itertools.product(range(shards), range(stages))]
        closing.extend((cache, *members))
        return cache, members

    yield opener
    for one in closing:
        one.close()


def copy(cache: kvtier.Cache, ranks: Sequence[Rank], plan: CopyPlan) -> None:
    results = [rank.pages.execute(plan, ()).result(20) for rank in ranks]
    assert {result.status.value for result in results} == {"ok"}
    cache.settle(plan, results[0])
    assert cache.flush(timeout=20)


def save(cache: kvtier.Cache, ranks: Sequence[Rank], tokens: Any, states: Sequence[int]) -> None:
    """Save a prompt of a hybrid model, with states after the chunks that are named."""
    blocks = list(range(len(tokens) // BLOCK))
    places = [chunk if chunk in states else ABSENT for chunk in range(len(tokens) // CHUNK)]
    for rank, block in itertools.product(ranks, blocks):
        rank.fill(0, block, 1 + block)
        rank.fill(1, block, 101 + block)
    for rank, chunk in itertools.product(ranks, states):
        rank.fill(2, chunk, 201 + chunk)
    plan = cache.plan_save(cache.prefix(tokens), [blocks, blocks, places])
    assert plan is not None
    copy(cache, ranks, plan)


def load(cache: kvtier.Cache, ranks: Sequence[Rank], tokens: Any) -> int:
    """Load what there is, into fresh blocks; check it all, and return its tokens."""
    match = cache.match(tokens)
    lease = cache.fetch(match, timeout=20, deadline=60).result(20)
    if lease is None:
        return 0
    count = lease.tokens // BLOCK
    needed = max(lease.tokens - WINDOW.window, 0) // CHUNK * CHUNK // BLOCK
    into = list(range(32, 32 + count))
    window = [block if at >= needed else ABSENT for at, block in enumerate(into)]
    for rank in ranks:
        for kv in rank.kv:
            kv[:, :, 8:] = POISON if kv is rank.kv[2] else kv[:, :, 8:]
            kv[:, :, 32:] = POISON
    with lease:
        plan = cache.plan_load(lease, [into, window, [9]])
    copy(cache, ranks, plan)
    last = lease.tokens // CHUNK - 1
    for rank in ranks:
        assert all(rank.holds(0, 32 + at, 1 + at) for at in range(count))
        assert all(rank.holds(1, 32 + at, 101 + at) for at in range(needed, count))
        assert all((rank.kv[1][:, :, 32 + at] == POISON).all() for at in range(needed))
        assert rank.holds(2, 9, 201 + last)
    return lease.tokens


def lose(cache: kvtier.Cache, tokens: Any, chunk: int, at: int) -> None:
    """Lose one part in every tier."""
    catalog = cache._desk.catalog
    row = catalog._index.find(cache.prefix(tokens).names[chunk][at])
    for tier in range(2):
        catalog.lost(row, tier)


def test_a_prefix_ends_where_a_state_is_stored(opened):
    cache, ranks = opened(*HYBRID)
    save(cache, ranks, prompt(TOKENS), states=[1, 3, 5])
    for length, usable in ((TOKENS + 1, 96), (96, 64), (65, 64), (64, 32), (33, 32), (32, 0)):
        assert load(cache, ranks, prompt(TOKENS + 1)[:length]) == usable
    cache.clear("dram")
    assert load(cache, ranks, prompt(TOKENS + 1)) == 96, "read back from below"


class Counted(PackedMemory):
    """A tier that hosts share. asked: how many look-ups each call had."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def contains_many(self, ids: Sequence[bytes]) -> list[Status]:
        self.asked.append(len(ids))
        return super().contains_many(ids)


@pytest.mark.inside("a store that hosts share")
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("states", "usable"), [([1, 3, 5], 96), ([1], 32), ([], 0)])
def test_what_one_host_has_another_finds_in_few_look_ups(opened, states, usable, shards):
    """Of each window and state one rank's part is looked for, at the end of what is there."""
    store = Counted()
    cache, ranks = opened(*HYBRID, store=store, shards=shards)
    save(cache, ranks, prompt(TOKENS), states)
    other, its = opened(*HYBRID, store=store, shards=shards)
    store.asked.clear()
    assert load(other, its, prompt(TOKENS + 1)) == usable
    assert len(store.asked) <= 3
    assert max(store.asked) <= 16


@pytest.mark.inside("a store that hosts share")
def test_twin_asked_rank_by_rank_it_would_be_a_storm(opened, monkeypatch):
    def each(shape: Shape, stop: int) -> list[Ends]:
        return [one._replace(places=(at,)) for one in ends(shape, stop) for at in one.places]

    monkeypatch.setattr(asking, "ends", each)
    store = Counted()
    cache, ranks = opened(*HYBRID, store=store, shards=2)
    save(cache, ranks, prompt(TOKENS), [5])
    other, its = opened(*HYBRID, store=store, shards=2)
    store.asked.clear()
    assert load(other, its, prompt(TOKENS + 1)) == 96
    assert max(store.asked) > 16


@pytest.mark.inside("loses parts")
def test_old_windows_and_states_may_go_without_harm(opened):
    """H04: what is usable is what every component has what it needs of; nobody takes the most."""
    cache, ranks = opened(*HYBRID)
    tokens = prompt(TOKENS)
    more = np.append(tokens, 1)
    save(cache, ranks, tokens, states=[1, 3, 5])
    for chunk in range(4):  # tokens 76 to 96 are in the window: chunks 4 and 5
        lose(cache, tokens, chunk, 1)
    lose(cache, tokens, 1, 2)
    assert load(cache, ranks, more) == 96
    lose(cache, tokens, 4, 1)
    assert load(cache, ranks, more) == 0, "no shorter prefix has its window"


@pytest.mark.inside("loses parts")
def test_one_part_of_full_attention_ends_what_can_be_used(opened):
    cache, ranks = opened(*HYBRID)
    tokens = prompt(TOKENS)
    save(cache, ranks, tokens, states=[1, 3, 5])
    lose(cache, tokens, 4, 0)
    assert load(cache, ranks, np.append(tokens, 1)) == 64
    lose(cache, tokens, 2, 1)  # tokens 44 to 64: chunks 2 and 3
    assert load(cache, ranks, np.append(tokens, 1)) == 32
    lose(cache, tokens, 0, 0)
    assert load(cache, ranks, np.append(tokens, 1)) == 0


@pytest.mark.inside("loses parts")
def test_a_fetch_that_fails_in_part_gives_what_is_usable(opened):
    """The state at the longest length cannot be read; an earlier one can."""
    cache, ranks = opened(*HYBRID)
    tokens = prompt(TOKENS)
    save(cache, ranks, tokens, states=[1, 3, 5])
    match = cache.match(np.append(tokens, 1))
    assert match.tokens == 96
    lose(cache, tokens, 5, 2)
    lease = cache.fetch(match, timeout=20, deadline=60).result(20)
    assert lease.tokens == 64
    lease.release()


@pytest.mark.inside("reads the catalog")
def test_what_windows_leave_behind_makes_room_first(opened):
    """P6: parts outside every window leave before anything of full attention."""
    cache, ranks = opened(*HYBRID, dram=f"{20 * 4096}B")
    save(cache, ranks, prompt(TOKENS), states=[5])  # 13 slots
    cache.plan_save(cache.prefix(prompt(CHUNK * 5, 1)), [list(range(20))] * 2 + [[ABSENT] * 5])
    index = cache._desk.catalog._index
    names = cache.prefix(prompt(TOKENS)).names
    in_dram = [[bool(index.present[index.find(part)] & 1) for part in parts] for parts in names]
    assert all(full for full, _, _ in in_dram)
    assert [window for _, window, _ in in_dram[:4]].count(False) == 3
    assert all(window for _, window, _ in in_dram[4:])
    assert load(cache, ranks, np.append(prompt(TOKENS), 1)) == 96


def test_a_model_of_windows_only_needs_its_last_tokens(opened):
    cache, ranks = opened(WINDOW)
    tokens = prompt(TOKENS)
    plan = cache.plan_save(cache.prefix(tokens), [ABSENT] * 16 + list(range(8)))
    copy(cache, ranks, plan)
    assert cache.match(np.append(tokens, 1)).tokens == 96
    assert cache.match(tokens[:80]).tokens == 0


@pytest.mark.parametrize(("shards", "stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.inside("loses parts")
def test_every_rank_and_stage_copies_its_own(opened, shards, stages):
    """H12: each part once, one length for all, and a part that one of them lost shortens it."""
    cache, ranks = opened(
        FULL, kvtier.Component(2, 2, 4, name="more"), shards=shards, stages=stages
    )
    tokens = prompt(TOKENS)
    for rank, block in itertools.product(ranks, range(24)):
        rank.fill(0, block, 1 + block)
        rank.fill(1, block, 101 + block)
    plan = cache.plan_save(cache.prefix(tokens), list(range(24)))
    assert len(plan.parts) == 2 * shards * stages * 6
    copy(cache, ranks, plan)
    assert cache.plan_save(cache.prefix(tokens), list(range(24))) is None
    lose(cache, tokens, 4, len(cache.shape.names) - 1)
    match = cache.match(np.append(tokens, 1))
    assert match.tokens == 64
    with cache.lease(match, deadline=9) as lease:
        plan = cache.plan_load(lease, list(range(32, 48)))
    copy(cache, ranks, plan)
    for rank, block in itertools.product(ranks, range(16)):
        assert rank.holds(0, 32 + block, 1 + block)
        assert rank.holds(1, 32 + block, 101 + block)


def test_a_latent_is_stored_once_and_read_by_all(opened):
    """H23: bytes do not grow with the ranks, and another number of ranks hits the same."""
    cache, ranks = opened(LATENT, shards=8)
    tokens = prompt(TOKENS)
    for rank, block in itertools.product(ranks, range(24)):
        rank.fill(0, block, 1 + block, salted=False)
    copy(cache, ranks, cache.plan_save(cache.prefix(tokens), list(range(24))))
    assert cache.figures()['kvtier_tier_parts{tier="dram"}'] == 6
    few = cache.share(cache.namespace, shards=4)
    match = few.match(np.append(tokens, 1))
    assert match.tokens == 96
    others = [Rank(few, shard) for shard in range(4)]
    with few.lease(match, deadline=9) as lease:
        plan = few.plan_load(lease, list(range(32, 56)))
    copy(few, others, plan)
    for rank, block in itertools.product(others, range(24)):
        assert rank.holds(0, 32 + block, 1 + block, salted=False)
        rank.close()
    few.close()


def test_other_models_cut_by_ranks_never_meet(opened):
    cache, ranks = opened(FULL)
    tokens = prompt(TOKENS)
    copy(cache, ranks, cache.plan_save(cache.prefix(tokens), list(range(24))))
    for cut in ({"shards": 2}, {"stages": 2}):
        other = cache.share(cache.namespace, **cut)
        assert other.match(np.append(tokens, 1)).tokens == 0
        other.close()


def test_tables_that_do_not_fit_are_misuse(opened):
    cache, ranks = opened(*HYBRID)
    tokens = prompt(TOKENS)
    save(cache, ranks, tokens, states=[5])
    blocks = list(range(24))
    for tables, text in (
        (blocks, "need one block table each"),
        ([blocks, blocks], "need one block table each"),
        ([blocks, blocks, [0]], "1 states do not hold 6 chunks"),
        ([blocks, blocks[:20], [0] * 6], "20 blocks do not hold 6 chunks"),
    ):
        with pytest.raises(kvtier.MisuseError, match=text):
            cache.plan_save(cache.prefix(tokens), tables)
    lease = cache.lease(cache.match(np.append(tokens, 1)), deadline=9)
    for tables, text in (
        ([blocks[:20], blocks[:20], [0]], "up to the lease's 96 tokens, not up to 80"),
        ([blocks, blocks[:20], [0]], "are not blocks of the leased tokens"),
        ([blocks, blocks, [0, 1]], "the one place that the state goes to"),
    ):
        with pytest.raises(kvtier.MisuseError, match=text):
            cache.plan_load(lease, tables)
    lease.release()
    assert cache.figures()["kvtier_leased_parts"] == 0
