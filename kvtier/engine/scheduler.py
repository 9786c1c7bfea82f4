"""Who runs in a step: admission, cache hits, loads, growth and preemption.

Requests run in the order of their arrival. A step's token budget goes to running requests first,
then to new ones. All blocks of a prompt are taken when it is admitted; an output takes more as
it grows. When none is left, the youngest running request gives up its blocks and is computed
again later, most of it from the caches.
"""

from __future__ import annotations

from collections import deque

from kvtier.connectors.base import Connector, Loaded, Update
from kvtier.engine.attention import Span
from kvtier.engine.blocks import BlockPool
from kvtier.engine.request import Phase, Request

__all__ = ["Scheduler"]


class Scheduler:
    """All unfinished requests, and the blocks of those that end before their copies do.

    step_tokens: the most tokens that one step computes. max_running: the most requests that
    hold blocks at once, those that wait for a load included.
    """

    def __init__(self, pool: BlockPool, *, step_tokens: int, max_running: int) -> None:
        self.connector: Connector | None = None
        self._pool = pool
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._held: dict[str, list[int]] = {}

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def held(self) -> int:
        """Requests that gave up their blocks, which are still being read or written."""
        return len(self._held)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request of that name."""
        return self._requests.get(request_id)

    def request_ids(self) -> list[str]:
        """Return the ids of all unfinished requests, oldest first."""
        return list(self._requests)

    def settle(self, update: Update) -> None:
        """Take note of what the connector reports."""
        for request_id in update.released:
            self._pool.release(self._held.pop(request_id, []))
        for loaded in update.loaded:
            request = self._requests.get(loaded.request_id)
            # An aborted or preempted request no longer waits for its load.
            if request is not None and request.phase is Phase.LOADING:
                self._loaded(request, loaded)

    def schedule(self) -> list[tuple[Request, Span]]:
        """Choose the step's work, at most `step_tokens` tokens; may be empty."""
        work: list[tuple[Request, Span]] = []
        budget = self._step_tokens
        for request in list(self._active):
            if request.phase is not Phase.RUNNING or not budget:
                continue
            if self._grow(request):
                budget -= self._plan(request, budget, work)
        for request in list(self._waiting):
            if not budget or len(self._active) >= self._max_running:
                break
            if not self._admit(request):
                break
            if request.phase is Phase.RUNNING:
                budget -= self._plan(request, budget, work)
        return work

    def computed(self, request: Request, tokens: int) -> None:
        """Take note that the step computed that many more tokens of a request."""
        request.computed += tokens
        self._publish(request)

    def end(self, request: Request) -> None:
        """Forget a request. Its blocks are free now or, with copies in flight, later."""
        del self._requests[request.request_id]
        (self._waiting if request.phase is Phase.WAITING else self._active).remove(request)
        self._give_up(request)
        request.phase = Phase.ENDED

    def _plan(self, request: Request, budget: int, work: list[tuple[Request, Span]]) -> int:
        """Add a running request's next tokens to the step; return how many."""
        end = min(request.count, request.computed + budget)
        tokens = request.tokens[request.computed : end]
        logits = 1 if end == request.count else 0
        span = Span(tokens.tolist(), request.computed, tuple(request.blocks), logits)
        work.append((request, span))
        return len(tokens)

    def _grow(self, request: Request) -> bool:
        """Make room for all tokens so far; False if the request itself had to give way."""
        missing = request.blocks_for(request.count) - len(request.blocks)
        while missing > 0:
            fresh = self._pool.allocate(missing)
            if fresh is not None:
                request.blocks += fresh
                return True
            # At worst the request itself: what the step has planned stands before it, and stays.
            victim = next(r for r in reversed(self._active) if r.phase is Phase.RUNNING)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, request: Request) -> bool:
        """Try to give a waiting request its blocks. False: nobody behind it may overtake.

        A request that waits for its cache, PENDING or with earlier copies still in flight, may be
        overtaken; one that waits for blocks may not, or a long prompt would starve.
        """
        if request.request_id in self._held:
            return True
        usable = (request.count - 1) // request.block_tokens
        shared = self._pool.match(request.keys[:usable])
        needed = request.blocks_for(request.count) - len(shared)
        if needed > self._pool.free - self._pool.idle(shared):
            return False
        computed = len(shared) * request.block_tokens
        offered = self._match(request, computed)
        if offered is None:
            return True
        self._pool.share(shared)
        fresh = self._pool.allocate(needed) or []
        request.blocks = shared + fresh
        request.computed, request.published = computed, len(shared)
        if not request.generated:
            request.hits = {"hbm": computed}
        request.phase = Phase.RUNNING
        self._waiting.remove(request)
        self._active.append(request)
        if offered and self.connector is not None:
            request.phase, request.loading = Phase.LOADING, offered
            self.connector.load(request.request_id, fresh[: offered // request.block_tokens])
        return True

    def _match(self, request: Request, computed: int) -> int | None:
        """Ask the connector what it can load; None: not known yet."""
        if self.connector is None:
            return 0
        request.matched = True
        match = self.connector.match(request.request_id, request.tokens, computed, request.identity)
        if match.pending:
            return None
        # Whole blocks, and at least one token to compute, whatever a connector answers.
        most = (request.count - 1 - computed) // request.block_tokens
        return min(match.tokens // request.block_tokens, most) * request.block_tokens

    def _loaded(self, request: Request, loaded: Loaded) -> None:
        """Let a request run whose load has settled, wholly or in part."""
        valid = min(max(loaded.tokens, 0), request.loading)
        request.computed += valid
        request.loading = 0
        request.phase = Phase.RUNNING
        if not request.generated:
            request.hits |= _clipped(loaded, valid)
        self._publish(request)

    def _publish(self, request: Request) -> None:
        full = request.computed // request.block_tokens
        for index in range(request.published, full):
            self._pool.publish(request.blocks[index], request.keys[index])
        request.published = max(request.published, full)

    def _preempt(self, request: Request) -> None:
        self._active.remove(request)
        self._give_up(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        request.computed = request.published = 0
        self._waiting.appendleft(request)

    def _give_up(self, request: Request) -> None:
        """Let go of a request's blocks, of which there are none yet if it waits."""
        matched, request.matched = request.matched, False
        blocks, request.blocks = request.blocks, []
        if matched and self.connector is not None and self.connector.finish(request.request_id):
            self._held[request.request_id] = blocks
        else:
            self._pool.release(blocks)


def _clipped(loaded: Loaded, valid: int) -> dict[str, int]:
    """Return the tokens by tier, of which there are never more than were valid."""
    hits: dict[str, int] = {}
    for tier, tokens in loaded.tiers.items():
        hits[tier] = min(max(tokens, 0), valid - sum(hits.values()))
    unnamed = valid - sum(hits.values())
    return hits | {"unknown": hits.get("unknown", 0) + unnamed} if unnamed else hits
