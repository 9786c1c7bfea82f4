"""``kvtier replay --tier``: a stack of tiers on traces that can be reckoned by hand."""

from __future__ import annotations

import json
import random

import pytest

from kvtier.cli.main import run
from kvtier.cli.stack import parse_level
from kvtier.errors import ConfigError
from kvtier.planning.prices import Prices, read_prices
from kvtier.planning.queueing import Work, serve
from kvtier.planning.simulate import simulate
from kvtier.planning.stack import Level, Speeds, simulate_stack
from kvtier.planning.trace import Trace
from kvtier.policies.lru import Lru

BLOCK = 4
PER_TOKEN = 256
BLOCK_BYTES = BLOCK * PER_TOKEN
FAST, SLOW = 1e12, 1e3


def traced(*prompts, seconds=60) -> Trace:
    trace = Trace("t", BLOCK)
    for number, blocks in enumerate(prompts):
        trace.add(number * seconds * 1000, len(blocks) * BLOCK + 1, 1, blocks)
    return trace


def level(name, blocks, speed=FAST, latency=0.0) -> Level:
    return Level(name, None if blocks is None else blocks * BLOCK_BYTES, speed, latency)


def stacked(trace, *levels, **how):
    settings = {"speeds": Speeds(0.01), "prices": Prices(), "bytes_per_token": PER_TOKEN} | how
    return simulate_stack(trace, levels, ("lru", Lru), **settings)


