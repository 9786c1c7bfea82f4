"""The tables of hybrid models against a plain account: who owns a place, and what lies in it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.engine.blocks import chain_keys, root_key
from kvtier.engine.tables import ABSENT, Pools
from kvtier.identity.geometry import Component, Needs

CHUNK = 2  # blocks of one token
WINDOW = 3
KINDS = {
    "full": Component(1, 1, 1),
    "window": Component(1, 1, 1, needs=Needs.TRAILING, window=WINDOW),
    "state": Component(1, 1, 1, needs=Needs.LAST),
}


class Requests(RuleBasedStateMachine):
    """Requests of small alphabets, computed token by token; blocks of one token."""

    @initialize(
        kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
        size=st.integers(1, 12),
        states=st.integers(1, 5),
        prefix_cache=st.booleans(),
    )
    def start(self, kinds, size, states, prefix_cache):
        self.kinds = kinds
        self.pools = Pools(
            [KINDS[kind] for kind in kinds],
            num_blocks=size,
            num_states=states,
            block_tokens=1,
            chunk_tokens=CHUNK,
            prefix_cache=prefix_cache,
        )
        self.requests = []  # [table, keys, computed]
        self.content = [{} for _ in kinds]  # of each pool: what was written where

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens):
        keys = chain_keys(root_key(None), np.array(tokens, np.int32), 1)
        hit = self.pools.find(keys[:-1])
        assert hit.blocks < len(keys)
        assert "state" not in self.kinds or hit.blocks % CHUNK == 0
        for index, kind in enumerate(self.kinds):
            self.check(index, kind, hit.places[index], keys[: hit.blocks])
        room = self.pools.room_for(hit, len(keys))
        table = self.pools.take(hit, len(keys))
        assert (table is not None) == room
        if table is not None:
            for component, source, target in self.pools.restores(table):
                self.content[component][target] = self.content[component][source]
            self.requests.append([table, keys, hit.blocks])

    def check(self, index, kind, places, keys):
        """Fail unless a component has all that it needs of a prefix, and the right content."""
        content = self.content[index]
        if kind == "state":
            assert not keys or content[places[-1]] == keys[-1]
            return
        first = max(len(keys) - WINDOW, 0) if kind == "window" else 0
        assert [content[place] for place in places[first:]] == keys[first:]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data):
        request = data.draw(st.sampled_from(self.requests))
        table, keys, computed = request
        if computed == len(keys):
            return
        for index, kind in enumerate(self.kinds):
            state = kind == "state"
            before = [table.running[index]] if state else table.places[index][:computed]
            self.check(index, kind, before, keys[:computed])
            place = table.running[index] if state else table.places[index][computed]
            self.content[index][place] = keys[computed]
        self.pools.publish(table, computed, keys[computed : computed + 1])
        request[2] = computed = computed + 1
        if computed % CHUNK == 0:
            for component, source, target in self.pools.snapshot(
                table, computed, keys[computed - 1]
            ):
                self.content[component][target] = self.content[component][source]
        self.pools.trim(table, computed)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data):
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pools.release(request[0])

    @rule()
    def reset(self):
        self.pools.reset()

    @invariant()
    def what_nobody_owns_is_free(self):
        for index, pool in enumerate(self.pools.pools):
            owned = Counter()
            for table, _, _ in self.requests:
                owned.update(place for place in table.places[index] if place != ABSENT)
                owned.update([table.running[index]] if table.running[index] != ABSENT else [])
            assert pool.free == pool.num_blocks - len(owned)
            assert all(pool._owners[place] == count for place, count in owned.items())


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
