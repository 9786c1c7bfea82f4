"""What loading and computing cost, learnt from what they took, and what follows from it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier import cut
from kvtier.cost import Costs, Line, Prefill
from kvtier.testing.hands import Hands

CHUNK = (64, 1 << 20)
PLACES = ("dram", "lmdb", "s3", "new")


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def costs(clock) -> Costs:
    return Costs(clock)


def taught(costs, clock, *, per_token=1e-3, **speeds) -> None:
    """Teach an engine's speed, and those of tiers, in seconds a chunk."""
    costs.computed([(0, 64)], 64 * per_token)
    for tier, seconds in speeds.items():
        read(costs, clock, tier, CHUNK[1], seconds)


def read(costs, clock, tier, nbytes, seconds, arrived=None) -> None:
    reading = costs.begin(tier, nbytes, 0.0)
    clock.now += seconds
    costs.end(reading, tier, nbytes if arrived is None else arrived)


def advise(costs, tiers, computed=0, *, tokens=None, whole=True, meet=False):
    tokens = len(tiers) * CHUNK[0] if tokens is None else tokens
    where = bytes(map(PLACES.index, tiers))
    return costs.advise(where, PLACES, (computed, tokens), CHUNK, whole=whole, meet=meet)


# ------------------------------------------------------------------------------------- estimates


def test_a_line_tells_latency_from_rate():
    line = Line()
    for nbytes in (1 << 20, 8 << 20, 2 << 20, 16 << 20):
        line.add(nbytes, 0.02 + nbytes / 50e6)
    assert line.latency == pytest.approx(0.02)
    assert 1 / line.per_byte == pytest.approx(50e6)


def test_reads_of_one_size_give_a_rate_alone():
    line = Line()
    for _ in range(4):
        line.add(1 << 20, 0.5)
    assert (line.latency, line.per_byte * (1 << 20)) == (0.0, pytest.approx(0.5))


def test_a_tier_that_has_become_fast_is_known_by_one_small_read():
    line = Line()
    for nbytes in (8 << 20, 16 << 20, 32 << 20):
        line.add(nbytes, nbytes / 1e6)
    line.add(1 << 20, (1 << 20) / 1e9)
    assert line.seconds(32 << 20) == pytest.approx((32 << 20) / 1e9)


def test_a_tier_that_has_become_slow_is_known_by_few_reads():
    line = Line()
    line.add(8 << 20, (8 << 20) / 1e9)
    for _ in range(3):
        line.add(8 << 20, (8 << 20) / 1e6)
    assert line.seconds(8 << 20) > 0.5 * (8 << 20) / 1e6


def test_prefill_tells_tokens_from_attention():
    prefill = Prefill()
    for start in range(0, 2048, 256):
        pairs = ((start + 256) ** 2 - start**2) / 2
        prefill.add([(start, start + 256)], 256 * 1e-3 + pairs * 1e-6)
    assert prefill.per_token == pytest.approx(1e-3)
    assert prefill.per_pair == pytest.approx(1e-6)
    whole = prefill.seconds(0, 4096)
    assert whole == pytest.approx(4096e-3 + 4096**2 / 2 * 1e-6)


def test_decode_steps_say_nothing_of_prefill():
    prefill = Prefill()
    prefill.add([(n, n + 1) for n in range(100, 132)], 0.5)
    prefill.add([], 0.5)
    assert not prefill.known


def test_a_read_that_brought_nothing_says_nothing(costs, clock):
    read(costs, clock, "s3", CHUNK[1], 5.0, arrived=0)
    assert costs.figures() == {}


def test_what_is_queued_counts(costs, clock):
    """Two reads at once take twice as long, which is no news of the tier."""
    first, second = costs.begin("s3", CHUNK[1], 0.0), costs.begin("s3", CHUNK[1], 0.0)
    clock.now += 1.0
    costs.end(first, "s3", CHUNK[1])
    clock.now += 1.0
    costs.end(second, "s3", CHUNK[1])
    (latency, rate) = costs.figures()["s3"]
    assert latency + CHUNK[1] / rate == pytest.approx(1.0, rel=0.01)


