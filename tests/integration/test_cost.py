"""A real engine on a real tier whose speed is given: what is loaded, what is computed."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import kvtier
from kvtier.bench.messages import LoadModel
from kvtier.bench.models import load_model
from kvtier.config import Config, TierConfig
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Sampling
from kvtier.engine.request import Request
from kvtier.errors import MisuseError
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.slowed import Slowed

CHUNK = 64
PROMPT = 640
CAPACITY = 64 << 20
OUTPUT = Sampling(max_tokens=3)


@pytest.fixture(scope="module")
def bench():
    return load_model(LoadModel("random", CHUNK))


class Place:
    """An engine on a cache whose one tier below DRAM is as slow as is wanted."""

    def __init__(self, bench, **how) -> None:
        store = MemoryStore.open("", CAPACITY, {})
        self.reads = Slowed(store)
        tier = TierConfig("memory", "", CAPACITY, "through", store=store)
        self.cache = kvtier.open(Config(16 << 20, (tier,)), namespace=bench.namespace)
        self.device = CpuDevice()
        sizes = {"num_blocks": 256, "chunk_tokens": CHUNK, "step_tokens": 96}
        self.engine = Engine(bench.model, **(sizes | how))
        self.connector = ReferenceConnector(self.cache, list(self.engine.kv), self.device)
        self.engine.connect(self.connector)

    def forget(self) -> None:
        """Leave what was computed to the tier alone."""
        while not self.engine.idle:  # copies of the last saves may be under way
            self.engine.step()
        self.engine.reset_prefix_cache()
        assert self.cache.flush(timeout=20)
        self.cache.clear("dram")

    def teach(self, *, compute: float, load: float) -> None:
        """Say what computing a token takes, and reading one, in seconds."""
        costs = self.cache._adviser.costs
        costs._prefill.__init__()
        costs._tiers.clear()
        self.cache.computed([(0, CHUNK)], CHUNK * compute)
        reading = costs.begin("memory", 1 << 20, 0.0)
        costs.end(reading, "memory", 1 << 20)
        per_token = self.cache.geometry.bytes_per_token
        costs._tiers["memory"].latency, costs._tiers["memory"].per_byte = 0.0, load / per_token

    def choices(self) -> dict[str, float]:
        """Return what was chosen, and how often."""
        metrics = self.cache.metrics
        kinds = ("load", "cut", "recompute", "meet")
        counts = {one: metrics.get("load_decisions", choice=one) for one in kinds}
        return {one: count for one, count in counts.items() if count}

    def serve(self, prompt):
        (done,) = self.engine.generate([prompt], OUTPUT)
        return done

    def close(self) -> None:
        self.engine.close()
        self.cache.close()
        self.device.close()


@pytest.fixture
def placed(bench):
    places = []

    def make(**how):
        places.append(Place(bench, **how))
        return places[-1]

    yield make
    for place in places:
        place.close()


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 258, PROMPT).tolist()


def test_what_loses_is_computed_and_what_wins_is_loaded(placed):
    place = placed()
    cold = place.serve(prompt_of(1))
    place.forget()
    place.teach(compute=1e-9, load=1.0)
    done = place.serve(prompt_of(1))
    assert done.tokens == cold.tokens
    assert done.finish.stats.hit_tokens == {}
    assert place.choices() == {"recompute": 1}
    place.forget()
    place.teach(compute=1.0, load=1e-9)
    done = place.serve(prompt_of(1))
    assert done.tokens == cold.tokens
    assert done.finish.stats.hit_tokens == {"memory": PROMPT - 16}  # all but the last block


def test_a_tier_that_has_become_fast_is_used_again(placed):
    """The first request that skips it has a little of it read, which tells that it is fast."""
    place = placed()
    cold = place.serve(prompt_of(1))
    place.forget()
    place.teach(compute=0.01, load=1.0)
    place.serve(prompt_of(1))
    assert place.choices() == {"recompute": 1}
    assert place.cache.flush(timeout=20)
    for _ in range(200):  # the probe ends by itself
        place.forget()
        costs = place.cache._adviser.costs
        costs._prefill.__init__()
        place.cache.computed([(0, CHUNK)], CHUNK * 0.01)
        done = place.serve(prompt_of(1))
        if done.finish.stats.hit_tokens:
            break
    assert done.tokens == cold.tokens
    assert done.finish.stats.hit_tokens.get("memory")


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_meets_its_load_in_the_middle(placed, ahead):
    place = placed(ahead=ahead)
    cold = place.serve(prompt_of(1))
    place.forget()
    place.teach(compute=1e-3, load=1e-3)
    done = place.serve(prompt_of(1))
    assert place.choices() == {"meet": 1}
    assert done.tokens == cold.tokens
    hits = done.finish.stats.hit_tokens["memory"]
    assert 0 < hits < PROMPT - CHUNK
    assert done.finish.stats.recomputed_tokens == PROMPT - hits
    place.engine.reset_prefix_cache()
    assert place.serve(prompt_of(1)).tokens == cold.tokens  # what was saved of it is right, too


@pytest.mark.parametrize("twin", [False, True])
def test_a_load_that_comes_early_waits_for_what_is_before_it(placed, monkeypatch, twin):
    """And the twin: who goes on behind it at once computes too little, and answers wrongly."""
    place = placed(step_tokens=16)
    cold = place.serve(prompt_of(1))
    place.forget()
    place.teach(compute=1e-3, load=1e-3)
    if twin:
        monkeypatch.setattr(Request, "met", property(lambda request: request.landed >= 0))
    seen, starts = [], []

    def computed(spans, seconds) -> None:
        """Let what is under way arrive before the next step."""
        del seconds
        seen.extend(spans)
        moves = [state.fetch for state in place.connector._states.values() if state.fetch]
        starts.extend(one.start for one in place.connector._copying if one.lease)
        moves += [copying.transfer for copying in place.connector._copying]
        until = time.monotonic() + 20
        while not all(move.poll() for move in moves) and time.monotonic() < until:
            time.sleep(0.001)

    monkeypatch.setattr(place.connector, "computed", computed)
    done = place.serve(prompt_of(1))
    assert place.choices() == {"meet": 1}
    hits = done.finish.stats.hit_tokens["memory"]
    prefilled = {token for start, stop in seen for token in range(start, stop)}
    loaded = range(starts[0], starts[0] + hits)
    missing = set(range(PROMPT)) - prefilled
    if twin:
        assert missing - set(loaded)
    else:
        assert missing == set(loaded)
        assert done.tokens == cold.tokens


def test_an_engine_that_is_faster_needs_no_load(placed):
    place = placed()
    cold = place.serve(prompt_of(1))
    place.forget()
    place.teach(compute=1e-3, load=1e-3)
    place.reads.latency = 1.0  # far slower than was thought
    done = place.serve(prompt_of(1))
    assert place.choices() == {"meet": 1}
    assert done.tokens == cold.tokens
    assert done.finish.stats.hit_tokens == {}
    place.reads.latency = 0.0


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_meet_come_go_and_give_way(placed, seed):
    """Aborted at any step, preempted for want of blocks, several at once: answers stay right."""
    rng = random.Random(seed)
    place = placed(ahead=bool(seed % 2))
    prompts = [prompt_of(100 + n) for n in range(4)]
    right = [place.serve(one).tokens for one in prompts]
    place.forget()
    place.teach(compute=1e-3, load=1e-3)
    place.reads.latency = 0.002 * seed
    names = {place.engine.submit(one, OUTPUT): n for n, one in enumerate(prompts)}
    doomed = rng.choice(list(names))
    at, answers = rng.randrange(12), {name: [] for name in names}
    step = 0
    while not place.engine.idle:
        for output in place.engine.step():
            if output.token is not None:
                answers[output.request_id].append(output.token)
        step += 1
        if step == at:
            place.engine.abort(doomed)
        place.teach(compute=1e-3, load=1e-3)
    assert place.choices().get("meet")
    for name, n in names.items():
        if name != doomed:
            assert tuple(answers[name]) == right[n]


def test_steps_that_are_none_are_refused(placed):
    cache = placed().cache
    for spans, seconds in (([(0, 4)], -1.0), ([(-1, 4)], 1.0), ([(4, 0)], 1.0)):
        with pytest.raises(MisuseError):
            cache.computed(spans, seconds)
    with pytest.raises(MisuseError):
        cache.advise("no match")
