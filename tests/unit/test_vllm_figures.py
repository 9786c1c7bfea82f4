"""A cache's figures among vLLM's metrics. What real vLLM makes of them is in tests/engines."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.connectors.vllm_figures import Changes, Exported, Watched
from kvtier.metrics import TABLE
from kvtier.testing.hands import Hands
from kvtier.testing.toy import CHUNK, dram, opened, prompt

DRAM = 'kvtier_hit_tokens_total{tier="dram"}'
PARTS = 'kvtier_tier_parts{tier="dram"}'


@pytest.fixture
def clock():
    return Hands(50.0)


@pytest.fixture
def watch(clock):
    made = []

    def start(figures):
        made.append(Watched(figures, clock))
        return made[-1]

    yield start
    for one in made:
        one.close()


def told(watched, clock, seconds=6.0):
    """Wait for what is told next."""
    clock.now += seconds
    until = time.monotonic() + 20
    while (found := watched.changes()) is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return found.to_dict()


class Family:
    """Stands for a metric of prometheus_client's."""

    def __init__(self, name, documentation, labelnames, multiprocess_mode=None):
        self.name, self.about, self.labelnames = name, documentation, labelnames
        self.mode = multiprocess_mode
        self.values = {}

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        self.of = values
        return self

    def inc(self, amount):
        assert amount >= 0  # as the real one demands
        self.values[self.of] = self.values.get(self.of, 0) + amount

    def set(self, value):
        self.values[self.of] = value


class Counter(Family):
    pass


class Gauge(Family):
    pass


@pytest.fixture
def exported():
    kinds = {Counter: Counter, Gauge: Gauge}
    return Exported(kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_what_a_cache_counts_arrives_as_vllms_metric(watch, clock, exported):
    toy = opened(dram(32))
    watched = watch(toy.cache.figures)
    for turn in (1, 2):
        toy.save(f"a{turn}", prompt(2 * CHUNK + 1))
        toy.load(f"b{turn}", prompt(2 * CHUNK + 1))
        exported.observe(told(watched, clock), 1)
        metric = exported._metrics["kvtier_hit_tokens_total"]
        assert metric.name == "vllm:kvtier_hit_tokens"
        assert metric.values == {("m", "1", "dram"): turn * 2 * CHUNK}
        parts = exported._metrics["kvtier_tier_parts"]
        assert (parts.mode, parts.values) == ("mostrecent", {("m", "1", "dram"): 2})
    toy.close()


def test_every_figure_has_a_name_that_vllm_takes_back(exported):
    """vLLM drops its metrics before an engine is made anew, and knows them by their name."""
    names = {metric.name for metric in exported._metrics.values()}
    assert len(names) == len(TABLE)
    assert all(name.startswith("vllm:kvtier_") for name in names)


def test_no_step_waits_for_figures(watch, clock):
    gate, asked = threading.Event(), []

    def figures():
        asked.append(1)
        gate.wait(20)
        return {DRAM: 3.0}

    watched = watch(figures)
    for _ in range(100):  # while the first look hangs
        clock.now += 10
        assert watched.changes() is None
    gate.set()
    assert told(watched, clock) == {DRAM: 3}
    assert len(asked) == 1


def test_between_two_looks_some_seconds_pass(watch, clock):
    asked = []
    watched = watch(lambda: asked.append(1) or {DRAM: float(len(asked))})
    told(watched, clock)
    clock.now += 4.9
    assert [watched.changes() for _ in range(100)] == [None] * 100
    assert len(asked) == 1
    assert told(watched, clock, 0.2) == {DRAM: 1}


def test_counters_are_told_by_what_they_rose_and_gauges_as_they_are(watch, clock):
    found = iter(({DRAM: 5, PARTS: 9}, {DRAM: 5, PARTS: 9}, {DRAM: 7, PARTS: 4}, {DRAM: 2}))
    watched = watch(lambda: next(found))
    assert told(watched, clock) == {DRAM: 5, PARTS: 9}
    assert told(watched, clock) == {}
    assert told(watched, clock) == {DRAM: 2, PARTS: 4}
    assert told(watched, clock) == {DRAM: 2}  # of a daemon that has begun anew


def test_a_look_that_fails_is_told_and_the_next_one_goes_on(watch, clock, caplog):
    found = iter((ZeroDivisionError("no figures"), {DRAM: 5}))

    def figures():
        one = next(found)
        if isinstance(one, Exception):
            raise one
        return one

    watched = watch(figures)
    clock.now += 1
    until = time.monotonic() + 20
    while not caplog.records:
        assert watched.changes() is None
        assert time.monotonic() < until
    assert "figures cannot be told to vLLM: no figures" in caplog.text
    assert told(watched, clock) == {DRAM: 5}


def test_what_vllm_logs_is_what_came_since_its_last_line(exported):
    first = Changes({DRAM: 5, PARTS: 9, "kvtier_saved_chunks_total": 3})
    both = first.aggregate(Changes({DRAM: 2, PARTS: 4}))
    assert both.to_dict() == {DRAM: 7, PARTS: 4, "kvtier_saved_chunks_total": 3}
    assert both.reduce() == {'hit_tokens_total{tier="dram"}': 7}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
    exported.observe({"kvtier_of_a_later_release_total": 1})
