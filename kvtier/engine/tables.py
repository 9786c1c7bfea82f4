"""Where a request's KV lies: a table for each component of the model, over a pool for each.

Full attention and MLA need every block of a prefix. A sliding window needs those that its last
`window` tokens lie in; older ones are let go and stand as -1 in the table. A recurrent layer
needs one state: a request has a running one, which every step moves on, and snapshots of it at
multiples of the chunk, one entry of the table for each chunk, -1 where none was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.connectors.base import Places
from kvtier.engine.blocks import BlockPool
from kvtier.engine.spans import StateCopy
from kvtier.identity.geometry import Component, Needs

ABSENT: Final = -1
"""A place in a table whose block or state the engine has not got."""


@dataclass(slots=True)
class Table:
    """One request's places. For each component: block ids in token order, or state snapshots.

    running: for each component, the slot of the request's own state; ABSENT if it has none.
    trimmed: for each component, how many of the first entries were let go.
    """

    places: list[list[int]]
    running: list[int]
    trimmed: list[int]

    def spans(self) -> tuple[tuple[int, ...], ...]:
        """Return what a forward pass needs: block tables, and for a state its running slot."""
        return tuple(
            tuple(places) if slot == ABSENT else (slot,)
            for places, slot in zip(self.places, self.running, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that the pools still know: how many blocks, and the places of each component."""

    blocks: int
    places: tuple[list[int], ...]


