"""The block pool against a plain account of who owns what."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.engine.blocks import BlockPool, chain_keys, root_key
from kvtier.errors import ConfigError, MisuseError


class Pool(RuleBasedStateMachine):
    """Requests of small alphabets, so that prefixes are shared often."""

    @initialize(size=st.integers(1, 12), prefix_cache=st.booleans())
    def start(self, size, prefix_cache):
        self.pool = BlockPool(size, prefix_cache=prefix_cache)
        self.caching = prefix_cache
        self.size = size
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of blocks that may be found
        self.freed: list[int] = []  # blocks that may be found and have no owner, oldest first

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def admit(self, tokens):
        keys = chain_keys(root_key(None), np.array(tokens, np.int32), 1)
        shared = self.pool.match(keys)
        for block, key in zip(shared, keys, strict=False):
            assert self.content[block] == key
        needed = len(keys) - len(shared)
        if needed > self.pool.free - self.pool.idle(shared):
            return
        self.pool.share(shared)
        self.freed = [block for block in self.freed if block not in shared]
        fresh = self.pool.allocate(needed)
        for block in fresh:
            assert not any(block in table for table in self.tables)
            if block in self.freed:
                assert block == self.freed.pop(0)  # the one freed longest ago
                del self.content[block]
        for block, key in zip(fresh, keys[len(shared) :], strict=True):
            self.pool.publish(block, key)
            if self.caching and key not in self.content.values():
                self.content[block] = key
        self.tables.append(shared + fresh)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        owned = {block for other in self.tables for block in other}
        self.freed += [b for b in reversed(table) if b not in owned and b in self.content]

    @rule()
    def reset(self):
        self.pool.reset()
        self.content.clear()
        self.freed.clear()

    @rule()
    def ask_too_much(self):
        assert self.pool.allocate(self.pool.free + 1) is None

    @invariant()
    def every_block_is_owned_or_free(self):
        owned = {block for table in self.tables for block in table}
        assert self.pool.free == self.size - len(owned)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_misuse_is_refused():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(MisuseError, match="more often"):
        pool.release([block])
    with pytest.raises(MisuseError, match="no owner"):
        pool.publish(block, b"key")
    with pytest.raises(MisuseError, match="no known prefix"):
        pool.share([block])
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(0)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(PLAIN, PLAIN)
def test_different_identities_have_different_roots(left, right):
    same = repr(left) == repr(right)  # 1 and True are equal, and not the same
    assert (root_key(left) == root_key(right)) == same


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(1, 5))
def test_a_key_is_a_hash_of_all_before_it(tokens, size):
    array, parent, expected = np.array(tokens, np.int32), b"root", []
    for start in range(0, len(tokens) - size + 1, size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + size])
        parent = hashlib.sha256(parent + block).digest()
        expected.append(parent)
    assert chain_keys(b"root", array, size) == expected
