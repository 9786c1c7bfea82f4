"""The offline optimum of one tier, and what no tier of any size can exceed.

Belady's rule (IBM Systems Journal 1966): keep what is used again soonest. A newcomer that is used
again later than all that is kept is not taken in. Blocks are chained: whoever uses a block uses
what it hangs under in the same request, so a parent is used again no later than its child. With
ties broken deepest first, what is kept has no headless tails, and the most block hits are the
most leading-run hits as well: no policy can have more. What an answer makes comes in for nothing,
so that nothing is worth keeping until then.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Final

from kvtier.planning.simulate import Hits, leading
from kvtier.planning.trace import Trace

_NEVER: Final = 1 << 62


def optimum(trace: Trace, capacity: int, *, warmup: float = 0.0) -> Hits:
    """Return the most hits that one tier of `capacity` blocks can have, knowing the future."""
    hits, inside = Hits(), bytearray(trace.unique)
    following = _next_uses(trace)
    due = array("q", [_NEVER]) * trace.unique
    heap: list[tuple[int, int]] = []  # (-next use x depth, block): the latest, deepest first
    count, at, first = 0, 0, int(len(trace) * warmup)
    for number, (blocks, asked, tokens) in enumerate(trace.served()):
        if number >= first:
            hits.count(asked, leading(blocks[:asked], inside), tokens, trace.block_tokens)
        end = at + len(blocks)
        for depth in range(len(blocks) - 1, -1, -1):
            block, use = blocks[depth], following[at + depth]
            if use == _NEVER:
                count -= inside[block]
                inside[block] = 0
                due[block] = _NEVER
                continue
            key = use << 20 | depth
            due[block] = key
            count += not inside[block]
            inside[block] = 1
            heapq.heappush(heap, (-key, block))
            while count > capacity:
                latest, last = heapq.heappop(heap)
                if inside[last] and due[last] == -latest:
                    inside[last] = 0
                    count -= 1
        at = end
    return hits


def ceiling(trace: Trace, *, warmup: float = 0.0) -> Hits:
    """Return the hits of a tier without bounds: what no capacity and no policy can exceed."""
    hits, inside = Hits(), bytearray(trace.unique)
    first = int(len(trace) * warmup)
    for number, (blocks, asked, tokens) in enumerate(trace.served()):
        if number >= first:
            hits.count(asked, leading(blocks[:asked], inside), tokens, trace.block_tokens)
        for block in blocks:
            inside[block] = 1
    return hits


def _next_uses(trace: Trace) -> array[int]:
    """Return, for each use of a block in order, the request that asks for it next.

    None does where an answer makes it once more before.
    """
    following = array("q", bytes(8 * trace.entries))
    last = array("q", [_NEVER]) * trace.unique
    at = trace.entries
    for number in range(len(trace) - 1, -1, -1):
        blocks, asked = trace.computed(number), len(trace.blocks(number))
        at -= len(blocks)
        for depth, block in enumerate(blocks):
            following[at + depth] = last[block]
        for block in blocks[:asked]:
            last[block] = number
        for block in blocks[asked:]:
            last[block] = _NEVER
    return following
