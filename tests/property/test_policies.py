"""Every policy keeps the contract, and none is better than the optimum."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.planning.optimum import ceiling, optimum
from kvtier.planning.replay import OPTIMAL, POLICIES, make_policy
from kvtier.planning.simulate import Tier, leading, simulate
from kvtier.planning.trace import Trace
from kvtier.policies.arc import Arc
from kvtier.policies.lfu import Lfu
from kvtier.policies.s3fifo import S3Fifo

BLOCK = 4
NAMES = [name for name in POLICIES if name != OPTIMAL]
# A prompt is a path in a tree of blocks: each step goes to one of three children.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
CALLS = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "evict", "aside", "remove"]), st.integers(0, 12)),
    max_size=60,
)


ANSWERS = st.integers(0, 3)  # blocks at the end of a path that nobody asks for, but that come in


def trace_of(prompts: list[tuple[int, ...]], answers: list[int] | None = None) -> Trace:
    trace = Trace("drawn", BLOCK)
    for number, prompt in enumerate(prompts):
        hashes = [str(prompt[: depth + 1]) for depth in range(len(prompt))]
        asked = max(len(prompt) - (answers[number] if answers else 0), 0)
        trace.add(number, BLOCK * asked, 1, hashes[:asked], hashes[asked:])
    return trace


@pytest.mark.parametrize("name", NAMES)
@given(CALLS)
def test_a_policy_has_exactly_the_rows_that_came_and_did_not_leave(name, calls):
    policy = make_policy(name, trace_of([(0,) * 13]))()
    inside: dict[int, None] = {}
    for call, row in calls:
        if call == "insert":
            policy.insert(row, row)
            inside[row] = None
        elif call == "touch":
            policy.touch((row, row + 1))
        elif call in ("evict", "aside"):
            victim = next(policy.victims(), None)
            assert (victim is None) == (not inside)
            if victim is not None:
                assert victim in inside
                policy.remove(victim, evicted=call == "evict")
                del inside[victim]
        else:
            policy.remove(row)
            inside.pop(row, None)
        assert sorted(policy) == sorted(inside)
        assert len(policy) == len(inside)
    left = []
    for victim in policy.victims():
        policy.remove(victim)
        left.append(victim)
    assert sorted(left) == sorted(inside)


@given(st.lists(st.tuples(PROMPTS, ANSWERS), min_size=1, max_size=25), st.integers(1, 12))
def test_no_policy_exceeds_the_optimum_nor_that_the_ceiling(requests, capacity):
    prompts, answers = map(list, zip(*requests, strict=True))
    trace = trace_of(prompts, answers)
    best = optimum(trace, capacity)
    assert best.hit_blocks <= ceiling(trace).hit_blocks
    for name, servable in itertools.product(NAMES, (True, False)):
        hits = simulate(trace, make_policy(name, trace), capacity, servable=servable)
        assert hits.hit_blocks <= best.hit_blocks, name
        assert hits.blocks == best.blocks


def most_hits(prompts: tuple[tuple[int, ...], ...], capacity: int) -> int:
    """Return the most leading-run hits, by trying every set that could be kept."""

    @cache
    def best(number: int, kept: frozenset[tuple[int, ...]]) -> int:
        if number == len(prompts):
            return 0
        blocks = [prompts[number][: depth + 1] for depth in range(len(prompts[number]))]
        run = next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
        could = [*kept, *(block for block in blocks if block not in kept)]
        sets = itertools.combinations(could, min(capacity, len(could)))
        return run + max(best(number + 1, frozenset(chosen)) for chosen in sets)

    return best(0, frozenset())


@given(st.lists(PROMPTS.filter(lambda p: len(p) < 4), min_size=1, max_size=5), st.integers(1, 3))
def test_the_optimum_is_what_an_exhaustive_search_finds(prompts, capacity):
    assert optimum(trace_of(prompts), capacity).hit_blocks == most_hits(tuple(prompts), capacity)


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(PROMPTS, min_size=1, max_size=25), st.integers(5, 12))
def test_a_servable_cache_has_no_headless_tails(name, prompts, capacity):
    """Whatever the policy prefers; the tier has room for each prompt."""
    trace = trace_of(prompts)
    tier = Tier(trace, make_policy(name, trace), capacity, servable=True)
    for blocks, _ in trace.requests():
        tier.use(blocks, leading(blocks, tier.inside))
        inside = [block for block in range(trace.unique) if tier.inside[block]]
        assert len(inside) <= capacity
        assert all(trace.parent[block] < 0 or tier.inside[trace.parent[block]] for block in inside)


def plain_lru(trace: Trace, capacity: int) -> int:
    """Return the hits of an LRU as others simulate it: each block by itself, deepest first."""
    kept: dict[int, None] = {}
    hits = 0
    for blocks, _ in trace.requests():
        hits += next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
        for block in reversed(blocks):
            kept.pop(block, None)
            kept[block] = None
            if len(kept) > capacity:
                del kept[next(iter(kept))]
    return hits


@given(st.lists(PROMPTS, min_size=1, max_size=25), st.integers(1, 12))
def test_where_any_block_may_leave_lru_is_that_of_others(prompts, capacity):
    trace = trace_of(prompts)
    found = simulate(trace, make_policy("lru", trace), capacity, servable=False)
    assert found.hit_blocks == plain_lru(trace, capacity)


def test_without_that_care_a_policy_leaves_tails():
    """The twin: what `servable` is for."""
    prompts = [(0, 0, 0), (1, 1), (0,), (0,), (1, 1), (2, 2, 2)]
    trace = trace_of(prompts)
    headless = 0
    for name in NAMES:
        tier = Tier(trace, make_policy(name, trace), 5, servable=False)
        for blocks, _ in trace.requests():
            tier.use(blocks, leading(blocks, tier.inside))
        headless += sum(
            tier.inside[block] and above >= 0 and not tier.inside[above]
            for block, above in enumerate(trace.parent)
        )
    assert headless


# ---------------------------------------------------------------------------- what each is for


def use(policy, *rows):
    for row in rows:
        if row in list(policy):
            policy.touch((row,))
        else:
            policy.insert(row, row)


def leave(policy, count):
    left = []
    for row in policy.victims():
        policy.remove(row)
        left.append(row)
        if len(left) == count:
            break
    return left


@pytest.mark.parametrize("kind", [Arc, Lfu, S3Fifo])
def test_a_use_that_goes_on_is_no_second_one(kind):
    policies = [kind(), kind()]
    for policy in policies:
        use(policy, *range(6), 0, 1, 0, 1)
    policies[1].renew((2, 3, 3, 2, 99))
    once, renewed = (leave(policy, 6) for policy in policies)
    assert set(once[:4]) == set(renewed[:4]) == {2, 3, 4, 5}  # and they are still before 0 and 1


def test_arc_keeps_what_was_used_again_from_a_scan():
    policy = Arc()
    use(policy, 1, 2, 1, 2, 3, 4)
    assert leave(policy, 2) == [3, 4]
    use(policy, 3)  # it had left too early: room moves towards newcomers
    assert leave(policy, 3)[0] != 3


def test_s3fifo_lets_most_newcomers_go_and_remembers_them():
    policy = S3Fifo()
    use(policy, *range(10))
    use(policy, 9, 9)
    assert leave(policy, 9) == list(range(9))
    use(policy, 3, *range(20, 30))
    assert 3 not in leave(policy, 10)


def test_lfu_ages_so_that_old_fame_fades():
    for aging, stays in ((True, False), (False, True)):
        policy = Lfu(aging=aging)
        use(policy, *[0] * 20)
        for row in range(1, 100):
            use(policy, row, row, row)
            if len(policy) > 3:
                leave(policy, 1)
        assert (0 in list(policy)) == stays
