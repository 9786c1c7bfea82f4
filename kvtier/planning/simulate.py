"""Simulate: replay a trace through one tier of equal blocks, under the policies of the live cache.

A request hits the leading run of its blocks that are there. Then all its blocks count as used,
deepest first, so that a tail is older than its head. A block leaves only once nothing that hangs
under it is left (no headless tails), except where `servable` is off, as most simulators have it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.planning.trace import Trace
from kvtier.policies.base import Policy

__all__ = ["Hits", "Tier", "leading", "simulate"]

_NONE = -1


@dataclass(slots=True)
class Hits:
    """What was asked for and what was there, after the warm-up.

    blocks and tokens: asked for; hit_blocks and hit_tokens: of those, in the leading runs that
    were there. requests: counted.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def count(self, blocks: int, hit_blocks: int, tokens: int, block_tokens: int) -> None:
        """Count one request."""
        self.requests += 1
        self.blocks += blocks
        self.hit_blocks += hit_blocks
        self.tokens += tokens
        self.hit_tokens += min(hit_blocks * block_tokens, tokens)

    @property
    def rate_blocks(self) -> float:
        """Hit blocks of all blocks asked for, in percent."""
        return 100 * self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def rate_tokens(self) -> float:
        """Hit tokens of all prompt tokens, in percent."""
        return 100 * self.hit_tokens / self.tokens if self.tokens else 0.0


class Tier:
    """One tier of `capacity` blocks.

    inside: of each block of the trace, whether it is there. entered: blocks that came in.
    """

    def __init__(self, trace: Trace, policy: Policy, capacity: int, *, servable: bool) -> None:
        self.inside = bytearray(trace.unique)
        self._parent = trace.parent
        self._policy = policy
        self._capacity = capacity
        self._servable = servable
        self._kids = array("i", bytes(4 * trace.unique))
        self._aside: dict[int, None] = {}
        self._ready: dict[int, None] = {}
        self._count = 0
        self.entered = 0

    def use(self, blocks: Sequence[int], hits: int) -> None:
        """Count a request's blocks as used, deepest first; those that are absent come in.

        hits: blocks, from the first, that are there.
        """
        inside = self.inside
        for block in reversed(blocks[hits:]):
            if inside[block]:
                self._touch((block,))
            else:
                self._enter(block)
        head = blocks[:hits]
        if all(map(inside.__getitem__, head)):
            self._touch(head)
        else:  # room for the tail was made of it
            for block in reversed(head):
                if inside[block]:
                    self._touch((block,))
                else:
                    self._enter(block)

    def _touch(self, blocks: Sequence[int]) -> None:
        if self._aside or self._ready:
            for block in blocks:
                if block in self._aside or block in self._ready:
                    self._aside.pop(block, None)
                    self._ready.pop(block, None)
                    self._policy.insert(block, block)
        self._policy.touch(blocks[::-1])

    def _enter(self, block: int) -> None:
        if self._count == self._capacity and not self._evict():
            return
        self.inside[block] = 1
        self._count += 1
        self.entered += 1
        parent = self._parent[block]
        if parent != _NONE:
            self._kids[parent] += 1
        self._policy.insert(block, block)

    def _evict(self) -> bool:
        block = self._victim()
        if block == _NONE:
            return False
        self.inside[block] = 0
        self._count -= 1
        parent = self._parent[block]
        if parent != _NONE:
            self._kids[parent] -= 1
            if parent in self._aside and not self._kids[parent]:
                del self._aside[parent]
                self._ready[parent] = None
        return True

    def _victim(self) -> int:
        while self._ready:
            block = next(iter(self._ready))
            del self._ready[block]
            if not self._kids[block]:
                return block
            self._aside[block] = None
        for block in self._policy.victims():
            if not self._servable or not self._kids[block]:
                self._policy.remove(block)
                return block
            self._policy.remove(block, evicted=False)
            self._aside[block] = None
        return _NONE


def simulate(
    trace: Trace,
    policy: Callable[[], Policy],
    capacity: int,
    *,
    warmup: float = 0.0,
    servable: bool = True,
    tell: Callable[[int], None] | None = None,
) -> Hits:
    """Replay a trace and return its hits.

    capacity: blocks. warmup: fraction of the requests, from the first, that are not counted.
    tell: called now and then with the requests that are behind.
    """
    tier = Tier(trace, policy(), min(capacity, trace.unique), servable=servable)
    hits, inside = Hits(), tier.inside
    first = int(len(trace) * warmup)
    for number, (blocks, tokens) in enumerate(trace.requests()):
        run = leading(blocks, inside)
        if number >= first:
            hits.count(len(blocks), run, tokens, trace.block_tokens)
        tier.use(blocks, run)
        if tell is not None and not number % 256:
            tell(number)
    return hits


def leading(blocks: Iterable[int], inside: Sequence[int]) -> int:
    """Return how many blocks, from the first, are there."""
    run = 0
    for block in blocks:
        if not inside[block]:
            break
        run += 1
    return run
