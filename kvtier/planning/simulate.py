"""Simulate: replay a trace through one tier of equal blocks, under the policies of the live cache.

A request hits the leading run of its blocks that are there; these count as used, deepest first, so
that a tail is older than its head. Then room is made for the others, all of it before the first of
them comes in, and they come in heads first, as the live cache has it, those of the answer, where
they are known, with those of the prompt. A block leaves only once
nothing that hangs under it is left (no headless tails). Where `servable` is off any block may
leave, and blocks are used and come in one by one, deepest first, as most simulators have it.

Two overlays lie above any policy, as in the live cache. Of priorities, all that may leave of a
lower one leaves before any of a higher one. And what was not used for a time leaves anyway.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.planning.trace import Trace
from kvtier.policies.ages import Ages
from kvtier.policies.base import Policy, RenewablePolicy

_NONE: Final = -1


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


@dataclass(frozen=True, slots=True)
class Overlay:
    """What lies above a policy. levels: of each block of the trace its priority, or nothing.

    ttl: time after which what was not used leaves, in the trace's own unit; None for never.
    """

    levels: Sequence[int] = ()
    ttl: float | None = None


_PLAIN: Final = Overlay()


class _Queue:
    """The blocks of one priority. ready: their turn came before, and they may go."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.renew = policy.renew if isinstance(policy, RenewablePolicy) else policy.touch
        self.ready: dict[int, None] = {}


class Tier:
    """One tier of `capacity` blocks. policy: makes an empty one.

    inside: of each block of the trace, whether it is there. entered: blocks that came in.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Callable[[], Policy],
        capacity: int,
        *,
        servable: bool,
        overlay: Overlay = _PLAIN,
    ) -> None:
        self.inside = bytearray(trace.unique)
        self._parent = trace.parent
        self._levels = overlay.levels
        self._queues = {level: _Queue(policy()) for level in sorted({*overlay.levels}) or [0]}
        self._only = next(iter(self._queues.values()))  # where there is one
        self._now = 0.0
        self._depths = trace.depths() if overlay.ttl is not None else ()
        self._ages = None if overlay.ttl is None else Ages(overlay.ttl, lambda: self._now)
        self._capacity = capacity
        self._servable = servable
        self._kids = array("i", bytes(4 * trace.unique))
        self._aside: dict[int, None] = {}
        self._count = 0
        self._held = _NONE
        self.entered = 0

    def pass_time(self, now: float) -> None:
        """Let what was not used for the tier's time leave, if it has one."""
        self._now = now
        if self._ages is None:
            return
        due = self._ages.overdue(self._count)
        for block in sorted(due, key=self._depths.__getitem__, reverse=True):
            if not self._servable or not self._kids[block]:
                self._take_out(block)
                self._drop(block)

    def use(self, blocks: Sequence[int], hits: int) -> None:
        """Count a request's blocks as used; those that are absent come in.

        hits: blocks, from the first, that are there.
        """
        if not self._servable:
            for block in reversed(blocks):
                if self.inside[block]:
                    self._queue(block).policy.touch((block,))
                elif self._count < self._capacity or self._evict():
                    self.enter((block,))
            return
        self.touch(blocks[:hits])
        room = self.make_room(len(blocks) - hits, blocks[hits - 1] if hits else _NONE)
        if room:
            self.touch(blocks[:hits], again=True)
            self.enter(blocks[hits : hits + room])

    def touch(self, blocks: Sequence[int], *, again: bool = False) -> None:
        """Count those blocks of a prompt as used that are there. again: it is no new use."""
        if self._ages is not None:
            self._ages.used(blocks)
        rows = blocks[::-1]
        if self._aside or any(queue.ready for queue in self._queues.values()):
            for block in rows:
                ready = self._queue(block).ready
                if block in self._aside or block in ready:
                    self._aside.pop(block, None)
                    ready.pop(block, None)
                    self._insert(block)
        for queue in self._queues.values():
            (queue.renew if again else queue.policy.touch)(rows)

    def make_room(self, blocks: int, held: int) -> int:
        """Evict until so many blocks have room, or nothing may leave; return how many have.

        held: a block that must stay, since those continue it.
        """
        self._held = held
        while self._capacity - self._count < blocks and self._evict():
            pass
        self._held = _NONE
        if held in self._aside:
            del self._aside[held]
            self._queue(held).ready[held] = None
        return min(blocks, self._capacity - self._count)

    def enter(self, blocks: Sequence[int]) -> None:
        """Let blocks come in, in this order, for which there is room."""
        self._count += len(blocks)
        self.entered += len(blocks)
        inside, kids, parents, insert = self.inside, self._kids, self._parent, self._insert
        for block in blocks:
            inside[block] = 1
            parent = parents[block]
            if parent != _NONE:
                kids[parent] += 1
            insert(block)
        if self._ages is not None:
            for block in blocks:
                self._ages.enter(block)

    def _insert(self, block: int) -> None:
        # Elsewhere a block that comes in is the last one used, whatever it continues.
        parent = self._parent[block] if self._servable else _NONE
        self._queue(block).policy.insert(block, block, parent)

    def _queue(self, block: int) -> _Queue:
        return self._queues[self._levels[block]] if self._levels else self._only

    def _evict(self) -> bool:
        block = self._victim()
        if block == _NONE:
            return False
        self._drop(block)
        return True

    def _take_out(self, block: int) -> None:
        """Take a block out of wherever it is: it is in one place, and a stranger to the others."""
        queue = self._queue(block)
        self._aside.pop(block, None)
        queue.ready.pop(block, None)
        queue.policy.remove(block)

    def _drop(self, block: int) -> None:
        """Let a block go, whose turn it is; its parent may be next."""
        if self._ages is not None:
            self._ages.leave(block)
        self.inside[block] = 0
        self._count -= 1
        parent = self._parent[block]
        if parent != _NONE:
            self._kids[parent] -= 1
            if parent in self._aside and not self._kids[parent]:
                del self._aside[parent]
                self._queue(parent).ready[parent] = None

    def _victim(self) -> int:
        for queue in self._queues.values():
            block = self._victim_of(queue)
            if block != _NONE:
                return block
        return _NONE

    def _victim_of(self, queue: _Queue) -> int:
        while queue.ready:
            block = next(iter(queue.ready))
            del queue.ready[block]
            if not self._kids[block] and block != self._held:
                return block
            self._aside[block] = None
        for block in queue.policy.victims():
            if not self._servable or not (self._kids[block] or block == self._held):
                queue.policy.remove(block)
                return block
            queue.policy.remove(block, evicted=False)
            self._aside[block] = None
        return _NONE


def simulate(
    trace: Trace,
    policy: Callable[[], Policy],
    capacity: int,
    *,
    warmup: float = 0.0,
    servable: bool = True,
    overlay: Overlay = _PLAIN,
    tell: Callable[[int], None] | None = None,
) -> Hits:
    """Replay a trace and return its hits.

    capacity: blocks. warmup: fraction of the requests, from the first, that are not counted.
    tell: called now and then with the requests that are behind.
    """
    most = min(capacity, trace.unique)
    tier = Tier(trace, policy, most, servable=servable, overlay=overlay)
    hits, inside = Hits(), tier.inside
    first = int(len(trace) * warmup)
    for number, (blocks, asked, tokens) in enumerate(trace.served()):
        tier.pass_time(trace.time(number))
        run = leading(blocks, inside)
        if number >= first:
            hits.count(asked, min(run, asked), tokens, trace.block_tokens)
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
