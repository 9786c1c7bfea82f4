"""Who runs in a step: admission, cache hits, loads, growth, drafts and preemption.

Requests run in the order of their arrival. A step's token budget goes to running requests first,
then to new ones. All blocks of a prompt are taken when it is admitted; an output takes more as
it grows. When none is left, the youngest running request gives up its blocks and is computed
again later, most of it from the caches.

A step may be scheduled before the outputs of the one before it are known. What is not known yet
counts as pending, and what a step found out about a request that was preempted or ended meanwhile
is dropped: its blocks belong to others by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtier.connectors.base import MISS, Connector, Landing, Leaving, Loaded, Match, Update
from kvtier.engine.drafting import Drafting
from kvtier.engine.request import Phase, Request
from kvtier.engine.spans import Span, StateCopy
from kvtier.engine.tables import Pools, Table, for_connector

PENDING_TOKEN: Final = -1
"""Stands in a span for the output of the step before, which the runner knows."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request's part of a step.

    drafts: the last tokens of the span, which nobody has verified. index: of the output token
    that the first of its logits gives. epoch: of the request, when this was scheduled.
    under: a load that has not settled, and whose layers the span reads.
    """

    request: Request
    span: Span
    drafts: tuple[int, ...]
    index: int
    epoch: int
    under: Landing | None = None

    @property
    def current(self) -> bool:
        """Whether the request still has the blocks that this was scheduled for."""
        return self.request.epoch == self.epoch


class Scheduler:
    """All unfinished requests, and the blocks of those that end before their copies do.

    step_tokens: the most tokens that one step computes. max_running: the most requests that
    hold blocks at once, those that wait for a load included.
    """

    def __init__(
        self, pools: Pools, *, step_tokens: int, max_running: int, drafting: Drafting | None = None
    ) -> None:
        self.connector: Connector | None = None
        self._pools = pools
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._drafting = drafting
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._admitted: dict[str, Request] = {}
        self._held: dict[str, Table] = {}

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
            table = self._held.pop(request_id, None)
            if table is not None:
                self._pools.release(table)
        for loaded in update.loaded:
            request = self._requests.get(loaded.request_id)
            # An aborted or preempted request no longer waits for its load.
            if request is not None and request.loading:
                self._loaded(request, loaded)
            elif request is not None and request.landing:
                request.landed = min(max(loaded.tokens, 0), request.landing)
                request.hit(loaded, request.landed)
                self._jump(request)

    def schedule(self) -> list[Work]:
        """Choose the step's work, at most `step_tokens` tokens; may be empty."""
        work: list[Work] = []
        budget = self._step_tokens
        for request in list(self._active):
            self._look_behind(request)
            idle = request.phase is not Phase.RUNNING or request.complete or request.waits
            if idle or not budget:
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
        return work or self.under_loads()

    def under_loads(self) -> list[Work]:
        """Choose work behind loads that have just begun, for a step that has nothing else to do.

        Their layers land while it computes. Beside other work they come in once the first of
        them are there.
        """
        work: list[Work] = []
        budget = self._step_tokens
        for request in list(self._active):
            if request.layers is None or not budget:
                continue
            if request.phase is Phase.LOADING:
                request.join()
            if request.under is not None and self._grow(request):
                budget -= self._plan(request, budget, work)
        return work

    def unsettled(self, work: Sequence[Work]) -> None:
        """Let requests of a step wait for their loads, which have not settled in its time."""
        for request in (one.request for one in work if one.current):
            if request.under is not None:
                request.void()
                request.phase = Phase.LOADING

    def begin(self) -> list[StateCopy]:
        """Start the loads of the requests just admitted; return the states that others begin with.

        To be called when no step is under way: what it still writes may be these blocks.
        """
        copies: list[StateCopy] = []
        admitted, self._admitted = self._admitted, {}
        for request in admitted.values():
            if request.table is None:
                continue
            if request.landing and self.connector is not None:
                end = request.barrier + request.landing
                places = self._pools.load_places(request.table, request.barrier, end)
                self.connector.load(request.request_id, for_connector(places))
                request.layers = self.connector.landing(request.request_id)
            elif request.phase is Phase.RUNNING:
                copies += self._pools.restores(request.table)
            elif self.connector is not None:
                end = request.computed + request.loading
                places = self._pools.load_places(request.table, request.computed, end)
                self.connector.load(request.request_id, for_connector(places))
                request.layers = self.connector.landing(request.request_id)
        return copies

    def leaving(self, work: Sequence[Work]) -> dict[str, Leaving]:
        """Offer what a step is about to compute; return what leaves meanwhile, by request.

        Single tokens do not, nor what the table tells after the step only: states, and which
        blocks before a load a window does not reach.
        """
        found: dict[str, Leaving] = {}
        for one in work:
            request, count = one.request, len(one.span.tokens) - len(one.drafts)
            tabled = self._pools.whole or not (self._pools.recurrent or request.loading)
            if self.connector and request.table and one.current and tabled and count > 1:
                tokens = request.tokens[: one.span.start + count]
                name, places = request.request_id, for_connector(request.table.places)
                left = self.connector.leaving(name, tokens, places, request.identity)
                found |= {} if left is None else {name: left}
        return found

    def computed(self, work: Work, tokens: int) -> list[StateCopy]:
        """Take note of the tokens of a span that are computed and verified.

        Returns the states that must be copied now, before a later step moves them on.
        """
        request, table = work.request, work.request.table
        request.computed = work.span.start + tokens
        request.scheduled = max(request.scheduled, request.computed)
        self._publish(request)
        self._jump(request)
        full = request.computed // request.block_tokens
        if table is None or not full:
            return []
        return self._pools.snapshot(table, request.computed, request.keys[full - 1])

    def trim(self, request: Request) -> None:
        """Free what no window of the request reaches any more, unless a copy may still read it."""
        saving = self.connector is not None and self.connector.saving(request.request_id)
        if request.table is not None and not saving:
            self._pools.trim(request.table, request.computed)

    def end(self, request: Request) -> None:
        """Forget a request. Its blocks are free now or, with copies in flight, later."""
        del self._requests[request.request_id]
        (self._waiting if request.phase is Phase.WAITING else self._active).remove(request)
        self._give_up(request)
        request.phase = Phase.ENDED

    def _plan(self, request: Request, budget: int, work: list[Work]) -> int:
        """Add a running request's next tokens to the step; return how many."""
        if request.table is None:
            return 0
        start, total = request.scheduled, request.count + request.pending
        end = self._cut(request, start, min(total, start + budget))
        end = min(end, request.barrier) if request.barrier else end
        drafts: Sequence[int] = ()
        if end == total and self._drafting is not None:
            drafts = self._draft(request, budget - (end - start))
        tokens = request.tokens[start:end].tolist()
        tokens += [PENDING_TOKEN] * (end - start - len(tokens))
        span = Span(
            (*tokens, *drafts),
            start,
            request.table.spans(),
            logits=1 + len(drafts) if end == total else 0,
            inputs=request.inputs,
        )
        index = request.generated + request.pending
        work.append(Work(request, span, tuple(drafts), index, request.epoch, request.under))
        request.scheduled = end
        request.pending += end == total
        return len(span.tokens)

    def _cut(self, request: Request, start: int, end: int) -> int:
        """End a step of a recurrent model where the state of the last whole chunk is to be kept."""
        chunk = self._pools.chunk_tokens
        last = (request.count - 1) // chunk * chunk
        return last if self._pools.recurrent and start < last < end else end

    def _draft(self, request: Request, budget: int) -> Sequence[int]:
        """Guess what comes next, as far as budget, output and blocks allow."""
        most = min(budget, request.sampling.max_tokens - request.generated - 1)
        if self._drafting is None or request.table is None or most < 1:
            return ()
        drafts = self._drafting.propose(request.tokens, most)
        return drafts if self._pools.grow(request.table, request.count + len(drafts)) else ()

    def _grow(self, request: Request) -> bool:
        """Make room for all tokens so far; False if the request itself had to give way."""
        while request.table is not None:
            if self._pools.grow(request.table, request.count + request.pending):
                return True
            # At worst the request itself: what the step has planned stands before it, and stays.
            self._preempt(next(r for r in reversed(self._active) if r.phase is Phase.RUNNING))
        return False

    def _admit(self, request: Request) -> bool:
        """Try to give a waiting request its blocks. False: nobody behind it may overtake.

        A request that waits for its cache, PENDING or with earlier copies still in flight, may be
        overtaken; one that waits for blocks may not, or a long prompt would starve.
        """
        if request.request_id in self._held:
            return True
        usable = (request.count - 1) // request.block_tokens
        hit = self._pools.find(request.keys[:usable])
        if not self._pools.room_for(hit, request.count):
            return False
        computed = hit.blocks * request.block_tokens
        offered = self._match(request, computed)
        if offered is None:
            return True
        request.table = self._pools.take(hit, request.count)
        request.computed = request.scheduled = computed
        request.published = hit.blocks
        if not request.generated:
            request.hits = {"hbm": computed}
        request.phase = Phase.LOADING if offered.tokens else Phase.RUNNING
        request.loading = offered.tokens
        request.meeting = offered.begin > 0
        self._waiting.remove(request)
        self._active.append(request)
        self._admitted[request.request_id] = request
        return True

    def _match(self, request: Request, computed: int) -> Match | None:
        """Ask the connector what it can load; None: not known yet."""
        if self.connector is None:
            return MISS
        request.matched = True
        match = self.connector.match(request.request_id, request.tokens, computed, request.identity)
        if match.pending:
            return None
        return replace(match, tokens=self._whole_blocks(request, computed, match.tokens))

    def _whole_blocks(self, request: Request, computed: int, tokens: int) -> int:
        """Leave at least one token to compute, whatever a connector answers."""
        most = (request.count - 1 - computed) // request.block_tokens
        return max(min(tokens // request.block_tokens, most), 0) * request.block_tokens

    def _meet(self, request: Request) -> None:
        """Ask for the tokens that come from behind; stop computing where they begin."""
        if self.connector is None:
            return
        computed = self._pools.blocks_for(request.scheduled) * request.block_tokens
        match = self.connector.arrived(request.request_id, computed)
        if match is None:
            return
        request.meet_no_more()
        tokens = self._whole_blocks(request, match.begin, match.tokens)
        if tokens:
            request.barrier, request.landing = match.begin, tokens
            self._admitted[request.request_id] = request

    def _look_behind(self, request: Request) -> None:
        """See to what comes from behind, and run on behind a load whose first layers are there."""
        if request.meeting:
            self._meet(request)
        elif request.request_id not in self._admitted:  # its load has begun
            request.wait_behind()
        if request.phase is Phase.LOADING and request.layers and request.layers.begun():
            request.join()

    def _jump(self, request: Request) -> None:
        """Go on behind the tokens that came from behind, once all before them is computed."""
        if not request.met:
            return
        request.computed += request.landed
        request.scheduled = request.computed
        request.meet_no_more()
        self._publish(request)

    def _loaded(self, request: Request, loaded: Loaded) -> None:
        """Let a request run whose load has settled, wholly or in part.

        Windows and states are only right at the end of a load: part of one is nothing.
        """
        valid = min(max(loaded.tokens, 0), request.loading)
        whole = valid == request.loading
        if not (self._pools.whole or whole):
            valid = 0
        request.computed += valid
        if request.phase is Phase.LOADING:
            request.scheduled = request.computed
        elif not whole:
            request.void()  # what it computed behind the load means nothing
        request.loading, request.layers = 0, None
        request.phase = Phase.RUNNING
        request.hit(loaded, valid)
        if request.table is not None and valid:
            self._pools.skip(request.table, request.computed)
            self._pools.trim(request.table, request.computed)
        elif self._pools.recurrent:
            self._admitted[request.request_id] = request  # its state may be half written
        self._publish(request)

    def _publish(self, request: Request) -> None:
        full = request.computed // request.block_tokens
        if request.table is not None and full > request.published:
            keys = request.keys[request.published : full]
            self._pools.publish(request.table, request.published, keys)
            request.published = full

    def _preempt(self, request: Request) -> None:
        self._active.remove(request)
        self._give_up(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)

    def _give_up(self, request: Request) -> None:
        """Let go of a request's blocks, of which there are none yet if it waits."""
        matched, request.matched = request.matched, False
        table, request.table = request.table, None
        request.restart()
        held = matched and self.connector is not None and self.connector.finish(request.request_id)
        if table is None:
            return
        if held:
            self._held[request.request_id] = table
        else:
            self._pools.release(table)
