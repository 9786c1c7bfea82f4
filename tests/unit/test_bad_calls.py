"""Bad calls, as a table: each is a clear error or a documented no-op, and nobody else's loss.

After every one the counts are what they were: no hold below zero, no slot in use that belongs to
nobody, and another holder's lease, plan and stored bytes as good as before.
"""

from __future__ import annotations

import time

import pytest
from msgspec import structs

import kvtier
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.lease import LeaseState
from kvtier.errors import MisuseError
from kvtier.local import LocalDesk
from kvtier.memory.arena import Slot
from kvtier.plans import Plans
from kvtier.testing.oracle import Oracle
from kvtier.testing.simmodel import Model
from kvtier.testing.toy import CHUNK, GEOMETRY, NAMESPACE, Toy, dram, opened, prompt
from kvtier.transfer import CopyResult, CopyStatus

pytestmark = pytest.mark.everywhere

TOKENS = prompt(4 * CHUNK + 1)
OTHER = prompt(4 * CHUNK + 1, seed=1)
BLOCKS = range(4 * CHUNK // 16)
OK = CopyResult(CopyStatus.OK)
NAN, INFINITE = float("nan"), float("inf")


class Bench:
    """A cache with a stored prompt, a lease of another holder, and strangers of three kinds.

    other: another namespace on the same memory; wider: the same namespace on two shards there;
    stranger: the same namespace on memory of its own.
    """

    def __init__(self) -> None:
        self.toy = opened(dram(32))
        self.cache = self.toy.cache
        self.toy.save("a", TOKENS)
        self.other = Toy(self.cache.share(kvtier.Namespace("other", GEOMETRY)))
        self.other.save("a", TOKENS)
        self.wider = self.cache.share(NAMESPACE, shards=2)
        self.stranger = opened(dram(32))
        self.stranger.save("a", TOKENS)
        self.match = self.cache.match(TOKENS)
        self.held = self.lease()
        self.plan = self.cache.plan_load(self.held, BLOCKS)

    def lease(self, cache=None):
        """Return a fresh lease, of this cache or another."""
        cache = cache or self.cache
        return cache.lease(cache.match(TOKENS), deadline=60)

    def reserved(self):
        """Return a part and a slot that wait for its bytes, and the plan that fills it."""
        plan = self.cache.plan_save(self.cache.prefix(OTHER), BLOCKS)
        return self.cache._plans._out[plan.arena, plan.id][0], plan

    def counts(self):
        """Return all that a bad call could spoil."""
        if not isinstance(self.cache._desk, LocalDesk):
            figures, names = self.cache.figures(), ("parts", "slots", "plans_out")
            counted = {
                name: figures[name] for name in figures if name.partition("{")[0].endswith(names)
            }
            return counted, len(self.cache._plans)
        catalog, index = self.cache._desk.catalog, self.cache._desk.catalog._index
        return (
            sorted(index.holds),
            index.held_rows,
            catalog._room.arena.slots_in_use,
            len(catalog._leases),
            [shelf.used_by for shelf in catalog._shelves],
            len(self.cache._plans),
            min(index.holds) >= 0,
        )

    def close(self) -> None:
        """End the holder's plan and lease, and see that both were as good as ever."""
        pages = self.cache.bind(self.toy.kv, self.toy.device)
        assert pages.execute(self.plan, after=()).result(20).tokens == 4 * CHUNK
        self.cache.settle(self.plan, OK)
        assert self.held.state is LeaseState.HELD
        self.held.release()
        assert self.toy.load("again", TOKENS)[2]
        for one in (self.wider, self.stranger, self.other, self.toy):
            one.close()


@pytest.fixture
def bench():
    one = Bench()
    yield one
    one.close()


def released(lease):
    lease.release()
    return lease


def expired(bench):
    lease = bench.cache.lease(bench.match, deadline=1e-9)
    until = time.monotonic() + 10
    while lease.held and time.monotonic() < until:
        time.sleep(0.01)
    assert lease.state is LeaseState.EXPIRED
    return lease


def settled(bench):
    plan = bench.cache.plan_load(bench.lease(), BLOCKS)
    bench.cache.settle(plan, OK)
    return plan


# Each call, and what is said; None for a no-op.
CALLS = {
    "release twice": (
        lambda b: released(b.lease()),
        lambda b, lease: lease.release(),
        "released before",
    ),
    "release after the deadline": (
        expired,
        lambda b, lease: [lease.release(), lease.release()],
        None,
    ),
    "plan a stranger's lease": (
        lambda b: b.lease(b.stranger.cache),
        lambda b, lease: b.cache.plan_load(lease, BLOCKS),
        "of another cache",
    ),
    "plan another namespace's lease": (
        lambda b: b.lease(b.other.cache),
        lambda b, lease: b.cache.plan_load(lease, BLOCKS),
        "of another cache",
    ),
    "plan a lease with other shards": (
        lambda b: b.lease(),
        lambda b, lease: b.wider.plan_load(lease, BLOCKS),
        "other shards",
    ),
    "plan a released lease": (
        lambda b: released(b.lease()),
        lambda b, lease: b.cache.plan_load(lease, BLOCKS),
        None,
    ),
    "plan a stranger's released lease": (
        lambda b: released(b.lease(b.stranger.cache)),
        lambda b, lease: b.cache.plan_load(lease, BLOCKS),
        None,
    ),
    "renew a released lease": (
        lambda b: released(b.lease()),
        lambda b, lease: lease.renew(5),
        None,
    ),
    "settle twice": (
        settled,
        lambda b, plan: b.cache.settle(plan, OK),
        "settled before",
    ),
    "settle a stranger's plan": (
        lambda b: structs.replace(b.plan, arena=b.stranger.cache._desk.arena.id),
        lambda b, plan: b.cache.settle(plan, OK),
        "not issued here",
    ),
    "settle another namespace's plan": (
        lambda b: b.plan,
        lambda b, plan: b.other.cache.settle(plan, OK),
        "not issued here",
    ),
    "settle what has not ended": (
        lambda b: b.plan,
        lambda b, plan: b.cache.settle(plan, CopyResult(CopyStatus.TIMEOUT)),
        "has not ended",
    ),
    "match another namespace's prompt": (
        lambda b: b.other.cache.prefix(TOKENS),
        lambda b, prefix: b.cache.match(prefix),
        "named by another cache",
    ),
    "match a stranger's prompt": (
        lambda b: b.stranger.cache.prefix(TOKENS),
        lambda b, prefix: b.cache.match(prefix),
        "named by another cache",
    ),
    "save another namespace's prompt": (
        lambda b: b.other.cache.prefix(OTHER),
        lambda b, prefix: b.cache.plan_save(prefix, BLOCKS),
        "named by another cache",
    ),
    "lease another namespace's match": (
        lambda b: b.other.cache.match(TOKENS),
        lambda b, match: b.cache.lease(match, deadline=5),
        "named by another cache",
    ),
    "fetch another namespace's match": (
        lambda b: b.other.cache.match(TOKENS),
        lambda b, match: b.cache.fetch(match, timeout=1, deadline=5),
        "named by another cache",
    ),
    "explain another namespace's prompt": (
        lambda b: b.other.cache.prefix(TOKENS),
        lambda b, prefix: b.cache.explain(prefix),
        "named by another cache",
    ),
    "pin another namespace's match": (
        lambda b: b.other.cache.match(TOKENS),
        lambda b, match: b.cache.pin(match, timeout=1, seconds=5),
        "named by another cache",
    ),
    "prefetch another namespace's match": (
        lambda b: b.other.cache.match(TOKENS),
        lambda b, match: b.cache.prefetch(match, base=1, per_1024_tokens=1),
        "named by another cache",
    ),
}
# Calls on the catalog itself.
INSIDE = {
    "commit what was not reserved": (
        lambda b: b.cache.prefix(OTHER).part(0, 0).name,
        lambda b, name: b.cache._desk.catalog.commit(name, Slot(0, 4096, 1), bytes(16)),
        "not reserved",
    ),
    "commit what is there already": (
        lambda b: (b.held.names[0][0], b.held.slots[0][0]),
        lambda b, it: b.cache._desk.catalog.commit(*it, bytes(16)),
        "not reserved",
    ),
    "abort what was not reserved": (
        lambda b: (b.held.names[0][0], b.held.slots[0][0]),
        lambda b, it: b.cache._desk.catalog.abort(*it),
        "not reserved",
    ),
}
TIMES = {
    f"{what} {seconds}": (
        lambda b: b.match,
        lambda b, match, call=call, seconds=seconds: call(b, match, seconds),
        says,
    )
    for what, call, says, never in (
        ("lease for", lambda b, m, s: b.cache.lease(m, deadline=s), "in the future", (0, INFINITE)),
        (
            "fetch with the deadline",
            lambda b, m, s: b.cache.fetch(m, timeout=1, deadline=s),
            "in the future",
            (0, INFINITE),
        ),
        (
            "fetch within",
            lambda b, m, s: b.cache.fetch(m, timeout=s, deadline=1),
            "no time to wait",
            (),
        ),
        ("pin for", lambda b, m, s: b.cache.pin(m, seconds=s, timeout=1), "in the future", (0,)),
        ("renew by", lambda b, m, s: b.held.renew(s), "in the future", (0, INFINITE)),
        (
            "prefetch with the base",
            lambda b, m, s: b.cache.prefetch(m, base=s, per_1024_tokens=1),
            "no time to wait",
            (),
        ),
        (
            "prefetch at the rate",
            lambda b, m, s: b.cache.prefetch(m, base=1, per_1024_tokens=s),
            "no time to wait",
            (),
        ),
        (
            "lease from",
            lambda b, m, s: b.cache.lease(m, deadline=1, first=-1),
            "from 0 on, not -1",
            (),
        ),
        (
            "fetch from",
            lambda b, m, s: b.cache.fetch(m, timeout=1, deadline=1, first=-1),
            "from 0 on, not -1",
            (),
        ),
        (
            "save from",
            lambda b, m, s: b.cache.plan_save(m.prefix, BLOCKS, first=-1),
            "from 0 on, not -1",
            (),
        ),
    )
    for seconds in (-1, NAN, *never)
}


@pytest.mark.parametrize("what", [*CALLS, *TIMES])
def test_a_bad_call_is_told_and_harms_nobody(bench, what):
    tell(bench, *{**CALLS, **TIMES}[what])


@pytest.mark.inside("calls the catalog")
@pytest.mark.parametrize("what", INSIDE)
def test_a_bad_call_of_the_catalog_is_told_and_harms_nobody(bench, what):
    tell(bench, *INSIDE[what])


def tell(bench, prepare, call, says):
    subject = prepare(bench)
    before = bench.counts()
    if says is None:
        assert not any(call(bench, subject) or ())
    else:
        with pytest.raises(MisuseError, match=says):
            call(bench, subject)
    assert bench.counts() == before


@pytest.mark.inside("commits by itself")
def test_a_save_that_is_committed_twice_is_told_the_second_time(bench):
    (part, slot), plan = bench.reserved()
    catalog = bench.cache._desk.catalog
    assert catalog.commit(part.name, slot, bytes(16))
    with pytest.raises(MisuseError, match="not reserved"):
        catalog.commit(part.name, slot, bytes(16))
    with pytest.raises(MisuseError, match="not reserved"):
        catalog.abort(part.name, slot)
    for one, its in bench.cache._plans._out.pop((plan.arena, plan.id))[1:]:
        catalog.abort(one.name, its)


@pytest.mark.inside("reads the index")
def test_the_same_namespace_on_more_shards_never_meets_the_other(bench):
    """Its parts have other names: what one saved the other does not find, or harm."""
    assert bench.wider.match(TOKENS).tokens == 0
    assert not {name for chunk in bench.wider.prefix(TOKENS).names for name in chunk} & set(
        bench.cache._desk.catalog._index.rows
    )
    taken = bench.wider.plan_save(bench.wider.prefix(TOKENS), BLOCKS)
    assert len(taken.parts) == 8
    assert bench.cache.match(TOKENS).chunks == 4
    bench.wider.settle(taken, CopyResult(CopyStatus.FAILED))
    bench.wider.flush(timeout=5)


# ----------------------------------------------------------------------------- without the guards


@pytest.mark.inside("takes a guard away")
def test_without_its_guard_a_stranger_would_be_given_anothers_bytes(bench, monkeypatch):
    """The twin of whose lease it is: the other namespace's slots, planned as this one's."""
    lease = bench.lease(bench.other.cache)

    def issue(self, lease, _owner):
        lease.plans += 1
        return True

    monkeypatch.setattr(Catalog, "issue", issue)
    plan = bench.cache.plan_load(lease, BLOCKS)
    assert {part.offset for part in plan.parts} == {
        s.offset for slots in lease.slots for s in slots
    }
    bench.cache.settle(plan, OK)
    lease.release()


def test_without_its_guard_a_strangers_plan_would_end_anothers_hold(bench, monkeypatch):
    """The twin of whose plan it is: two caches number their plans alike."""

    def settled(self, plan, _result):
        return next(self._out.pop(key) for key in list(self._out) if key[1] == plan.id)

    monkeypatch.setattr(Plans, "settled", settled)
    mine = bench.cache.plan_load(bench.lease(), BLOCKS)
    bench.cache.settle(structs.replace(mine, arena=0), OK)
    assert (mine.arena, mine.id) not in bench.cache._plans._out


@pytest.mark.inside("recounts the catalog")
def test_the_oracle_agrees_after_all_of_it(bench, monkeypatch):
    """Recount the whole cache after every bad call of the table, in one life."""
    model = Model(bench.cache.geometry.components, *bench.cache.ranks)
    oracle = Oracle(bench.cache, model, bench.cache._desk.depot.clock)
    monkeypatch.setattr(oracle, "expect_bytes", lambda *_: None)  # a toy's bytes are its own
    for prepare, call, says in {**CALLS, **INSIDE, **TIMES}.values():
        subject = prepare(bench)
        try:
            call(bench, subject)
        except MisuseError:
            assert says
        oracle.check()
