"""H04: of a model with several kinds of KV, a prefix is a hit when each kind has what it needs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtier
from kvtier.catalog.index import NO_ROW
from kvtier.testing.toy import BLOCK, CHUNK, prompt

CHUNKS = 8
TOKENS = CHUNKS * CHUNK
PROMPT = prompt(TOKENS + 1)
ALL = kvtier.Component(layers=2, heads=1, head_size=8, name="full")
KEYS = kvtier.Component(layers=1, heads=1, head_size=8, planes=1, name="index keys")
NEAR = kvtier.Component(
    layers=2, heads=1, head_size=8, name="near", needs=kvtier.Needs.TRAILING, window=2 * CHUNK
)
NEARER = kvtier.Component(
    layers=1, heads=1, head_size=8, name="nearer", needs=kvtier.Needs.TRAILING, window=BLOCK
)
STATE = kvtier.Component(
    layers=2, heads=1, head_size=16, planes=1, name="state", needs=kvtier.Needs.LAST
)
MODELS = {
    "two full": (ALL, KEYS),
    "full and near": (ALL, NEAR),
    "near alone": (NEAR,),
    "two windows": (ALL, NEAR, NEARER),
    "full and state": (ALL, STATE),
    "near and state": (NEAR, STATE),
    "state alone": (STATE,),
    "all kinds": (ALL, KEYS, NEAR, STATE),
}


def geometry(components):
    return kvtier.Geometry(components, block_tokens=(BLOCK,), chunk_tokens=CHUNK)


def usable(components, prompt_tokens, missing):
    """The longest usable prefix by the definition, tried length by length.

    missing: (component, chunk) of which a part is missing.
    """
    for n in range((prompt_tokens - 1) // BLOCK * BLOCK, 0, -BLOCK):
        last = (n - 1) // CHUNK
        if last >= prompt_tokens // CHUNK:
            continue  # the prompt's last, incomplete chunk has no name
        needed = []
        for at, one in enumerate(components):
            if one.needs is kvtier.Needs.ALL:
                needed += [(at, chunk) for chunk in range(last + 1)]
            elif one.needs is kvtier.Needs.TRAILING:
                first = max(n - one.window, 0) // CHUNK
                needed += [(at, chunk) for chunk in range(first, last + 1)]
            else:
                needed += [(at, last if n % CHUNK == 0 else -1)]
        if all(chunk >= 0 and (at, chunk) not in missing for at, chunk in needed):
            return n
    return 0


@pytest.mark.parametrize("model", MODELS)
def test_all_there_is_a_hit_of_all_and_exact(new_ranks, disk, model):
    ranks = new_ranks(geometry(MODELS[model]), store=disk)
    ranks.save(PROMPT)
    assert ranks.load(PROMPT) == TOKENS
    ranks.cache.clear("dram")
    assert ranks.load(PROMPT) == TOKENS


def store_below(ranks):
    """Have all of the prompt in the tier below, and nothing else anywhere."""
    for tier in ("dram", "disk"):
        ranks.cache.clear(tier)
    ranks.save(PROMPT)
    ranks.cache.clear("dram")


@pytest.mark.parametrize("model", MODELS)
def test_one_missing_part_leaves_the_longest_usable_prefix(new_ranks, disk, model):
    """Each part of each chunk, one at a time, gone from the tier: found out by the read."""
    components = MODELS[model]
    ranks = new_ranks(geometry(components), store=disk)
    for at in range(len(components)):
        for chunk in range(CHUNKS):
            store_below(ranks)
            disk.delete_many(ranks.names(PROMPT, chunk, component=at))
            right = usable(components, TOKENS + 1, {(at, chunk)})
            assert ranks.load(PROMPT) <= right
            assert ranks.load(PROMPT) == right, (components[at].name, chunk)


GAPS = st.sets(st.tuples(st.integers(0, 3), st.integers(0, CHUNKS - 1)), max_size=12)


@pytest.fixture
def ready(new_ranks, new_disk):
    """Return the engine of a model, the same one for every example."""
    engines = {}

    def of(model):
        if model not in engines:
            store = new_disk()
            engines[model] = new_ranks(geometry(MODELS[model]), store=store)
            engines[model].store = store
        return engines[model]

    return of


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gaps=GAPS, length=st.integers(1, TOKENS + 1), known=st.booleans())
@pytest.mark.parametrize("model", MODELS)
def test_any_gaps_leave_the_longest_usable_prefix(ready, model, gaps, length, known):
    """Any parts missing, known to the index or not, and a prompt of any length."""
    components = MODELS[model]
    ranks = ready(model)
    gaps = {(at, chunk) for at, chunk in gaps if at < len(components)}
    store_below(ranks)
    names = [
        name for at, chunk in sorted(gaps) for name in ranks.names(PROMPT, chunk, component=at)
    ]
    ranks.store.delete_many(names)
    if known:
        for name in names:
            row = ranks.cache._desk.catalog._index.find(name)
            if row != NO_ROW and ranks.cache._desk.catalog._index.present[row]:
                ranks.cache._desk.catalog.lost(row, 1)
    asked, right = PROMPT[:length], usable(components, length, gaps)
    if known:
        assert ranks.cache.match(asked).tokens == right
    for _ in range(len(names) + 1):
        assert ranks.load(asked) <= right
    assert ranks.load(asked) == right


def test_the_scenario(new_ranks, disk):
    """Group A deep, group B shallow: the shallow one decides. Near chunks alone: all of it."""
    two = usable((ALL, KEYS), 4 * CHUNK + 1, {(1, 2), (1, 3)})
    assert two == 2 * CHUNK
    assert usable((ALL, KEYS), 4 * CHUNK + 1, {(1, 0)}) == 0
    assert usable((ALL, NEAR), TOKENS + 1, {(1, chunk) for chunk in range(6)}) == TOKENS


def test_blocks_outside_the_window_are_gone_when_it_is_saved(new_ranks, disk):
    """An engine frees what its window has left: what is left of it is saved, and is a hit."""
    ranks = new_ranks(geometry((ALL, NEAR)), store=disk)
    per_chunk = CHUNK // BLOCK
    ranks.save(PROMPT, absent={(1, block) for block in range(6 * per_chunk)})
    assert ranks.load(PROMPT) == TOKENS
    assert ranks.cache.match(PROMPT[: TOKENS - CHUNK]).tokens == usable(
        (ALL, NEAR), TOKENS - CHUNK, {(1, chunk) for chunk in range(6)}
    )


def test_states_are_hits_where_they_were_stored_only(new_ranks, disk):
    """An engine keeps states at some lengths: of the others there is no prefix to go on from."""
    ranks = new_ranks(geometry((ALL, STATE)), store=disk)
    ranks.save(PROMPT, absent={(1, place) for place in range(CHUNKS) if place not in {1, 4}})
    lengths = [ranks.cache.match(PROMPT[:n]).tokens // CHUNK for n in range(1, TOKENS + 2, CHUNK)]
    assert lengths == [0, 0, 2, 2, 2, 5, 5, 5, 5]
    assert ranks.load(PROMPT) == 5 * CHUNK
