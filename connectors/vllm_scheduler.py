"""The connector's half in vLLM's scheduler: it matches, leases and plans.

The rules of a request's life are the reference connector's. Here its plans are executed by other
objects, the workers: they leave with a step's metadata, and how they ended comes back with the
output of that step or a later one.

A save reads blocks that vLLM may hand out again as soon as their request has ended, was preempted
or has moved its window on. No block is held back for it. Instead a step that gets such a block
names the save, and the worker lets it end before anything writes: see ``StepPlans.reused``.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Cache
from kvtier.clock import monotonic
from kvtier.connectors.reference import ReferenceConnector
from kvtier.connectors.vllm_identity import Identities
from kvtier.connectors.vllm_step import Ended, StepPlans
from kvtier.copyplan import CopyPlan
from kvtier.cost import LEAST_SPAN
from kvtier.device.base import Fence
from kvtier.device.cpu import CpuDevice
from kvtier.identity.geometry import Needs
from kvtier.identity.namespace import Request
from kvtier.transfer import CopyTransfer

_ABSENT: Final = -1
_NULL: Final = 0  # vLLM's block that stands for one that a window has left behind
_NEVER: Final = sys.maxsize
_IDLE_SECONDS: Final = 0.001


class _Report:
    """A fence that is done when the workers have reported."""

    def __init__(self) -> None:
        self.cause: str | None = None

    def done(self) -> bool:
        """See Fence."""
        if self.cause:
            raise OSError(self.cause)
        return self.cause is not None

    def wait(self, timeout: float) -> bool:
        """See Fence. Reports come between calls, on this thread: there is nothing to wait for."""
        del timeout
        return self.done()


class _Outbox:
    """Takes plans for the workers: stands where ``Pages`` does in one process."""

    def __init__(self) -> None:
        self.plans: list[CopyPlan] = []
        self._reports: dict[int, _Report] = {}

    def execute(self, plan: CopyPlan, after: Sequence[Fence]) -> CopyTransfer:
        """Queue a plan for the step that is being made. after: the worker waits for its own."""
        del after
        self.plans.append(plan)
        self._reports[plan.id] = report = _Report()
        blocks = tuple(block for part in plan.parts for block in part.blocks)
        return CopyTransfer([report], plan.tokens, blocks)

    def take(self) -> CopyPlan | None:
        """Return the plan that was queued since the last call, if one was."""
        return self.plans.pop() if self.plans else None

    def report(self, plan: int, cause: str) -> None:
        """Note how a plan has ended."""
        report = self._reports.pop(plan, None)
        if report is not None:
            report.cause = cause


@dataclass(slots=True)
class _Served:
    """A request that vLLM serves.

    tokens: those of it that were converted, int32. next: how many must be computed until there is
    another chunk to save. start: tokens that vLLM had when it asked. failed: a load of it did;
    it is not tried again, so that it cannot fail for ever.
    """

    request: Any
    identity: Request | None
    next: int
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    start: int = 0
    failed: bool = False

    def upto(self, count: int) -> NDArray[np.int32]:
        """Return its first `count` tokens. Each is converted once."""
        known = len(self.tokens)
        if known < count:
            more = np.array(self.request.all_token_ids[known:count], np.int32)
            self.tokens = np.concatenate((self.tokens, more))
        return self.tokens if len(self.tokens) == count else self.tokens[:count]


class _Step(NamedTuple):
    """A step that was scheduled: when, and for each request its tokens [start, stop)."""

    time: float
    spans: list[tuple[int, int]]
    requests: frozenset[str]


class SchedulerSide:
    """See the module's text. Calls come from the scheduler's thread, and do not wait.

    at_once: steps that vLLM has under way at the same time, two with asynchronous scheduling.
    """

    def __init__(self, cache: Cache, at_once: int = 1) -> None:
        geometry = cache.geometry
        self._ranks = cache.ranks[0]
        self._heard: dict[int, list[str]] = {}
        self._block = geometry.block_tokens[0]
        self._chunk = geometry.chunk_tokens
        self._windows = [one.needs is Needs.TRAILING for one in geometry.components]
        self._outbox = _Outbox()
        # The device is asked for the fence of this thread's work, of which there is none.
        self._rules = ReferenceConnector(cache, None, CpuDevice(), pages=self._outbox, meet=False)
        self._at_once = at_once
        self._steps: deque[_Step] = deque(maxlen=at_once)
        self._identities = Identities()
        self._served: dict[str, _Served] = {}
        self._plans = StepPlans()
        self._loading: dict[int, str] = {}
        self._reading: dict[int, int] = {}  # a block that a save reads: the save
        self._blocks: dict[int, tuple[int, ...]] = {}  # a save: its blocks
        self._given: list[Sequence[int]] = []  # blocks that loads of this step got
        self._pending = False

    @property
    def busy(self) -> bool:
        """Whether copies are under way that a step has to report."""
        return bool(self._loading or self._blocks)

    # ---- a request

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Say how many tokens beyond the computed ones can be loaded; None: ask again."""
        served = self._serve(request)
        if served.identity is None or served.failed or request.skip_reading_prefix_cache:
            return 0, False
        tokens = served.upto(request.num_tokens)
        found = self._rules.match(request.request_id, tokens, computed, served.identity)
        served.start = computed
        if found.pending:
            self._pending = True
            return None, False
        return found.tokens, found.tokens > 0

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Plan the load of that many tokens into a request's blocks."""
        if not tokens:
            return
        start = self._served[request.request_id].start
        first, stop = start // self._block, (start + tokens) // self._block
        whole = blocks.get_block_ids()
        tables = [ids[first:stop] for ids in self._present(whole)]
        self._rules.load(request.request_id, tables)
        plan = self._outbox.take()
        self._given += [ids[first:] for ids in whole]
        if plan is None:
            self._served[request.request_id].failed = True
            lost = tuple(one for ids in tables for one in ids if one != _ABSENT)
            self._plans.late.append((request.request_id, lost))
            return
        self._plans.loads.append((request.request_id, bytes(plan)))
        self._loading[plan.id] = request.request_id

    def finish(self, request: Any) -> None:
        """Forget a request. Its copies go on; what reads its blocks is fenced."""
        if self._served.pop(request.request_id, None) is not None:
            self._rules.finish(request.request_id)

    def _serve(self, request: Any) -> _Served:
        served = self._served.get(request.request_id)
        if served is None:
            identity = self._identities.of(request)
            first = _NEVER if identity is None else self._chunk
            served = self._served[request.request_id] = _Served(request, identity, first)
        return served

    # ---- a step

    def step(self, output: Any) -> StepPlans:
        """Return what the workers do in the step that vLLM has just put together."""
        plans, self._plans = self._plans, StepPlans()
        if self._reading:
            plans.reused = self._reused(output)
        self._given.clear()
        scheduled = output.num_scheduled_tokens
        self._time(scheduled)
        for request_id, tokens in scheduled.items():
            served = self._served.get(request_id)
            if served is not None and served.request.num_computed_tokens + tokens >= served.next:
                self._save(served, tokens, output, plans)
        plans.idle = not scheduled
        if plans.idle and self._pending:
            self._rules.wait(_IDLE_SECONDS)  # nothing to compute: leave the core to the reads
        self._pending = False
        return plans

    def _time(self, scheduled: Mapping[str, int]) -> None:
        """Learn how long a step took, from which it follows what is worth loading.

        vLLM schedules a step when the one `at_once` before it has ended, which ran since the last
        was scheduled. Only where a request goes on from each step to the next: else vLLM may have
        waited for one.
        """
        now, steps = monotonic(), self._steps
        if steps and steps[-1].requests.isdisjoint(scheduled):
            steps.clear()
        if len(steps) == self._at_once and steps[0].spans:
            self._rules.computed(steps[0].spans, now - steps[-1].time)
        spans: list[tuple[int, int]] = []
        if max(scheduled.values(), default=0) >= LEAST_SPAN:
            starts = [
                (self._served[one].request.num_computed_tokens, tokens)
                for one, tokens in scheduled.items()
                if one in self._served
            ]
            spans = [(start, start + tokens) for start, tokens in starts]
        steps.append(_Step(now, spans, frozenset(scheduled)))

    def _save(self, served: _Served, tokens: int, output: Any, plans: StepPlans) -> None:
        """Plan the save of the chunks that this step completes."""
        request = served.request
        # With asynchronous scheduling a step may run ahead of the tokens that are known.
        end = min(request.num_computed_tokens + tokens, request.num_tokens)
        chunks = end // self._chunk
        if chunks * self._chunk < served.next:
            return
        served.next = (chunks + 1) * self._chunk
        tables = output.kv_connector_block_state.get_block_ids(request.request_id)
        known = served.upto(end)[: chunks * self._chunk]
        self._rules.save(request.request_id, known, self._present(tables), served.identity)
        plan = self._outbox.take()
        if plan is None:
            return
        plans.saves.append(bytes(plan))
        self._blocks[plan.id] = blocks = tuple(one for part in plan.parts for one in part.blocks)
        self._reading.update(dict.fromkeys(blocks, plan.id))

    def _present(self, tables: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return block tables with what windows have left behind marked as absent."""
        return [
            [_ABSENT if one == _NULL else one for one in ids] if window else ids
            for ids, window in zip(tables, self._windows, strict=True)
        ]

    def _reused(self, output: Any) -> list[int]:
        """Return the saves that read blocks which this step may write."""
        reading = self._reading
        saves = {
            reading[block]: None for ids in self._new(output) for block in ids if block in reading
        }
        return list(saves)

    def _new(self, output: Any) -> Iterator[Sequence[int]]:
        """Yield the blocks that requests got since the last step."""
        yield from self._given
        for new in output.scheduled_new_reqs:
            first = new.num_computed_tokens // self._block
            yield from (ids[first:] for ids in new.block_ids)
        for tables in output.scheduled_cached_reqs.new_block_ids:
            yield from tables or ()

    def ended(self, report: Ended) -> None:
        """Take the workers' word for plans that have ended. One has when all ranks say so."""
        for plan, causes in report.causes.items():
            heard = self._heard.setdefault(plan, [])
            heard += causes
            if len(heard) < self._ranks:
                continue
            del self._heard[plan]
            cause = next(filter(None, heard), "")
            self._outbox.report(plan, cause)
            served = self._served.get(self._loading.pop(plan, ""))
            if served is not None and cause:
                served.failed = True
            for block in self._blocks.pop(plan, ()):
                if self._reading.get(block) == plan:
                    del self._reading[block]
        self._rules.poll()

    def reset(self) -> None:
        """Let go of what requests were offered, since the cache is emptied: its KV is void.

        So is what they have computed or are loading: of those that have any, nothing more is saved.
        """
        for request_id, served in self._served.items():
            self._rules.finish(request_id)
            if served.request.num_computed_tokens:
                served.next = _NEVER
            elif served.identity is not None:
                served.next = self._chunk

    def close(self) -> None:
        """Let go of what requests hold."""
        self._served.clear()
        self._rules.close()
