"""The connector of kvtier's own engine, and a model for any in-process engine.

Scheduler and worker are one process here, so plans are executed where they are made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Cache, Lease, Match
from kvtier.checks import check_kind, check_whole
from kvtier.clock import monotonic
from kvtier.connectors import base
from kvtier.connectors.base import MISS, PENDING, Landing, Leaving, Loaded, Places, Update
from kvtier.connectors.executor import Executor, LayersLanding
from kvtier.copier import Pages
from kvtier.copyplan import CopyPlan
from kvtier.device.base import Device
from kvtier.errors import ConfigError, KvtierError, MisuseError
from kvtier.identity.keys import as_tokens
from kvtier.identity.namespace import Request
from kvtier.prefix import Prefix
from kvtier.transfer import CopyResult, CopyStatus, CopyTransfer, FetchTransfer, LeavingTransfer

_FETCH_SECONDS: Final = 5.0
_LEASE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 10.0
Moving = TypeVar("Moving", bound=CopyTransfer)


@dataclass(slots=True)
class _State:
    """What is known of one request between calls."""

    prefix: Prefix | None = None
    match: Match | None = None
    computed: int = 0
    until: float = 0.0  # when an answer that a daemon owes counts as none; 0 while it owes none
    fetch: FetchTransfer | None = None
    lease: Lease | None = None
    saved_chunks: int = 0
    counted: bool = False  # as a request that looked for this load


@dataclass(slots=True)
class _Copying:
    """One plan in flight."""

    request_id: str
    plan: CopyPlan
    transfer: CopyTransfer
    lease: Lease | None = None  # of a load
    match: Match | None = None
    start: int = 0  # the first token that a load copies, or chunk that a save does
    ended: bool = False  # its request has ended: report the blocks, not the load


class ReferenceConnector:
    """See ``Connector``.

    tensors: the engine's KV, one tensor for each component. pages: what executes plans instead,
    where the blocks are in other processes. meet: let the engine compute the front of a prompt
    while its end is read from a slow tier. always: load what there is, also where that is estimated
    to take longer than computing it. groups: of layers, see ``Cache.bind``.
    """

    def __init__(
        self,
        cache: Cache,
        tensors: Any,
        device: Device,
        *,
        pages: Executor | None = None,
        meet: bool = True,
        always: bool = False,
        groups: int | None = None,
    ) -> None:
        check_kind("a connector's cache", cache, Cache)
        self._cache = cache
        self._meet = meet
        self._always = always
        self._device = device
        self._pages: Executor = (
            cache.bind(tensors, device, groups=groups) if pages is None else pages
        )
        self._chunk = cache.geometry.chunk_tokens
        self._states: dict[str, _State] = {}
        self._copying: deque[_Copying] = deque()
        self._late: dict[str, None] = {}
        self._wake = threading.Event()

    def match(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        computed: int,
        identity: object | None = None,
    ) -> base.Match:
        """See Connector. Waits for slower tiers in the background, at most five seconds."""
        check_whole("the computed tokens", computed)
        tokens = _checked(request_id, tokens)
        state = self._state(request_id, tokens, identity)
        state.computed = computed
        first = computed // self._chunk
        if state.fetch is not None:
            if not state.fetch.poll():
                return PENDING
            state.lease, state.fetch = state.fetch.result(0), None
            if state.lease is None and not self._shrunk(state):
                return MISS
        if state.lease is not None and not state.lease.held:
            state.lease = None  # the engine asks again too late: match anew
        if state.lease is not None:
            if state.lease.first <= first:
                return self._offer(state)
            state.lease.release()  # blocks left HBM meanwhile: what it begins with is missing
            state.lease = None
        state.prefix = self._cache.prefix(tokens, _request(identity), state.prefix)
        return self._anew(state, first)

    def _anew(self, state: _State, first: int) -> base.Match:
        """Match a prompt, and lease or fetch what is found of chunks from `first` on."""
        if state.prefix is None:
            return MISS
        match = self._cache.match(state.prefix, counted=not state.counted)
        if match.pending:
            return self._owed(state)
        state.until, state.counted = 0.0, True
        begin = 0
        if not self._always:
            match, advice = self._cache.advise(match, state.computed, meet=self._meet)
            begin = advice.begin
        state.match = match
        if match.tokens <= state.computed and not match.unknown:
            return MISS
        if not match.unknown and not any(match.where[first:]):
            state.lease = self._cache.lease(match, deadline=_LEASE_SECONDS, first=first)
            if state.lease is not None:
                return self._offer(state)
        first = begin // self._chunk if begin else first
        state.fetch = self._cache.fetch(
            match, timeout=_FETCH_SECONDS, deadline=_LEASE_SECONDS, first=first
        )
        state.fetch.on_settled(self._wake.set)
        return base.Match(0, begin=begin) if begin else PENDING

    def arrived(self, request_id: str, computed: int) -> base.Match | None:
        """See Connector."""
        state = self._states.get(request_id, _State())
        if state.fetch is None or state.match is None:
            return MISS
        if not state.fetch.poll() and computed < state.match.tokens:
            return None
        fetch, state.fetch = state.fetch, None
        if not fetch.poll():  # the engine was faster
            fetch.abandon()
            return MISS
        lease = fetch.result(0)
        if lease is None or state.prefix is None:
            return MISS
        begin = max(lease.first * self._chunk, computed)
        tokens = min(lease.tokens, state.prefix.limit) - begin
        if tokens <= 0:
            lease.release()
            return MISS
        state.lease, state.computed = lease, begin
        return base.Match(tokens, begin=begin)

    @staticmethod
    def _owed(state: _State) -> base.Match:
        """Wait for a daemon's answer as long as for a fetch: it may be alive, and stuck."""
        now = monotonic()
        state.until = state.until or now + _FETCH_SECONDS
        return PENDING if now < state.until else MISS

    def _shrunk(self, state: _State) -> bool:
        """Say whether a shorter length is worth a try, since a tier lacked what it was to have.

        Windows and states of a shorter length are other parts, which were not fetched.
        """
        if state.match is None:
            return False
        before = state.match.tokens
        state.match = self._cache.match(state.match.prefix, counted=False)
        return state.computed < state.match.tokens < before

    def load(self, request_id: str, block_ids: Places) -> None:
        """See Connector."""
        state = self._states.get(request_id, _State())
        lease, state.lease = state.lease, None
        state.counted = False  # who asks again was preempted, and loads again
        if lease is None or state.match is None:
            raise MisuseError(f"request {request_id!r} was offered nothing to load")
        with lease:  # the plan holds the slots from here on
            plan = self._cache.plan_load(lease, block_ids, start=state.computed)
        if plan is None:
            self._late[request_id] = None  # too late: reported as a load of nothing
            return
        transfer = self._execute(plan)
        copying = _Copying(request_id, plan, transfer, lease, state.match, state.computed)
        self._copying.append(copying)

    def landing(self, request_id: str) -> Landing | None:
        """See Connector. Where the blocks are in other processes, None."""
        for copying in reversed(self._copying):
            if copying.request_id == request_id and copying.lease and not copying.ended:
                transfer = copying.transfer
                return LayersLanding(self._device, transfer) if transfer.layers else None
        return None

    def poll(self) -> Update:
        """See Connector."""
        self._wake.clear()
        loaded = [Loaded(request_id, 0) for request_id in self._late]
        self._late.clear()
        busy: deque[_Copying] = deque()
        freed: dict[str, None] = {}
        for copying in self._copying:
            if not copying.transfer.poll():
                busy.append(copying)
                continue
            result = copying.transfer.result(0)
            self._cache.settle(copying.plan, result)
            if copying.ended:
                freed[copying.request_id] = None
            elif copying.lease is not None:
                loaded.append(self._loaded(copying, copying.lease, result.tokens))
            elif isinstance(copying.transfer, LeavingTransfer) and copying.transfer.void:
                state = self._states.get(copying.request_id, _State())
                state.saved_chunks = min(state.saved_chunks, copying.start)
        self._copying = busy
        for copying in busy:
            if copying.ended:
                freed.pop(copying.request_id, None)
        return Update(tuple(loaded), tuple(freed))

    def wait(self, seconds: float) -> None:
        """See Connector."""
        if self._copying:
            self._copying[0].transfer.result(seconds)
        else:
            self._wake.wait(seconds)

    def save(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        block_ids: Places,
        identity: object | None = None,
    ) -> None:
        """See Connector."""
        plan, first = self._plan_save(request_id, tokens, block_ids, identity)
        if plan is not None:
            self._copying.append(_Copying(request_id, plan, self._execute(plan), start=first))

    def leaving(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        block_ids: Places,
        identity: object | None = None,
    ) -> Leaving | None:
        """See Connector. Where the blocks are in other processes, None."""
        pages = self._pages
        if not isinstance(pages, Pages):
            return None
        plan, first = self._plan_save(request_id, tokens, block_ids, identity)
        if plan is None:
            return None
        transfer = self._started(plan, lambda: pages.leave(plan))
        self._copying.append(_Copying(request_id, plan, transfer, start=first))
        return transfer

    def _plan_save(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        block_ids: Places,
        identity: object | None,
    ) -> tuple[CopyPlan | None, int]:
        """Plan the save of whole chunks that were not offered yet; return the first of them, too.

        From then on they count as offered.
        """
        tokens = _checked(request_id, tokens)
        chunks = len(tokens) // self._chunk
        known = self._states.get(request_id)
        if known is not None and chunks <= known.saved_chunks:
            return None, chunks
        state = self._state(request_id, tokens, identity)
        if state.prefix is None or len(state.prefix.names) < chunks:
            state.prefix = self._cache.prefix(tokens, _request(identity), state.prefix)
        computed = state.prefix.head(tokens, chunks)
        first, state.saved_chunks = state.saved_chunks, chunks
        return self._cache.plan_save(computed, block_ids, first=first), first

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """See Connector."""
        self._cache.computed(spans, seconds)

    def saving(self, request_id: str) -> bool:
        """See Connector."""
        return any(copying.request_id == request_id for copying in self._copying)

    def finish(self, request_id: str) -> bool:
        """See Connector."""
        state = self._states.pop(request_id, None)
        if state is not None:
            if state.fetch is not None:
                state.fetch.abandon()
            if state.lease is not None:
                state.lease.release()
        self._late.pop(request_id, None)
        mine = [copying for copying in self._copying if copying.request_id == request_id]
        for copying in mine:
            copying.ended = True
            if isinstance(copying.transfer, LeavingTransfer):
                copying.transfer.end(good=False)  # unless its step is over, and has counted
        return bool(mine)

    def close(self) -> None:
        """See Connector. Waits ten seconds for each copy in flight."""
        for request_id in list(self._states):
            self.finish(request_id)
        while self._copying:
            copying = self._copying.popleft()
            result = copying.transfer.result(_CLOSE_SECONDS)
            if result.status is not CopyStatus.TIMEOUT:
                self._cache.settle(copying.plan, result)

    def _state(self, request_id: str, tokens: NDArray[np.int32], identity: object | None) -> _State:
        """Return what is known of a request.

        Raises MisuseError where it is another one than before: it would be stored, and served,
        under the first one's keys.
        """
        state, request = self._states.setdefault(request_id, _State()), _request(identity)
        before = state.prefix
        if before is not None and not (request in (None, before.request) and before.agrees(tokens)):
            raise MisuseError(
                f"request {request_id!r} comes with other tokens, or another identity, than "
                f"before; finish it first"
            )
        return state

    def _execute(self, plan: CopyPlan) -> CopyTransfer:
        """Enqueue a plan's copies. Raises what ``Pages.execute`` does of one that it refuses."""
        after = (self._device.host_fence(),)
        return self._started(plan, lambda: self._pages.execute(plan, after=after))

    def _started(self, plan: CopyPlan, start: Callable[[], Moving]) -> Moving:
        try:
            return start()
        except KvtierError as error:  # nothing was enqueued, so its slots are free again
            self._cache.settle(plan, CopyResult(CopyStatus.FAILED, cause=str(error)))
            raise

    def _offer(self, state: _State) -> base.Match:
        """Say how many tokens the lease gives beyond the computed ones."""
        if state.lease is None or state.prefix is None:
            return MISS
        tokens = max(min(state.lease.tokens, state.prefix.limit) - state.computed, 0)
        if not tokens:
            state.lease.release()
            state.lease = None
        return base.Match(tokens)

    def _loaded(self, copying: _Copying, lease: Lease, tokens: int) -> Loaded:
        """Say what of a load is valid, and count it by tier."""
        tiers: dict[str, int] = {}
        at = copying.start
        for index, source in enumerate(lease.sources):
            end = min((lease.first + index + 1) * self._chunk, copying.start + tokens)
            # A chunk that windows have passed was not read; the next that was made up for it.
            if end > at and lease.slots[index]:
                tiers[source] = tiers.get(source, 0) + end - at
                at = end
        if copying.match is not None:
            self._cache.loaded(copying.match, tiers, lease.first)
        return Loaded(copying.request_id, tokens, tiers)


def _checked(request_id: str, tokens: Any) -> NDArray[np.int32]:
    check_kind("a request's id", request_id, str)
    return tokens if isinstance(tokens, np.ndarray) else as_tokens(tokens)


def _request(identity: object | None) -> Request | None:
    if identity is not None and not isinstance(identity, Request):
        raise ConfigError(f"identity must be a kvtier.Request, not {type(identity).__name__}")
    return identity