def test_each_block_comes_from_the_fastest_tier_that_has_it():
    found = stacked(
        traced(["a", "b"], ["c", "d"], ["a", "b"], ["a", "b"]), level("dram", 2), level("lmdb", 4)
    )
    dram, lmdb = found.levels
    assert (dram.hit_tokens, lmdb.hit_tokens) == (2 * BLOCK, 2 * BLOCK)
    assert (dram.written_bytes, lmdb.written_bytes) == (6 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert lmdb.read_bytes == 2 * BLOCK_BYTES
    assert found.hit_rate == pytest.approx(100 * 16 / 36, abs=0.001)
    assert lmdb.reached == pytest.approx(found.hit_rate)


def test_a_tier_that_is_slower_than_computing_is_left_alone():
    trace = traced(["a", "b"], ["c", "d"], ["a", "b"])
    slow = stacked(trace, level("dram", 2), level("s3", None, SLOW))
    assert slow.levels[1].hit_tokens == 0
    assert slow.skipped_tokens == 2 * BLOCK
    assert slow.ttft == slow.ttft_without
    forced = stacked(trace, level("dram", 2), level("s3", None, SLOW), always=True)
    assert forced.levels[1].hit_tokens == 2 * BLOCK
    assert forced.ttft.p99 > slow.ttft.p99


def test_times_are_those_of_reading_and_of_computing_the_rest():
    found = stacked(
        traced(["a", "b"], ["a", "b", "c"]), level("dram", 8, BLOCK_BYTES / 0.02, 0.01), warmup=0.5
    )
    assert found.ttft_without.p50 == pytest.approx(13 * 0.01)
    assert found.ttft.p50 == pytest.approx(0.01 + 2 * 0.02 + 5 * 0.01)


def served(*requests, alone=False):
    """Serve requests: when each comes, what it loads, and computes. Return times, and the order."""
    looked, ended = [], []

    def begin(number, now):
        _, loads, computes = requests[number]
        looked.append((number, now))
        return Work(now + loads, computes, 0.0, loads + computes)

    came = [request[0] for request in requests]
    return serve(came, begin, ended.append, alone=alone), looked, ended


def test_requests_at_the_traces_times_wait_for_each_other():
    requests = (0.0, 2.5, 1.0), (1.0, 2.5, 1.0), (3.0, 0.0, 1.0), (3.2, 0.0, 1.0)
    times, looked, ended = served(*requests)
    # All that come while nobody can be computed are looked up, and who needs not wait is first.
    assert looked == [(0, 0.0), (1, 1.0), (2, 4.5), (3, 5.5)]
    assert (times, ended) == ([3.5, 3.5, 2.5, 3.3], [0, 1, 2, 3])
    assert served(*requests, alone=True)[0] == [3.5, 3.5, 1.0, 1.0]


def test_who_waits_for_what_it_loads_is_passed_over_and_no_longer_than_that():
    times, looked, ended = served(
        (0.0, 5.0, 1.0), (0.0, 0.0, 4.0), (0.0, 0.0, 4.0), (0.0, 0.0, 1.0)
    )
    assert looked == [(0, 0.0), (1, 0.0), (2, 4.0), (3, 9.0)]
    assert ended == [1, 2, 0, 3]
    assert times == [9.0, 4.0, 8.0, 10.0]


def test_what_was_computed_while_a_request_waited_is_there_when_its_turn_comes():
    trace = traced(["a", "b"], ["a", "b"], ["a", "b"], seconds=0)
    at_once = stacked(trace, level("dram", 8), at_times=True)
    assert at_once.levels[0].hit_tokens == 2 * 2 * BLOCK
    assert at_once.ttft.p50 == pytest.approx(9 * 0.01 + 0.01)


def below(*prompts, speed, at_times=True, dram=9, **how):
    """Replay prompts that only the tier below has, and behind them what puts them there."""
    fill = [[one] for one in range(dram)]
    trace = Trace("t", BLOCK)
    for number, blocks in enumerate((*prompts, *fill)):
        trace.add(1000 * number, len(blocks) * BLOCK + 1, 1, blocks)
    for blocks in prompts:
        trace.add(1000 * 1000, len(blocks) * BLOCK + 1, 1, blocks)
    levels = level("dram", dram), level("lmdb", None, BLOCK_BYTES / speed)
    warmup = (len(trace) - len(prompts)) / len(trace)
    return stacked(trace, *levels, at_times=at_times, warmup=warmup, **how)


PROMPTS = [f"a{n}" for n in range(8)], [f"b{n}" for n in range(8)]


def test_what_is_queued_at_a_tier_is_waited_for_or_computed():
    """A prompt is loaded in 0.048 s and computed in 0.32: which the last of nine waits longer."""
    prompts = [[f"{name}{n}" for n in range(8)] for name in "abcdefghi"]
    alone = below(*prompts, speed=0.006, dram=150, at_times=False)
    assert alone.levels[1].hit_tokens == 9 * 8 * BLOCK
    forced, decided = (below(*prompts, speed=0.006, dram=150, always=one) for one in (True, False))
    assert forced.levels[1].hit_tokens == 9 * 8 * BLOCK
    assert 0 < decided.skipped_tokens <= 2 * 8 * BLOCK
    assert decided.levels[1].hit_tokens + decided.skipped_tokens == 9 * 8 * BLOCK


def test_where_loading_takes_as_long_as_computing_they_meet_in_the_middle():
    found = below(PROMPTS[0], speed=0.04)
    assert found.levels[1].hit_tokens == 4 * BLOCK
    assert found.ttft.p50 == pytest.approx(4 * 0.04 + 0.01)
    assert found.skipped_tokens == 4 * BLOCK


def test_no_read_begins_while_reads_fill_half_of_dram():
    """As live; with room for more it does."""
    few, many = (below(*PROMPTS, speed=0.001, always=True, dram=n) for n in (15, 17))
    assert few.levels[1].hit_tokens == 8 * BLOCK
    assert many.levels[1].hit_tokens == 16 * BLOCK


def test_what_another_request_reads_is_waited_for_and_read_once():
    found = below(PROMPTS[0], PROMPTS[0], speed=0.01, always=True)
    assert found.levels[1].read_bytes == 8 * BLOCK_BYTES
    assert found.ttft.p50 == pytest.approx(8 * 0.01 + 1.5 * 0.01)


@pytest.mark.parametrize("at_times", [False, True])
def test_what_comes_at_once_is_computed_one_after_the_other(at_times):
    trace = traced(["a", "b"], ["c", "d"], ["e", "f"], seconds=0)
    found = stacked(trace, level("dram", 8), at_times=at_times)
    one = 9 * 0.01
    assert found.ttft.p50 == pytest.approx(2 * one if at_times else one)
    assert found.ttft_without == found.ttft
    assert found.gpu_hours_saved == 0.0


def test_a_last_block_that_is_not_full_counts_with_the_tokens_it_has():
    trace = Trace("t", BLOCK)
    for number in range(4):
        trace.add(number, BLOCK + 1, 1, ["a", "b"])
    found = stacked(trace, level("dram", 2), level("lmdb", 3), always=True)
    assert sum(one.hit_tokens for one in found.levels) == 3 * (BLOCK + 1)
    assert found.levels[-1].reached == pytest.approx(found.hit_rate)
    assert found.levels[-1].reached <= found.levels[-1].bound


def test_money_and_wear_follow_from_the_prices():
    prices = Prices(dram_gib_month=2.0, disk_gib_month=0.5, gpu_hour=10.0)
    gib = 1 << 30
    assert prices.a_month("dram", 4 * gib, 9, 9, 1.0) == 8.0
    assert prices.a_month("lmdb", 4 * gib, 9, 9, 1.0) == 2.0
    month = 30 * 24.0
    requests = prices.object_put_1000 + 2 * prices.object_get_1000
    assert prices.a_month("s3", 0, 2000, 1000, month) == pytest.approx(requests)
    assert prices.life_years("lmdb", gib, 2 * gib) == pytest.approx(2.5)
    assert prices.life_years("dram", gib, gib) == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_no_stack_beats_its_bound_and_one_tier_is_the_tier_alone(seed):
    rng = random.Random(seed)
    heads = [[f"{h}.{d}" for d in range(rng.randrange(1, 5))] for h in range(6)]
    prompts = []
    for _ in range(60):
        head = rng.choice(heads)
        tail = f"{head[-1]}/{rng.randrange(4)}"
        prompts.append([*head, tail] if rng.random() < 0.5 else head)
    trace = traced(*prompts)
    sizes = [rng.randrange(1, 6) for _ in range(3)]
    levels = [level(f"t{n}", size) for n, size in enumerate(sizes)]
    found = stacked(trace, *levels, always=True)
    for one in found.levels:
        assert one.reached <= one.bound + 1e-9
    alone = stacked(trace, levels[0], always=True)
    hits = simulate(trace, Lru, sizes[0])
    assert alone.levels[0].hit_rate == pytest.approx(hits.rate_tokens, abs=0.001)


# ------------------------------------------------------------------------------- command, bad input


@pytest.fixture
def trace_file(tmp_path):
    lines = [
        {"timestamp": 1000 * n, "input_length": 8, "output_length": 1, "hash_ids": one}
        for n, one in enumerate([[1, 2], [3, 4], [1, 2]])
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


TIERS = ("--tier", "dram:2KiB@25GB/s", "--tier", "lmdb:8KiB@5GB/s+100us", "--block-size", "4")


def test_the_command_shows_a_row_a_tier_and_writes_json(trace_file, tmp_path, capsys):
    out = tmp_path / "o.json"
    args = [str(trace_file), *TIERS, "--bytes-per-token", "256B", "--json", str(out)]
    assert run(["replay", *args]) == 0
    report = json.loads(out.read_text())
    assert [one["name"] for one in report["levels"]] == ["dram", "lmdb"]
    shown = capsys.readouterr().out
    assert "lmdb" in shown
    assert "TTFT without" in shown
    assert "Without is an engine that computes all of it, and keeps nothing in GPU memory." in shown


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--tier", "dram"), "looks like"),
        (("--tier", "dram:1GiB"), "looks like"),
        (("--tier", "dram:1GiB@5"), "looks like"),
        (("--tier", "dram:much@5GB/s"), "size"),
        (("--tier", "dram:1GiB@5GB/s+soon"), "duration"),
        (("--tier", "dram:1GiB@5GB/s", "--tier", "dram:1GiB@5GB/s"), "name of its own"),
        (("--tier", "dram:1B@5GB/s"), "no room"),
        (("--tier", "dram:1GiB@5GB/s", "--capacity-blocks", "3"), "leave --capacity-blocks"),
        (("--tier", "dram:1GiB@5GB/s", "--policy", "optimal"), "needs a policy"),
        (("--tier", "dram:1GiB@5GB/s", "--sweep"), "leave --sweep"),
        (("--tier", "dram:1GiB@5GB/s", "--no-servable"), "--no-servable"),
        (("--tier", "lmdb:1GiB@5GB/s", "--tier", "dram:1GiB@5GB/s"), "dram comes first"),
        (("--tier", "dram:1GiB@5GB/s", "--prefill", "nan"), "--prefill"),
        (("--tier", "dram:1GiB@5GB/s+2h"), "a latency of 2h is beyond 3600s"),
        ([word for n in range(17) for word in ("--tier", f"t{n}:1GiB@5GB/s")], "at most 16"),
    ],
)
def test_what_makes_no_stack_is_told(trace_file, capsys, args, word):
    command = ["replay", str(trace_file), "--block-size", "4", "--bytes-per-token", "256B", *args]
    assert run(command) != 0
    assert word in capsys.readouterr().err


def test_tiers_need_to_know_what_a_token_takes(trace_file, capsys):
    assert run(["replay", str(trace_file), *TIERS]) != 0
    assert "--bytes-per-token" in capsys.readouterr().err


def test_prices_are_read_and_checked(tmp_path, capsys):
    path = tmp_path / "p.toml"
    path.write_text("gpu_hour = 7\n")
    assert read_prices(path).gpu_hour == 7.0
    for text, word in (
        ("gpu_our = 7", "gpu_hour"),
        ("gpu_hour = -1", "0 or more"),
        ("gpu_hour = 'x'", "number"),
        ("gpu_hour", "TOML"),
        ("gpu_hour = nan", "0 or more, not nan"),
        ("gpu_hour = " + "9" * 9000, "too long a number"),
        ("gpu_hour = " + "[" * 9000, "too deep"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_prices(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prices(tmp_path / "none")
    assert run(["replay", "--help-prices"]) == 0
    shown = tmp_path / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert read_prices(shown) == Prices()


def test_a_level_is_read():
    assert parse_level("s3:unbounded@1GB/s+20ms") == Level("s3", None, 1e9, 0.02)