# ------------------------------------------------------------------------------------- decisions


def test_what_is_not_known_yet_is_tried(costs, clock):
    assert advise(costs, ["s3"] * 8).choice == "load"
    read(costs, clock, "s3", CHUNK[1], 1e6)
    assert advise(costs, ["s3"] * 8).choice == "load"  # the engine's speed is not known
    costs.computed([(0, 64)], 1e-6)
    assert advise(costs, ["s3"] * 8).choice == "recompute"
    assert advise(costs, ["lmdb"] * 8).choice == "load"


def test_dram_always_pays(costs, clock):
    taught(costs, clock, per_token=1e-12)
    assert advise(costs, ["dram"] * 8).choice == "load"


def test_a_match_is_cut_where_a_slow_tier_begins(costs, clock):
    taught(costs, clock, lmdb=0.001, s3=1.0)  # computing takes 0.064 a chunk
    found = advise(costs, ["dram", "lmdb", "lmdb", "s3", "s3"])
    assert (found.choice, found.tokens, found.skipped) == ("cut", 3 * 64, "s3")
    assert found.seconds == pytest.approx(0.002 + 2 * 0.064)
    assert found.recompute == pytest.approx(5 * 0.064)


def test_a_slow_chunk_is_read_where_much_fast_lies_behind(costs, clock):
    taught(costs, clock, s3=1.0)
    assert advise(costs, ["s3", *["dram"] * 30]).choice == "load"
    assert advise(costs, ["s3", *["dram"] * 3]).choice == "recompute"


def test_windows_and_states_are_loaded_whole_or_not(costs, clock):
    taught(costs, clock, lmdb=0.001, s3=1.0)
    tiers = ["lmdb", "lmdb", "s3"]
    assert advise(costs, tiers).tokens == 2 * 64
    assert advise(costs, tiers, whole=False).tokens == 0


