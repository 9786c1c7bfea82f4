"""What lies above a policy: a time after which what is not used leaves, and priorities."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtier
from kvtier.cache import Cache
from kvtier.catalog.index import Index
from kvtier.cli.main import run
from kvtier.config import Config, TierConfig
from kvtier.errors import ConfigError
from kvtier.planning.replay import make_policy, overlay_of, replay
from kvtier.planning.simulate import Overlay, Tier, leading, simulate
from kvtier.planning.trace import Trace
from kvtier.policies.ages import Ages
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.hands import Hands
from kvtier.testing.inside import inside
from kvtier.testing.simscenario import Scenario
from kvtier.testing.simtask import SimError
from kvtier.testing.simworld import run_world
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, NAMESPACE, Toy, prompt

POLICIES = ("lru", "arc", "s3fifo", "lfu")


def until(done) -> bool:
    limit = time.monotonic() + 20
    while not done() and time.monotonic() < limit:
        time.sleep(0.01)
    return done()


def settle(toy) -> None:
    """Wait until uses are marked, which is put off a little."""
    assert until(lambda: not inside(toy.cache).depot.catalog._room.behind)


# ------------------------------------------------------------------------------------------ ages


@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "use", "leave", "wait"]), st.integers(0, 6)),
        max_size=60,
    )
)
def test_a_row_is_overdue_when_its_time_is_over_and_at_most_a_step_later(calls):
    clock, last = Hands(1000.0), {}
    ages = Ages(16.0, clock)
    for call, row in calls:
        if call == "enter":
            ages.enter(row)
            last[row] = clock.now
        elif call == "use":
            ages.used((row, row + 1))
            last |= {one: clock.now for one in (row, row + 1) if one in last}
        elif call == "leave":
            ages.leave(row)
            last.pop(row, None)
        else:
            clock.now += row
            found = ages.overdue(100)
            assert all(clock.now - last[one] >= 16.0 for one in found)
            assert {one for one in last if clock.now - last[one] > 18.0} <= set(found)
            for one in found:
                ages.leave(one)
                del last[one]
        assert len(ages) == len(last)
        assert not last or ages.waiting() <= (clock.now - min(last.values()) >= 16.0)


def test_a_row_that_is_kept_is_told_again_a_step_later():
    clock = Hands(1000.0)
    ages = Ages(16.0, clock)
    for row in range(3):
        ages.enter(row)
    clock.now += 18
    assert ages.overdue(2) == [2, 1]
    assert ages.overdue(9) == [0]
    assert ages.overdue(9) == []
    clock.now += 1
    assert sorted(ages.overdue(9)) == [0, 1, 2]


# --------------------------------------------------------------------------------- the live cache


@pytest.fixture
def clock():
    return Hands(1000.0)


@pytest.fixture
def toy(clock):
    """Sixteen chunks of DRAM that go unused for ten seconds, above a tier with a minute."""
    tier = TierConfig("memory", "", None, "through", store=MemoryStore(), ttl=60.0)
    one = Toy(Cache(Config(16 * CHUNK_BYTES, (tier,), ttl=10.0), NAMESPACE, clock=clock))
    yield one
    one.close()


def test_what_is_not_used_leaves_each_tier_in_its_time(toy, clock):
    tokens, other = prompt(3 * CHUNK + 1), prompt(2 * CHUNK + 1, 1)
    toy.save("a", tokens)
    toy.save("b", other)
    assert toy.cache.flush(timeout=20)
    for _ in range(3):
        settle(toy)
        clock.now += 5
        assert toy.cache.match(other).tiers == ("dram",) * 2
    assert until(lambda: toy.cache.metrics.get("idle_parts", tier="dram") == 3)
    assert toy.cache.match(tokens).tiers == ("memory",) * 3
    assert toy.cache.match(other).tiers == ("dram",) * 2
    settle(toy)
    clock.now += 70
    assert until(lambda: toy.cache.metrics.get("idle_parts", tier="memory") == 5)
    assert "not used for its ttl" in str(toy.cache.explain(tokens))
    assert not toy.cache.match(tokens).tokens
    assert not toy.cache.match(other).tokens
    assert toy.cache.flush(timeout=20)
    assert toy.cache.figures()['kvtier_tier_used_bytes{tier="memory"}'] == 0


def test_what_is_held_stays(toy, clock):
    tokens = prompt(3 * CHUNK + 1)
    toy.save("a", tokens)
    toy.save("b", prompt(CHUNK + 1, 1))
    assert toy.cache.flush(timeout=20)
    with toy.cache.lease(toy.cache.match(tokens), deadline=1000.0):
        settle(toy)
        clock.now += 100
        assert until(lambda: toy.cache.metrics.get("idle_parts", tier="dram") == 1)
        assert [chunk.where() for chunk in toy.cache.explain(tokens).chunks[:3]] == [
            "dram, memory"
        ] * 3
    clock.now += 1
    assert until(lambda: toy.cache.metrics.get("idle_parts", tier="dram") == 4)


def test_a_shared_tier_has_no_time(tmp_path):
    with pytest.raises(ConfigError, match="is shared, and who else uses"):
        kvtier.open("dram:1MiB", f"files:{tmp_path}?capacity=1GiB&ttl=1h", namespace=NAMESPACE)
    with pytest.raises(ConfigError, match="is not above nothing"):
        Config.from_urls(["dram:1MiB?ttl=0s"])
    config = Config.from_urls(["dram:1MiB?ttl=1h", "memory:x?capacity=1MiB&ttl=90s"])
    assert (config.ttl, config.tiers[0].ttl) == (3600.0, 90.0)


def live(caplog, seeds):
    caplog.set_level("CRITICAL", logger="kvtier")
    idle = 0.0
    for seed in seeds:
        worlds = []
        drawn = Scenario.draw(seed)
        policy = POLICIES[seed % len(POLICIES)]
        scenario = dataclasses.replace(drawn, ttl=0.3, ops=120, policy=policy)
        run_world(seed, scenario, watch=worlds.append)
        found = worlds[-1].cache.metrics.snapshot()
        idle += sum(count for name, count in found.items() if "idle_parts" in name)
    return idle


def test_worlds_in_which_parts_go_idle_end_well(caplog):
    assert live(caplog, range(12)) > 20


def test_where_heads_go_idle_before_their_tails_a_world_ends_badly(caplog, monkeypatch):
    """The twin: an idle part leaves as a leaf, or not yet."""
    monkeypatch.setattr(Index, "leaf", lambda self, row, tier: not self.holds[row])
    with pytest.raises((SimError, AssertionError)):
        live(caplog, range(12))


# ------------------------------------------------------------------------------------- simulated

PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=25
)


def trace_of(prompts, every=1.0):
    trace = Trace("drawn", 4)
    for number, one in enumerate(prompts):
        hashes = [str(one[: depth + 1]) for depth in range(len(one))]
        trace.add(number * every, 4 * len(one), 1, hashes)
    return trace


@pytest.mark.parametrize("name", POLICIES)
@given(PROMPTS, st.integers(5, 12), st.sampled_from([1.5, 4.0, None]), st.booleans())
def test_under_overlays_a_simulated_tier_has_no_headless_tails(
    name, prompts, capacity, ttl, upside_down
):
    trace = trace_of(prompts)
    ranges = [(4, None, 5), (8, 12, 9)] if upside_down else [(0, 4, 3)]
    trace.seconds_per_unit = 1.0
    overlay = overlay_of(trace, ranges, ttl)
    tier = Tier(trace, make_policy(name, trace), capacity, servable=True, overlay=overlay)
    used: dict[int, float] = {}
    for number, (blocks, _) in enumerate(trace.requests()):
        tier.pass_time(float(number))
        inside = [block for block in range(trace.unique) if tier.inside[block]]
        assert ttl is None or all(number - used[block] <= ttl * 18 / 16 + 1 for block in inside)
        tier.use(blocks, leading(blocks, tier.inside))
        used |= dict.fromkeys(blocks, float(number))
        inside = [block for block in range(trace.unique) if tier.inside[block]]
        assert len(inside) <= capacity
        assert all(trace.parent[block] < 0 or tier.inside[trace.parent[block]] for block in inside)


def test_a_time_that_is_short_loses_what_comes_back_late():
    trace = trace_of([(0, 0), (1, 1), (0, 0), (1, 1)], every=10.0)
    rates = [
        simulate(trace, make_policy("lru", trace), 9, overlay=Overlay((), ttl)).rate_blocks
        for ttl in (None, 25.0, 5.0)
    ]
    assert rates == [50.0, 50.0, 0.0]


def test_what_has_priority_outlives_what_has_none():
    prompts = [(0, 0), *((number, 1) for number in (1, 2, 1, 2, 1, 2)), (0, 0)]
    trace = trace_of(prompts)
    overlays = Overlay(), overlay_of(trace, [(0, 4, 1)], None)
    found = [replay(trace, ["lru"], [4], warmup=0.875, overlay=one).results[0] for one in overlays]
    assert [one.hit_rate_blocks for one in found] == [0.0, 50.0]


def test_the_command_takes_overlays(tmp_path, capsys):
    file, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    lines = [
        {"timestamp": 10_000 * n, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]}
        for n in range(4)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = ["replay", str(file), "--block-size", "4", "--json", str(out)]
    single = [*base, "--capacity-blocks", "4", "--policy", "lru"]
    stack = [*base, "--policy", "lru", "--bytes-per-token", "1KiB", "--tier", "dram:64KiB@10GB/s"]

    def rate(*args):
        assert run(list(args)) == 0
        report = json.loads(out.read_text())
        return (
            report["results"][0]["hit_rate_tokens"] if "results" in report else report["hit_rate"]
        )

    for command in (single, stack):
        assert rate(*command) == rate(*command, "--ttl", "1h", "--priority", "0:4=9") > 0
        assert rate(*command, "--ttl", "5s") == 0
    for wrong, said in (
        (["--ttl", "5"], "no known unit"),
        (["--ttl", "0s"], "keeps nothing"),
        (["--priority", "9"], "a priority looks like"),
        (["--priority", "0:8=101"], "priority"),
        (["--priority", "8:8=1"], "stop"),
    ):
        assert run([*single, *wrong]) == 2
        assert said in capsys.readouterr().err
