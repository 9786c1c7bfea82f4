"""The engine over a connector: the order of calls, and the same output as without one.

The connector here keeps blocks in a dict. It is as late and as rude as the contract allows: a
block being loaded holds NaN until the load settles, and a save reads its blocks only when it
settles, so that a block used too early or reused too soon shows in the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from kvtier.connectors.base import PENDING, Loaded, Match, Update
from kvtier.engine import Engine, Model, Sampling
from kvtier.errors import MisuseError
from kvtier.testing.serving import one_model, prompt

BLOCK = 16
SAMPLING = Sampling(max_tokens=20)


class DictConnector:
    """Copies whole blocks by hand, after `delay` polls.

    pending: how often a match answers PENDING first. valid: the most tokens of a load that
    arrive; the blocks behind them are left with NaN.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        *,
        delay: int = 0,
        pending: int = 0,
        valid: int = 1 << 30,
        tiers: Mapping[str, int] | None = None,
    ) -> None:
        self.kv, self.delay, self.pending, self.valid, self.tiers = kv, delay, pending, valid, tiers
        self.store: dict[bytes, torch.Tensor] = {}
        self.calls: list[tuple] = []
        self.asked: dict[str, int] = {}
        self.offers: dict[str, list[bytes]] = {}
        self.loads: dict[str, list] = {}
        self.saves: list[list] = []
        self.ended: set[str] = set()
        self.waits = 0
        self.closed = False

    def keys(self, tokens, identity) -> list[bytes]:
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        return [repr(identity).encode() + tokens[:end].tobytes() for end in ends]

    def match(self, request_id, tokens, computed, identity=None) -> Match:
        self.calls.append(("match", request_id, len(tokens), computed))
        assert computed % BLOCK == 0
        assert request_id not in self.loads
        assert request_id not in self.ended, "matched again before its blocks were released"
        self.asked[request_id] = self.asked.get(request_id, 0) + 1
        if self.asked[request_id] <= self.pending:
            return PENDING
        keys = self.keys(tokens[:-1], identity)
        found = next((n for n, key in enumerate(keys) if key not in self.store), len(keys))
        self.offers[request_id] = keys[computed // BLOCK : found]
        return Match(len(self.offers[request_id]) * BLOCK)

    def load(self, request_id, block_ids) -> None:
        self.calls.append(("load", request_id, len(block_ids)))
        keys = self.offers.pop(request_id)
        assert len(block_ids) == len(keys) > 0
        self.kv[:, :, list(block_ids)] = torch.nan
        self.loads[request_id] = [self.delay, list(block_ids), keys]

    def poll(self) -> Update:
        loaded, released = [], []
        for request_id, load in list(self.loads.items()):
            load[0] -= 1
            if load[0] >= 0:
                continue
            del self.loads[request_id]
            _, blocks, keys = load
            tokens = min(self.valid, len(keys) * BLOCK)
            for block, key in list(zip(blocks, keys, strict=True))[: -(-tokens // BLOCK)]:
                self.kv[:, :, block] = self.store[key]
            tiers = {"dram": tokens} if self.tiers is None else self.tiers
            if request_id not in self.ended:
                loaded.append(Loaded(request_id, tokens, tiers))
        for save in list(self.saves):
            save[0] -= 1
            if save[0] < 0:
                self.saves.remove(save)
                self.store[save[2]] = self.kv[:, :, save[3]].clone()
        for request_id in sorted(self.ended):
            if not self.in_flight(request_id):
                self.ended.remove(request_id)
                released.append(request_id)
        return Update(tuple(loaded), tuple(released))

    def in_flight(self, request_id) -> bool:
        return request_id in self.loads or any(save[1] == request_id for save in self.saves)

    def wait(self, seconds) -> None:
        assert 0 < seconds <= 0.1
        self.waits += 1

    def save(self, request_id, tokens, block_ids, identity=None) -> None:
        self.calls.append(("save", request_id, len(tokens)))
        assert tokens.dtype == np.int32
        assert len(block_ids) * BLOCK >= len(tokens)
        under_way = {save[2] for save in self.saves}
        for key, block in zip(self.keys(tokens, identity), block_ids, strict=False):
            if key not in self.store and key not in under_way:
                self.saves.append([self.delay, request_id, key, block])

    def landing(self, request_id) -> None:
        """Tell of loads as a whole only."""

    def leaving(self, request_id, tokens, block_ids, identity=None) -> None:
        """Let nothing leave before the step has counted."""

    def computed(self, spans, seconds) -> None:
        assert all(0 <= start < stop for start, stop in spans)
        assert seconds >= 0

    def saving(self, request_id) -> bool:
        return self.in_flight(request_id)

    def finish(self, request_id) -> bool:
        self.calls.append(("finish", request_id))
        self.offers.pop(request_id, None)
        if self.in_flight(request_id):
            self.ended.add(request_id)
            return True
        return False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def model() -> Model:
    return one_model()


def connected(model, num_blocks=64, *, step_tokens=512, prefix_cache=False, **options):
    engine = Engine(
        model, num_blocks=num_blocks, step_tokens=step_tokens, prefix_cache=prefix_cache
    )
    connector = DictConnector(engine.kv[0], **options)
    engine.connect(connector)
    return engine, connector


def free(engine) -> int:
    return engine._pools.pools[0].free


def tokens_of(completions) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


PROMPTS = [prompt(n, n) for n in (3, 33, 64, 65, 150)] + [prompt(150, 150)[:100] + prompt(20, 5)]


@pytest.fixture(scope="module")
def expected(model) -> list[tuple[int, ...]]:
    return tokens_of(Engine(model, num_blocks=64).generate(PROMPTS, SAMPLING))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": 3},
        {"delay": 9, "pending": 2},
        {"valid": 0},
        {"valid": 32, "delay": 1},
        {"valid": 21},
        {"prefix_cache": True, "delay": 2},
        {"prefix_cache": True, "delay": 2, "num_blocks": 16, "step_tokens": 48},
        {"delay": 4, "num_blocks": 13, "step_tokens": 30, "pending": 1},
    ],
    ids=str,
)
def test_outputs_are_those_of_the_engine_alone(model, expected, options):
    engine, connector = connected(model, **options)
    for _ in range(3):
        assert tokens_of(engine.generate(PROMPTS, SAMPLING)) == expected
    assert connector.store
    while not engine.idle:
        engine.step()
    assert free(engine) == engine._pools.pools[0].num_blocks


def test_the_calls_come_in_the_contracts_order(model):
    engine, connector = connected(model, pending=1)
    engine.generate([prompt(40)], Sampling(2))
    assert connector.calls == [
        ("match", "request-0", 40, 0),
        ("match", "request-0", 40, 0),
        ("save", "request-0", 40),
        ("save", "request-0", 41),
        ("finish", "request-0"),
    ]
    engine.step()
    connector.calls.clear()
    completion = engine.generate([prompt(40)], Sampling(1))[0]
    assert connector.calls == [
        ("match", "request-1", 40, 0),
        ("match", "request-1", 40, 0),
        ("load", "request-1", 2),
        ("save", "request-1", 40),
        ("finish", "request-1"),
    ]
    assert completion.finish.stats.hit_tokens == {"dram": 32}
    assert completion.finish.stats.recomputed_tokens == 8
    assert connector.waits


def test_hits_are_counted_by_tier(model):
    engine, _ = connected(model, prefix_cache=True, tiers={"dram": 32, "lmdb": 16, "s3": 99})
    engine.generate([prompt(100)], Sampling(1))
    engine.step()
    engine.reset_prefix_cache()
    engine.generate([prompt(32) + prompt(9, 1)], Sampling(1))
    stats = engine.generate([prompt(100)], Sampling(1))[0].finish.stats
    assert stats.hit_tokens == {"hbm": 32, "dram": 32, "lmdb": 16, "s3": 16}
    assert stats.recomputed_tokens == 4


def test_loaded_blocks_enter_the_prefix_cache(model):
    engine, _ = connected(model, prefix_cache=True)
    engine.generate([prompt(100)], Sampling(1))
    engine.step()
    engine.reset_prefix_cache()
    hits = [
        engine.generate([prompt(100)], Sampling(1))[0].finish.stats.hit_tokens for _ in range(2)
    ]
    assert hits == [{"dram": 96}, {"hbm": 96}]


def test_other_requests_run_while_one_loads(model):
    engine, connector = connected(model, delay=5)
    engine.generate([prompt(64)], Sampling(8))
    for _ in range(10):
        engine.step()
    assert connector.store
    slow, fast = engine.submit(prompt(64), Sampling(4)), engine.submit(prompt(5, 1), Sampling(4))
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    ends = [output.request_id for output in outputs if output.finish]
    assert ends == [fast, slow]


def test_an_aborted_load_keeps_its_blocks_until_released(model):
    engine, connector = connected(model, delay=4)
    engine.generate([prompt(64)], Sampling(1))
    while not engine.idle or connector.saves:
        engine.step()
    request_id = engine.submit(prompt(64), Sampling(1))
    engine.step()
    assert request_id in connector.loads
    engine.abort(request_id)
    assert engine.unfinished == 0
    assert free(engine) == 60
    while not engine.idle:
        engine.step()
    assert free(engine) == 64
    engine.abort(request_id)


def test_a_pending_request_that_is_aborted_is_finished(model):
    engine, connector = connected(model, pending=99)
    request_id = engine.submit(prompt(64), Sampling(1))
    engine.submit(prompt(5), Sampling(1))
    engine.step()
    engine.abort(request_id)
    assert ("finish", request_id) in connector.calls


def test_preempted_requests_come_back_from_the_cache(model):
    prompts = [prompt(40, seed) for seed in range(5)]
    sampling = Sampling(60)
    roomy = tokens_of(Engine(model, num_blocks=64).generate(prompts, sampling))
    engine, connector = connected(model, num_blocks=14, delay=3)
    completions = engine.generate(prompts, sampling)
    assert tokens_of(completions) == roomy
    assert sum(completion.finish.stats.preemptions for completion in completions)
    assert any(call[0] == "load" for call in connector.calls)


def test_a_preempted_request_is_aborted_while_its_blocks_are_held(model):
    engine, connector = connected(model, num_blocks=14, delay=60)
    for seed in range(5):
        engine.submit(prompt(40, seed), Sampling(60))
    while not connector.ended:
        engine.step()
    preempted = min(connector.ended)
    assert engine._scheduler.find(preempted) is not None
    matches = connector.asked[preempted]
    engine.step()
    assert connector.asked[preempted] == matches, "not matched again while blocks are held"
    engine.abort(preempted)
    assert connector.calls.count(("finish", preempted)) == 1
    while not engine.idle:
        engine.step()
    assert free(engine) == 14


def test_one_connector_closed_with_the_engine(model):
    engine, connector = connected(model)
    with pytest.raises(MisuseError, match="one connector"):
        engine.connect(connector)
    engine.submit(prompt(64), Sampling(4))
    engine.step()
    engine.close()
    assert connector.closed
    assert connector.calls[-1][0] == "finish"


def test_twin_blocks_freed_before_their_release_spoil_outputs(model, expected, monkeypatch):
    """What the hold is for: the connector's slow saves would read another request's KV."""
    options = {"delay": 40, "num_blocks": 16, "step_tokens": 48}
    engine, connector = connected(model, **options)
    finish = connector.finish
    monkeypatch.setattr(connector, "finish", lambda request_id: finish(request_id) and False)
    monkeypatch.setattr(connector, "poll", lambda poll=connector.poll: Update(poll().loaded))
    connector.ended = _Forgetful()
    found = [tokens_of(engine.generate(PROMPTS, SAMPLING)) for _ in range(3)]
    assert found != [expected] * 3


class _Forgetful(set):
    def add(self, _item) -> None:
        pass