@given(
    st.lists(st.sampled_from(["dram", "lmdb", "s3"]), min_size=1, max_size=12),
    st.floats(0.001, 1.0),
    st.floats(0.001, 1.0),
    st.floats(0, 1e-5),
)
def test_no_other_cut_is_better(tiers, lmdb, s3, per_pair):
    clock = Hands()
    costs = Costs(clock)
    for start in (0, 512):
        pairs = ((start + 64) ** 2 - start**2) / 2
        costs.computed([(start, start + 64)], 0.064 + per_pair * pairs)
    read(costs, clock, "lmdb", CHUNK[1], lmdb)
    read(costs, clock, "s3", CHUNK[1], s3)
    tokens = 64 * len(tiers)

    def seconds(chunks: int) -> float:
        load = max(tiers[:chunks].count("lmdb") * lmdb, tiers[:chunks].count("s3") * s3)
        return load + costs.recompute(64 * chunks, tokens)

    found = advise(costs, tiers)
    if any(tier != "dram" for tier in tiers):
        best = min(map(seconds, range(len(tiers) + 1)))
        assert seconds(found.tokens // 64) == pytest.approx(best)
        assert found.seconds == pytest.approx(best)


def plainly(costs, tiers, computed, tokens, *, whole):
    """Return the seconds of each cut, by its chunks, as one would say it who has all the time."""
    first, seconds = computed // 64, {computed // 64: costs.recompute(computed, tokens)}
    for stop in range(first + 1, len(tiers) + 1) if whole else [len(tiers)]:
        below = Counter(tier for tier in tiers[first:stop] if tier in costs.figures())
        loads = [
            costs._tiers[tier].seconds(count * CHUNK[1] + costs._queued.get(tier, 0))
            for tier, count in below.items()
        ]
        end = min(64 * stop, tokens)
        seconds[stop] = max(loads, default=0.0) + costs.recompute(end, tokens)
    return seconds


RUNS = st.lists(st.tuples(st.sampled_from(PLACES), st.integers(1, 30)), min_size=1, max_size=12)

RUNS_OF_ONE = [("dram", 1), ("s3", 1)] * 2
LOOKS = pytest.mark.parametrize("looks", [0, cut._MOST_LOOKS, 1 << 20])


@LOOKS
@given(
    RUNS,
    st.floats(0.001, 0.3),
    st.floats(0.001, 0.3),
    st.tuples(st.floats(0, 0.5), st.integers(0, 4)),
    st.tuples(st.just(0.0) | st.floats(0.001, 0.003), st.sampled_from([0.0, 1e-8, 1e-5])),
    st.tuples(st.integers(0, 200), st.integers(0, 63)),
    st.booleans(),
)
@example(RUNS_OF_ONE, 0.01, 0.01, (0.0, 0), (0.0, 1e-5), (0, 0), True)
def test_a_decision_is_the_plain_one(looks, runs, lmdb, s3, ahead, speed, lengths, whole):
    """However it is found: by few ends, by all of them, or as a load of all or nothing."""
    costs = Costs(Hands())
    latency, queued = ahead
    costs.believe_tier("lmdb", latency, lmdb / CHUNK[1])
    costs.believe_tier("s3", latency, s3 / CHUNK[1])
    costs.believe_prefill(*speed)
    costs.begin("lmdb", queued * CHUNK[1], 0.0)
    tiers = tuple(tier for tier, count in runs for _ in range(count))
    computed, lacking = lengths
    tokens = 64 * len(tiers) - lacking
    if computed >= tokens:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "_MOST_LOOKS", looks)
        found = advise(costs, tiers, computed, tokens=tokens, whole=whole)
    if all(tier == "dram" for tier in tiers[computed // 64 :]):
        assert found.tokens == tokens
        return
    plain = plainly(costs, tiers, computed, tokens, whole=whole)
    best = min(plain.values())
    assert found.seconds == pytest.approx(best, rel=1e-6, abs=1e-9)
    stop = computed // 64 if found.choice == "recompute" else -(-found.tokens // 64)
    assert plain[stop] == pytest.approx(best, rel=1e-6, abs=1e-9)
    if found.choice != "load":
        assert found.skipped in costs.figures()


BINARY = st.integers(0, 64).map(lambda n: n / 64)
"""Seconds that add up without rounding."""


@LOOKS
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from([1, 1, 2, 9])), min_size=1),
    st.tuples(BINARY, BINARY, BINARY, BINARY),
    st.tuples(st.sampled_from([0, 1, 2, 4, 16]), st.sampled_from([0.0, 2.0**-20, 2.0**-17])),
    st.tuples(st.integers(0, 200), st.integers(0, 63)),
)
def test_of_equal_cuts_the_furthest_is_taken(looks, runs, tiers_take, speed, lengths):
    """And of two ways that take as long as each other, never another than that."""
    costs = Costs(Hands())
    for tier, at in (("lmdb", 0), ("s3", 2)):
        costs.believe_tier(tier, tiers_take[at], tiers_take[at + 1] / CHUNK[1])
    costs.believe_prefill(speed[0] / 1024, speed[1])
    tiers = tuple(tier for tier, count in runs for _ in range(count))
    computed, lacking = lengths
    tokens = 64 * len(tiers) - lacking
    if computed >= tokens or all(tier == "dram" for tier in tiers[computed // 64 :]):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "_MOST_LOOKS", looks)
        found = advise(costs, tiers, computed, tokens=tokens)
    plain = plainly(costs, tiers, computed, tokens, whole=True)
    best = min(plain.values())
    stop = max(end for end, seconds in plain.items() if seconds == best)
    assert (found.seconds, found.tokens) == (best, max(computed, min(64 * stop, tokens)))


@given(
    st.integers(3, 60), st.floats(0.01, 0.3), st.integers(0, 2), st.sampled_from([0.0, 1e-7, 1e-5])
)
def test_no_other_meeting_is_better(chunks, lmdb, computed, per_pair):
    costs = Costs(Hands())
    costs.believe_prefill(1e-3, per_pair)
    costs.believe_tier("lmdb", 0.0, lmdb / CHUNK[1])
    found = advise(costs, ["lmdb"] * chunks, computed * 64, meet=True)

    def seconds(begin: int) -> float:
        return max((chunks - begin) * lmdb, costs.recompute(computed * 64, begin * 64))

    pure = min((chunks - computed) * lmdb, costs.recompute(computed * 64, chunks * 64))
    best = min(map(seconds, range(computed + 1, chunks)), default=pure)
    if found.choice == "meet":
        assert seconds(found.begin // 64) == pytest.approx(best)
        assert best <= 0.85 * pure
    else:
        assert best >= 0.85 * pure * 0.999


def test_nobody_meets_where_one_way_is_much_better(costs, clock):
    taught(costs, clock, lmdb=0.001, s3=10.0)
    assert advise(costs, ["lmdb"] * 16, meet=True).choice == "load"
    assert advise(costs, ["s3"] * 16, meet=True).choice == "recompute"
    assert advise(costs, ["dram", *["s3"] * 3], meet=True).choice == "cut"


# ---------------------------------------------------------------------------------------- probes


def test_a_tier_that_loses_is_tried_less_often_yet_each_half_minute(costs, clock):
    due = []
    for second in range(200):
        clock.now = 100.0 + second
        due += [second] * costs.probe_due("s3")
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert due[0] == 0
    assert gaps == [5, 10, *[20] * 9]
    costs.wins("s3")
    assert costs.probe_due("s3")


# ------------------------------------------------------------------------------- odd observations


def test_one_step_that_seems_instant_outweighs_no_others():
    prefill = Prefill()
    for _ in range(20):
        prefill.add([(0, 512)], 0.512)
    prefill.add([(0, 512)], 1e-6)
    assert prefill.seconds(0, 512) > 0.2
    for _ in range(12):  # an engine that has become fast is known all the same
        prefill.add([(0, 512)], 0.00512)
    assert prefill.seconds(0, 512) == pytest.approx(0.00512, rel=0.1)


def test_a_tier_that_is_not_known_yet_does_not_have_a_slow_one_loaded(costs, clock):
    taught(costs, clock, s3=1.0)
    found = advise(costs, ["lmdb", "lmdb", "s3", "s3"])
    assert (found.choice, found.tokens, found.skipped) == ("cut", 2 * 64, "s3")
    assert advise(costs, ["lmdb"] * 8, meet=True).choice == "load"


def test_of_windows_the_tier_that_loses_is_named_and_not_dram(costs, clock):
    """What windows have passed counts as in DRAM: tried again there, a tier would lose for ever."""
    taught(costs, clock, lmdb=0.001, s3=1.0)
    assert advise(costs, ["dram", "lmdb", "s3"], whole=False).skipped == "s3"


def test_a_read_that_outlasts_its_time_tells_that_its_tier_is_slow(costs, clock):
    taught(costs, clock, s3=0.001)
    reading = costs.begin("s3", CHUNK[1], 0.0)
    clock.now += 5.0
    costs.end(reading, "s3", 0)
    costs.overdue(reading, "s3", CHUNK[1])
    assert advise(costs, ["s3"] * 8).choice == "recompute"
    costs.overdue(costs.begin("s3", CHUNK[1], 0.0), "s3", CHUNK[1])  # longer than nothing: no news
    assert advise(costs, ["s3"] * 8).choice == "recompute"


def waited_in_vain(costs, clock, most: int) -> int:
    """Return how many requests wait for a tier that brings nothing in their five seconds."""
    taught(costs, clock, per_token=1.0, s3=0.001)
    for number in range(most):
        if advise(costs, ["s3"] * 8).choice == "recompute":
            return number
        reading = costs.begin("s3", 8 * CHUNK[1], 0.0)
        clock.now += 5.0
        costs.end(reading, "s3", 0)
        costs.overdue(reading, "s3", 8 * CHUNK[1])
    return most


def test_a_tier_loses_also_where_computing_takes_longer_than_a_read_may(costs, clock):
    assert waited_in_vain(costs, clock, 50) < 12


def test_twin_unless_it_is_taken_to_need_longer_each_time(costs, clock, monkeypatch):
    monkeypatch.setattr("kvtier.cost._LATER", 1.0)
    assert waited_in_vain(costs, clock, 50) == 50
