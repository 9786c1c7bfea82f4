"""Explain: for every chunk where it is, or why it is not, and which chunk ends the match."""

from __future__ import annotations

import json
import threading

import pytest

import kvtier
from kvtier.catalog import gone as gone_module
from kvtier.catalog.explain import (
    REASONS,
    ChunkPlace,
    End,
    Explanation,
    PartPlace,
    ago,
    find_end,
)
from kvtier.catalog.gone import Gone
from kvtier.config import TierConfig
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.identity.shape import chunk_shape
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.small_catalog import LMDB, SHAPE, SmallCatalog, chain, names
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, NAMESPACE, Toy, prompt
from kvtier.transfer import CopyResult, CopyStatus

pytestmark = pytest.mark.usefixtures("unhurried")

TOKENS = prompt(4 * CHUNK + 10)
BLOCKS = range(4 * CHUNK // 16)


class Below(MemoryStore):
    """A store whose reads can be stopped, and spoilt."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.spoilt = False

    def read_many(self, ids, into):
        self.open.wait(20)
        reads = super().read_many(ids, into)
        for buffer in into if self.spoilt else ():
            buffer[0] ^= 1
        return reads


@pytest.fixture
def below():
    return Below()


@pytest.fixture
def toy(below):
    """Room for eight chunks, and a tier below."""
    tiers = (TierConfig("memory", "", None, store=below),)
    one = Toy(kvtier.open(kvtier.Config(8 * CHUNK_BYTES, tiers), namespace=NAMESPACE))
    yield one
    below.open.set()
    one.close()


def whys(toy, tokens=TOKENS) -> list[str]:
    return [chunk.why() for chunk in toy.cache.explain(tokens).chunks]


def where(toy, tokens=TOKENS) -> list[str]:
    return [chunk.where() for chunk in toy.cache.explain(tokens).chunks]


def row(toy, chunk: int) -> int:
    return toy.cache._desk.catalog._index.find(toy.cache.prefix(TOKENS).names[chunk][0])


# ---------------------------------------------------------------------------------- where it is


def test_a_prompt_that_nobody_saw(toy):
    found = toy.cache.explain(TOKENS)
    assert (found.tokens, found.usable, found.end.chunk) == (len(TOKENS), 0, 0)
    assert [chunk.why() for chunk in found.chunks] == [
        *["never seen, or gone for long"] * 4,
        "no whole chunk",
    ]
    assert (found.chunks[4].first, found.chunks[4].stop) == (256, 266)


def test_a_prompt_that_is_all_there(toy):
    toy.save("a", TOKENS)
    found = toy.cache.explain(TOKENS)
    assert found.usable == toy.cache.match(TOKENS).tokens == 4 * CHUNK
    assert found.end.chunk is None
    assert where(toy) == ["dram, memory"] * 4 + ["-"]
    assert whys(toy)[:4] == [""] * 4


def test_a_prompt_may_be_given_as_its_prefix_and_with_its_request(toy):
    request = kvtier.Request(salt=b"mine")
    toy.save("a", TOKENS)
    assert toy.cache.explain(toy.cache.prefix(TOKENS)).usable == 4 * CHUNK
    assert toy.cache.explain(TOKENS, request=request).usable == 0


def test_a_prompt_whose_last_token_is_computed_anyway(toy):
    toy.save("a", TOKENS)
    found = toy.cache.explain(TOKENS[: 4 * CHUNK])
    assert (found.usable, found.end.chunk) == (4 * CHUNK - 16, None)


def test_what_is_leased_pinned_saved_and_read(toy, below):
    plan = toy.cache.plan_save(toy.cache.prefix(TOKENS), BLOCKS)
    assert whys(toy)[:4] == ["being saved"] * 4
    toy.cache.settle(plan, CopyResult(CopyStatus.OK))
    toy.cache.flush(timeout=5)
    match = toy.cache.match(TOKENS)
    with toy.cache.lease(match, deadline=30):
        assert whys(toy)[:4] == ["held"] * 4
    with toy.cache.pin(match, seconds=30, timeout=5).result(20):
        assert whys(toy)[:4] == ["pinned"] * 4
    toy.cache.clear("dram")
    below.open.clear()
    fetch = toy.cache.fetch(match, timeout=20, deadline=60)
    while whys(toy)[:4] != ["being read"] * 4:
        assert where(toy)[:4] == ["memory"] * 4
    below.open.set()
    fetch.result(20).release()


# -------------------------------------------------------------------------------- why it is not


def test_what_left_is_told_with_the_tier_and_the_time():
    small = SmallCatalog(4)
    parts = chain(4)
    small.save(parts)
    small.catalog.stored(parts[0], LMDB, 1)
    small.catalog.evict(LMDB, {0: 0}, at_least=1)  # DRAM has it still
    small.clock.now += 5
    small.save(chain(2, seed=1))
    small.clock.now += 7
    places = small.catalog.places(names(parts), ["attention"], SHAPE, 0)
    assert [place.parts[0].tiers for place in places] == [("dram",), ("dram",), (), ()]
    assert [place.why() for place in places[2:]] == ["evicted from dram 7 s ago"] * 2
    assert (places[3].parts[0].reason, places[3].parts[0].seconds) == ("evicted", 7.0)
    small.close()


def test_without_the_memory_nothing_would_tell_them_from_what_was_never_there(toy, monkeypatch):
    monkeypatch.setattr(Gone, "note", lambda *_: None)
    toy.save("a", TOKENS)
    for tier in ("dram", "memory"):
        toy.cache.clear(tier)
    assert whys(toy)[0] == "never seen, or gone for long"


def test_what_an_operator_took_out(toy):
    toy.save("a", TOKENS)
    for tier in ("dram", "memory"):
        toy.cache.clear(tier)
    assert whys(toy)[:4] == ["cleared from memory just now"] * 4
    toy.save("b", TOKENS)
    toy.cache.invalidate(TOKENS, first=2)
    assert whys(toy)[:4] == ["", "", "invalidated just now", "invalidated just now"]
    assert toy.cache.explain(TOKENS).end == End(2, "invalidated just now.")
    toy.cache.purge()
    assert whys(toy)[0] == "purged just now"


def test_a_record_that_was_spoilt_and_what_hangs_under_it(toy, below):
    toy.save("a", TOKENS)
    toy.cache.clear("dram")
    match = toy.cache.match(TOKENS)
    below.spoilt = True
    assert toy.cache.fetch(match, timeout=20, deadline=60).result(20) is None
    assert whys(toy)[0] == "corrupt in memory, just now"
    assert toy.cache.explain(TOKENS).end == End(0, "corrupt in memory, just now.")


def test_a_record_that_a_tier_had_lost(toy, below):
    toy.save("a", TOKENS)
    toy.cache.clear("dram")
    below.delete_many([toy.cache.prefix(TOKENS).names[1][0]])
    match = toy.cache.match(TOKENS)
    toy.cache.fetch(match, timeout=20, deadline=60).result(20).release()
    assert whys(toy)[1:3] == ["memory had lost it, just now", "an orphan: chunk 1 is in no tier"]
    found = toy.cache.explain(TOKENS)
    assert (found.usable, found.end) == (CHUNK, End(1, "memory had lost it, just now."))


def test_a_save_that_found_no_room(toy):
    toy.save("a", TOKENS)
    toy.save("b", prompt(4 * CHUNK, seed=1))
    leases = [
        toy.cache.lease(toy.cache.match(tokens), deadline=30)
        for tokens in (TOKENS, prompt(4 * CHUNK + 1, seed=1))
    ]
    other = prompt(2 * CHUNK, seed=2)
    assert toy.cache.plan_save(toy.cache.prefix(other), BLOCKS) is None
    assert whys(toy, other) == ["not saved, no slot was free, just now"] * 2
    for lease in leases:
        lease.release()


def test_a_save_whose_copy_failed_and_one_that_lost_its_parent(toy, monkeypatch):
    computed = toy.cache.prefix(TOKENS)
    plan = toy.cache.plan_save(computed, BLOCKS)
    toy.cache.settle(plan, CopyResult(CopyStatus.FAILED))
    toy.cache.flush(timeout=5)
    assert whys(toy)[:4] == ["not saved, its copy failed, just now"] * 4
    head = computed.head(computed.tokens, 2)
    first, second = toy.cache.plan_save(head, BLOCKS), toy.cache.plan_save(computed, BLOCKS)
    toy.cache.settle(first, CopyResult(CopyStatus.FAILED))
    toy.cache.settle(second, CopyResult(CopyStatus.OK))
    toy.cache.flush(timeout=5)
    assert whys(toy)[2:4] == ["not saved, its parent was in no tier, just now"] * 2


def test_a_save_that_could_not_be_sealed(toy, monkeypatch):
    async def broken(*_):
        raise MemoryError

    plan = toy.cache.plan_save(toy.cache.prefix(TOKENS), BLOCKS)
    monkeypatch.setattr(toy.cache._desk.moves._flow, "io", broken)
    toy.cache.settle(plan, CopyResult(CopyStatus.OK))
    toy.cache.flush(timeout=5)
    assert whys(toy)[0] == "not saved, it could not be sealed, just now"


def test_a_namespace_that_goes_without(toy):
    toy.save("a", TOKENS)
    toy.cache.bypass = True
    found = toy.cache.explain(TOKENS)
    assert (found.usable, found.end) == (0, End(0, "the namespace goes without its cache."))
    assert where(toy)[0] == "dram, memory"


def test_a_tier_that_does_not_answer(toy):
    toy.save("a", TOKENS)
    toy.cache.clear("dram")
    toy.cache._desk.catalog.silent = lambda: 1 << 1
    found = toy.cache.explain(TOKENS)
    assert found.usable == toy.cache.match(TOKENS).tokens == 0
    assert (where(toy)[0], found.end) == ("memory", End(0, "memory does not answer."))


# ------------------------------------------------------------------------------- hybrid, in words


def places(*chunks: tuple[PartPlace, ...]) -> tuple[ChunkPlace, ...]:
    return tuple(ChunkPlace(at, at * 16, (at + 1) * 16, parts) for at, parts in enumerate(chunks))


def test_parts_that_differ_are_told_apart():
    full = PartPlace("full", ("dram",))
    (one,) = places((full, PartPlace("window", (), reason="evicted", tier="dram", seconds=90)))
    assert one.where() == "full: dram; window: -"
    assert one.why() == "window: evicted from dram 90 s ago"


def test_printed_it_is_a_table_in_which_neighbours_that_are_alike_share_a_line():
    here, away = PartPlace("a", ("dram", "s3")), PartPlace("a", (), reason="unknown")
    found = Explanation(64, 32, End(2, "never seen."), places((here,), (here,), (away,), (away,)))
    assert str(found).splitlines() == [
        "32 of 64 tokens are usable. Chunk 2 ends the match: never seen.",
        "chunk  tokens  where     why",
        "0-1    0-32    dram, s3",
        "2-3    32-64   -         never seen, or gone for long",
    ]


def test_printed_a_single_chunk_has_a_single_number_and_no_chunk_ends_what_is_whole():
    found = Explanation(17, 16, End(None, "No more."), places((PartPlace("a", ("dram",)),)))
    assert str(found).splitlines() == [
        "16 of 17 tokens are usable. No more.",
        "chunk  tokens  where  why",
        "0      0-16    dram",
    ]


def test_the_next_window_that_lacks_ends_a_match_not_the_last():
    layers = (Component(1, 1, 256), Component(1, 1, 256, needs=Needs.TRAILING, window=16))
    shape = chunk_shape(Geometry(layers, dtype="int8", block_tokens=(16,), chunk_tokens=16))
    full, window = PartPlace("full", ("dram",)), PartPlace("window", ("dram",))
    gone = PartPlace("window", (), reason="unknown")
    chunks = places((full, window), (full, gone), (full, gone), (full, gone))
    usable, ends = find_end(shape, chunks, 64)
    assert usable == 16
    assert ends == End(1, "window: never seen, or gone for long.")


def test_as_plain_data_it_is_json(toy):
    toy.save("a", TOKENS)
    data = json.loads(json.dumps(toy.cache.explain(TOKENS).plain()))
    assert data["usable"] == 4 * CHUNK
    assert data["chunks"][0]["parts"][0]["tiers"] == ["dram", "memory"]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_told_in_words(reason):
    part = PartPlace("a", (), reason=reason, tier="s3", seconds=7200)
    (_, one) = places((part,), (part,))
    assert "{" not in one.why()
    assert ("2 h ago" in one.why()) == ("{ago}" in REASONS[reason])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "just now"),
        (1, "1 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7199, "120 min ago"),
        (7200, "2 h ago"),
        (3 * 86400, "3 d ago"),
    ],
)
def test_times_are_short(seconds, text):
    assert ago(seconds) == text


# -------------------------------------------------------------------------------------- its cost


def test_nothing_counts_as_used(toy):
    """The twin: a match before the others come would have kept it."""
    for look, kept in ((toy.cache.explain, 0), (toy.cache.match, 4)):
        toy.save("a", TOKENS)
        toy.cache.clear("memory")
        toy.save("b", prompt(4 * CHUNK, seed=1))
        look(TOKENS)
        toy.save("c", prompt(4 * CHUNK, seed=2))
        assert toy.cache.explain(TOKENS).usable == kept * CHUNK
        for tier in ("dram", "memory"):
            toy.cache.clear(tier)


def test_it_remembers_the_last_thousands_and_no_more(monkeypatch):
    monkeypatch.setattr(gone_module, "_REMEMBERED", 4)
    gone = Gone(lambda: 1.0)
    for number in range(100):
        gone.note(b"%d" % number, "evicted", "dram")
        assert len(gone) <= 8
    known = [number for number in range(100) if gone.why(b"%d" % number)]
    assert known == list(range(96 - 4 * (len(known) > 4), 100))
    gone.note(b"99", "lost", "s3")
    assert gone.why(b"99") == ("lost", "s3", 1.0)


def test_what_was_noted_is_known_for_as_many_notes_at_least(monkeypatch):
    monkeypatch.setattr(gone_module, "_REMEMBERED", 4)
    gone = Gone(lambda: 1.0)
    for number in range(20):
        gone.note(b"%d" % number, "evicted", "dram")
        last = range(max(number - 3, 0), number + 1)
        assert all(gone.why(b"%d" % one) is not None for one in last)
