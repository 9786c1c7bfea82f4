"""The simulator decides as the live cache does: the same blocks leave at the same requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

import kvtier
from kvtier.config import Config, TierConfig
from kvtier.planning import simulate
from kvtier.planning.replay import make_policy
from kvtier.planning.simulate import Overlay
from kvtier.planning.stack import Level, Tiers
from kvtier.planning.trace import Trace
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.inside import inside
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, GEOMETRY, NAMESPACE
from kvtier.transfer import CopyResult, CopyStatus

POLICIES = ("lru", "arc", "s3fifo", "lfu")
SIZES = [(100, None), (60, 200), (40, 90)]  # blocks of DRAM, and of the tier below


def conversations(seed: int, requests: int) -> Trace:
    """Return some in turn, which begin alike: each asks what was said before, and a little more."""
    rng = random.Random(seed)
    trace, running, fresh = Trace("drawn", CHUNK), [], 0
    for number in range(requests):
        if not running or rng.random() < 0.15:
            running.append([rng.randrange(4)])
        blocks = running[-1 - min(int(rng.expovariate(0.2)), len(running) - 1)]
        for _ in range(rng.randrange(1, 5)):
            fresh += 1
            blocks.append(1000 + fresh)
        if len(blocks) > 30:
            running.remove(blocks)
        trace.add(float(number), len(blocks) * CHUNK + 1, 1, [*blocks])
    return trace


class Live:
    """A cache of as many chunks, and where the blocks of a trace are in it."""

    def __init__(self, policy: str, dram: int, below: int | None) -> None:
        tiers = ()
        if below is not None:
            nbytes = below * MemoryStore("").footprint(CHUNK_BYTES)
            store = MemoryStore("", nbytes)
            self.tier = TierConfig("memory", "", nbytes, "through", store=store, policy=policy)
            tiers = (self.tier,)
        config = Config(dram * CHUNK_BYTES, tiers, policy=policy)
        self.cache = kvtier.open(config, namespace=NAMESPACE)
        self.names: dict[int, bytes] = {}

    def serve(self, blocks, tokens: int) -> int:
        """Match, fetch and save a prompt; return the blocks that were there."""
        prompt = np.append(np.repeat(np.asarray(blocks, np.int32), CHUNK), np.int32(0))[:tokens]
        prefix = self.cache.prefix(prompt)
        self.names |= {block: parts[0] for block, parts in zip(blocks, prefix.names, strict=False)}
        match = self.cache.match(prefix)
        if match.tokens:
            lease = self.cache.fetch(match, timeout=20, deadline=20).result(20)
            lease.release()
        table = list(range(len(blocks) * CHUNK // GEOMETRY.block_tokens[0]))
        plan = self.cache.plan_save(prefix, table)
        if plan is not None:
            self.cache.settle(plan, CopyResult(CopyStatus.OK, plan.tokens))
        assert self.cache.flush(timeout=20)
        return match.chunks

    def there(self, tier: int) -> set[int]:
        index = inside(self.cache).catalog._index
        rows = {block: index.find(name) for block, name in self.names.items()}
        return {b for b, row in rows.items() if row >= 0 and index.present[row] & 1 << tier}


def differing(policy: str, dram: int, below: int | None, requests: int) -> int:
    """Return after how many requests some tier, live and simulated, has other blocks."""
    trace = conversations(5, requests)
    sizes = [dram] if below is None else [dram, below]
    levels = [Level(f"tier{n}", size * CHUNK_BYTES, 1e9) for n, size in enumerate(sizes)]
    tiers = Tiers(trace, levels, make_policy(policy, trace), CHUNK_BYTES, Overlay())
    live, count = Live(policy, dram, below), 0
    try:
        for blocks, tokens in trace.requests():
            found = len(tiers.find(blocks, 0.0))
            same = live.serve(blocks, tokens) == found
            tiers.load(blocks, found, found)
            tiers.save(blocks)
            for number, tier in enumerate(tiers.tiers):
                simulated = {block for block in range(trace.unique) if tier.inside[block]}
                same = same and live.there(number) == simulated
            count += not same
    finally:
        live.cache.close()
    return count


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_blocks_leave_live_and_simulated(policy, sizes):
    assert differing(policy, *sizes, requests=200) == 0


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_in_another_order_others_leave(policy, monkeypatch):
    """The twin: blocks that come in tails first, as other simulators have it."""
    enter = simulate.Tier.enter
    monkeypatch.setattr(simulate.Tier, "enter", lambda tier, blocks: enter(tier, blocks[::-1]))
    assert differing(policy, 100, None, requests=120)