class Pools:
    """A BlockPool for each component, used together: all give, or none does.

    num_blocks: of each pool of blocks. num_states: slots of each pool of states.
    chunk_tokens: at multiples of it states are kept, and windows let go of whole chunks only, so
    that a cache below can save chunks whole.
    """

    def __init__(
        self,
        components: Sequence[Component],
        *,
        num_blocks: int,
        num_states: int,
        block_tokens: int,
        chunk_tokens: int,
        prefix_cache: bool,
    ) -> None:
        self.components = tuple(components)
        self.block_tokens = block_tokens
        self.chunk_tokens = chunk_tokens
        self.recurrent = any(one.needs is Needs.LAST for one in components)
        self.pools = [
            BlockPool(
                num_states if one.needs is Needs.LAST else num_blocks, prefix_cache=prefix_cache
            )
            for one in components
        ]

    @property
    def whole(self) -> bool:
        """Whether any prefix of a prefix is usable too: true of full attention alone."""
        return all(one.needs is Needs.ALL for one in self.components)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that the first `tokens` tokens occupy."""
        return -(-tokens // self.block_tokens)

    def find(self, keys: Sequence[bytes]) -> Hit:
        """Return the longest known prefix of `keys` at which each component has what it needs."""
        known = {
            index: self.pools[index].match(keys)
            for index, one in enumerate(self.components)
            if one.needs is Needs.ALL
        }
        limit = min(map(len, known.values()), default=len(keys))
        for blocks in range(limit, 0, -1):
            places = [
                known[index][:blocks] if index in known else self._at(index, keys[:blocks])
                for index in range(len(self.pools))
            ]
            found = tuple(each for each in places if each is not None)
            if len(found) == len(places):
                return Hit(blocks, found)
        return Hit(0, tuple([] for _ in self.pools))

    def room_for(self, hit: Hit, tokens: int) -> bool:
        """Say whether ``take`` would succeed now."""
        fresh = self.blocks_for(tokens) - hit.blocks
        return all(
            (1 if one.needs is Needs.LAST else fresh) <= pool.free - pool.idle(places)
            for pool, one, places in zip(self.pools, self.components, hit.places, strict=True)
        )

    def take(self, hit: Hit, tokens: int) -> Table | None:
        """Own a hit's places, and fresh ones for the rest of `tokens` tokens; None: no room."""
        if not self.room_for(hit, tokens):
            return None
        table = Table([], [], [0] * len(self.pools))
        for pool, one, places in zip(self.pools, self.components, hit.places, strict=True):
            pool.share(_present(places))
            recurrent = one.needs is Needs.LAST
            fresh = pool.allocate(1 if recurrent else self.blocks_for(tokens) - hit.blocks) or []
            table.places.append(places if recurrent else places + fresh)
            table.running.append(fresh[0] if recurrent else ABSENT)
        return table

    def grow(self, table: Table, tokens: int) -> bool:
        """Add blocks until `tokens` tokens fit; False, and nothing changed, if there is no room."""
        lists = self._blocks_of(table)
        missing = [max(self.blocks_for(tokens) - len(places), 0) for _, places in lists]
        if any(count > pool.free for count, (pool, _) in zip(missing, lists, strict=True)):
            return False
        for count, (pool, places) in zip(missing, lists, strict=True):
            places.extend(pool.allocate(count) or [])
        return True

    def publish(self, table: Table, first: int, keys: Sequence[bytes]) -> None:
        """Make full blocks findable: those from `first` on, under their keys."""
        for pool, places in self._blocks_of(table):
            for block, key in zip(places[first:], keys, strict=False):
                if block != ABSENT:
                    pool.publish(block, key)

    def trim(self, table: Table, computed: int) -> None:
        """Let go of the chunks that no window will reach again, `computed` tokens being done."""
        for index, one in enumerate(self.components):
            if one.needs is not Needs.TRAILING:
                continue
            keep, done = self._reached(one, computed), table.trimmed[index]
            places = table.places[index]
            self.pools[index].release(_present(places[done:keep]))
            places[done:keep] = [ABSENT] * len(places[done:keep])
            table.trimmed[index] = max(done, keep)

    def snapshot(self, table: Table, computed: int, key: bytes) -> list[StateCopy]:
        """Take slots for the states after `computed` tokens, if those are whole chunks.

        key: of the last of their blocks. Returns (component, from, to) for each state that is to
        be copied, before anything else moves it on. Where no slot is free, none is kept.
        """
        copies = []
        chunks, odd = divmod(computed, self.chunk_tokens)
        for index, slot in enumerate(table.running):
            pool, places = self.pools[index], table.places[index]
            if slot == ABSENT or chunks <= len(places):
                continue
            places += [ABSENT] * (chunks - len(places))
            taken = None if odd else pool.allocate(1)
            if taken is not None:
                places[-1] = taken[0]
                pool.publish(taken[0], key)
                copies.append((index, slot, taken[0]))
        return copies

    def restores(self, table: Table) -> list[StateCopy]:
        """Return (component, from, to) for the states that a hit begins with."""
        return [
            (index, table.places[index][-1], slot)
            for index, slot in enumerate(table.running)
            if slot != ABSENT and table.places[index]
        ]

    def load_places(self, table: Table, first: int, end: int) -> tuple[tuple[int, ...], ...]:
        """Return what a load of tokens [first, end) fills, as the Connector wants it."""
        blocks = slice(first // self.block_tokens, end // self.block_tokens)
        found: list[tuple[int, ...]] = []
        for one, places, slot in zip(self.components, table.places, table.running, strict=True):
            if slot != ABSENT:
                found.append((slot,))
                continue
            begin = self._reached(one, end) if one.window else 0
            gone = max(min(begin, blocks.stop) - blocks.start, 0)
            found.append((*[ABSENT] * gone, *places[blocks][gone:]))
        return tuple(found)

    def _reached(self, one: Component, computed: int) -> int:
        """Return the first block of the chunks that a window reaches after so many tokens."""
        chunks = max(computed - one.window, 0) // self.chunk_tokens
        return chunks * self.chunk_tokens // self.block_tokens

    def skip(self, table: Table, tokens: int) -> None:
        """Take note that states up to `tokens` tokens were never here: they were loaded past."""
        for index, slot in enumerate(table.running):
            if slot != ABSENT:
                places = table.places[index]
                places += [ABSENT] * (tokens // self.chunk_tokens - len(places))

    def release(self, table: Table) -> None:
        """Own a request's places no longer."""
        for index, pool in enumerate(self.pools):
            pool.release(_present(table.places[index]))
            if table.running[index] != ABSENT:
                pool.release([table.running[index]])

    def reset(self) -> None:
        """Forget every prefix. Places in use stay with their owners."""
        for pool in self.pools:
            pool.reset()

    def _blocks_of(self, table: Table) -> list[tuple[BlockPool, list[int]]]:
        """Return the pools of blocks, and a request's tables over them."""
        return [
            (pool, places)
            for pool, one, places in zip(self.pools, self.components, table.places, strict=True)
            if one.needs is not Needs.LAST
        ]

    def _at(self, index: int, keys: Sequence[bytes]) -> list[int] | None:
        """Return what a window or a state has of a prefix; None: not all that it needs."""
        pool, one = self.pools[index], self.components[index]
        if one.needs is Needs.LAST:
            states, odd = divmod(len(keys) * self.block_tokens, self.chunk_tokens)
            state = pool.find(keys[-1])
            return None if odd or state is None else [ABSENT] * (states - 1) + [state]
        first = max(len(keys) * self.block_tokens - one.window, 0) // self.block_tokens
        found = [pool.find(key) for key in keys[first:]]
        if any(block is None for block in found):
            return None
        return [ABSENT] * first + [block for block in found if block is not None]


def for_connector(places: Sequence[Sequence[int]]) -> Places:
    """Return tables as a Connector wants them: of one component, just its own."""
    return places[0] if len(places) == 1 else places


def _present(places: Sequence[int]) -> list[int]:
    return [place for place in places if place != ABSENT]
