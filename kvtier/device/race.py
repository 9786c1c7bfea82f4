"""A checker that finds accesses to the same bytes which no fence orders, whatever the timing.

``Checked`` stands around a device and looks at each copy when it is enqueued. Every stream and
every thread of the host has a clock: how much of each other's work is known to be behind it.
Fences and enqueueing carry clocks from one to the other. Two accesses to a byte, one of them a
write, are a race unless the later one's clock knows of the earlier one. So a missing fence is
found in one run, also when all happened to go well. A device that is not checked pays nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.accesses import (
    Clock,
    History,
    Operation,
    Race,
    RaceError,
    Region,
    Span,
    join,
    spans,
)
from kvtier.device.base import (
    HOLE,
    Copy,
    Device,
    Fence,
    Role,
    Stream,
    block_runs,
)
from kvtier.errors import MisuseError

__all__ = ["Checked", "CheckedFence", "CheckedStream", "Clock", "Race", "RaceError", "Region"]

_NAMED: Final = 6  # blocks that a name lists


class CheckedFence:
    """See Fence. Who learns that it is done comes after all that it is a fence of."""

    def __init__(
        self, checker: Checked, inner: Fence, clock: Clock, covers: Sequence[Operation]
    ) -> None:
        self.inner = inner
        self.clock = clock
        self._checker = checker
        self._covers = covers

    def done(self) -> bool:
        """See Fence."""
        return self.holds(self.inner.done)

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        return self.holds(lambda: self.inner.wait(timeout))

    def holds(self, ask: Callable[[], bool]) -> bool:
        """Ask whether the calling thread comes after the fence, and remember it if so."""
        try:
            done = ask()
        except BaseException:
            # The work has ended, so that others may write there. What it wrote means nothing.
            for operation in self._covers:
                operation.failed = True
            self._checker.received(self.clock)
            raise
        if done:
            self._checker.received(self.clock)
        return done


class CheckedStream:
    """See Stream. Work that is no copy is declared before it is enqueued on `inner`."""

    def __init__(self, checker: Checked, inner: Stream, name: str) -> None:
        self.inner = inner
        self.name = name
        self.clock: dict[str, int] = {}
        self._checker = checker
        self._since: list[Operation] = []  # the last fence

    def record(self) -> CheckedFence:
        """See Stream."""
        return self.fenced(self.inner.record())

    def wait(self, fence: Fence) -> None:
        """See Stream."""
        self.inner.wait(fence.inner if isinstance(fence, CheckedFence) else fence)
        self.joins(fence)

    def declare(
        self,
        name: str,
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        early: Sequence[Region] = (),
    ) -> None:
        """Say what the work that comes next will touch.

        early: what it may read from now on, whatever the stream waits for, as batched copies do
        whose source may be accessed in any order. Raises RaceError as ``Checked`` does.
        """
        title = f"{name} on stream {self.name}"
        self.operates(title, spans(reads), spans(writes), spans(early))

    def operates(
        self,
        name: str,
        reads: Sequence[Span],
        writes: Sequence[Span],
        early: Sequence[Span] = (),
    ) -> None:
        """Count an operation, and compare its accesses with those before."""
        with self._checker.lock:
            host = self._checker.here()
            join(self.clock, host)
            operation = Operation(self.name, self.clock.get(self.name, 0) + 1, name)
            self.clock[self.name] = operation.tick
            self._since.append(operation)
            self._checker.compare(operation, early, (), host)
            self._checker.compare(operation, reads, writes, self.clock)

    def joins(self, fence: Fence) -> None:
        """Let later work come after a fence. One that is not checked orders nothing."""
        if isinstance(fence, CheckedFence):
            with self._checker.lock:
                join(self.clock, fence.clock)

    def fenced(self, inner: Fence) -> CheckedFence:
        """Return the fence of all operations so far."""
        return CheckedFence(self._checker, inner, *self.mark())

    def mark(self) -> tuple[Clock, Sequence[Operation]]:
        """Return what a fence recorded now has behind it, and what came since the one before."""
        with self._checker.lock:
            join(self.clock, self._checker.here())
            covers, self._since = self._since, []
            return dict(self.clock), covers


class Checked:
    """A device, real or CPU, whose copies are checked when they are enqueued. See Device.

    report: called with each race, whereupon the work goes on; by default RaceError is raised
        before the copy is enqueued.
    compute: the device's stream for the engine's work, where it has one.
    It knows of copies, of what ``CheckedStream.declare`` and ``touch`` say, and of nothing else.
    Addresses stand for the memory: what is freed and allocated again needs a checker of its own.
    Calls come from any thread. Where threads are ordered by a lock or a queue, the one hands
    over ``sent()`` and the other takes it by ``received``.
    """

    def __init__(self, device: Device, report: Callable[[Race], None] | None = None) -> None:
        self.inner = device
        self.name = f"{device.name}, checked"
        self.lock = threading.RLock()
        self._report = report
        self._history = History()
        self._threads = threading.local()
        self._known = 0  # threads
        self._copies = 0
        self._streams: dict[Role, CheckedStream] = {}
        for role in ("load", "store"):
            self._streams[role] = CheckedStream(self, device.stream(role), role)
        inner = getattr(device, "compute", None)
        self.compute = None if inner is None else CheckedStream(self, inner, "compute")

    def stream(self, role: Role) -> CheckedStream:
        """See Device."""
        return self._streams[role]

    def wrap(self, stream: Stream, name: str) -> CheckedStream:
        """Return a stream of the engine's own, to be given to this device from now on."""
        return CheckedStream(self, stream, name)

    def pages(self, tensor: Any, planes: int, block_bytes: int) -> NDArray[np.uint8]:
        """See Device."""
        return self.inner.pages(tensor, planes, block_bytes)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """See Device."""
        self.inner.pin(memory)

    def host_fence(self) -> CheckedFence:
        """See Device. It covers what this thread has touched, and the device's compute stream."""
        inner = self.inner.host_fence()
        if self.compute is not None:
            return self.compute.fenced(inner)
        return CheckedFence(self, inner, self.sent(), ())

    def hold(self, fence: Fence, timeout: float) -> bool:
        """See Device. What this thread knows stands for what it computes, on whatever stream."""
        if not isinstance(fence, CheckedFence):
            return self.inner.hold(fence, timeout)
        return fence.holds(lambda: self.inner.hold(fence.inner, timeout))

    def gather(self, stream: Stream, copies: Sequence[Copy], after: Sequence[Fence]) -> Fence:
        """See Device. Raises RaceError for a race, unless those are reported."""
        mine = self._mine(stream, after)
        reads = [span for copy in copies for span in _pages(copy)]
        writes = [span for copy in copies for span in _slot(copy)]
        mine.operates(self._title("gather", copies, mine), reads, writes)
        return mine.fenced(self.inner.gather(mine.inner, copies, _plain(after)))

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """See Device. Raises RaceError for a race, unless those are reported."""
        mine = self._mine(stream, after)
        title = self._title("scatter", [copy for copies in groups[:1] for copy in copies], mine)
        marks = []
        for number, copies in enumerate(groups, 1):
            reads = [span for copy in copies for span in _slot(copy)]
            writes = [span for copy in copies for span in _pages(copy)]
            mine.operates(f"{title}, group {number} of {len(groups)}", reads, writes)
            marks.append(mine.mark())
        inner = self.inner.scatter(mine.inner, groups, _plain(after))
        return [CheckedFence(self, fence, *mark) for fence, mark in zip(inner, marks, strict=True)]

    def touch(
        self, name: str, *, reads: Sequence[Region] = (), writes: Sequence[Region] = ()
    ) -> None:
        """Say what the calling thread accesses itself, now. Raises RaceError for a race."""
        with self.lock:
            clock = self.here()
            me = self._threads.name
            operation = Operation(me, clock.get(me, 0) + 1, f"{name} by {me}")
            clock[me] = operation.tick
            self.compare(operation, spans(reads), spans(writes), clock)

    def sent(self) -> Clock:
        """Return what is behind the calling thread, for another one to take."""
        with self.lock:
            return dict(self.here())

    def received(self, clock: Clock) -> None:
        """Let the calling thread come after what a clock says."""
        with self.lock:
            join(self.here(), clock)

    def close(self) -> None:
        """See Device. The calling thread comes after whatever has ended by then."""
        fences: list[CheckedFence] = []
        with contextlib.suppress(MisuseError):  # it is closed
            fences += [stream.record() for stream in self._streams.values()]
            fences += [self.compute.record()] if self.compute is not None else []
        self.inner.close()
        for fence in fences:
            with contextlib.suppress(Exception):  # the fences of its copies say it
                fence.done()

    def here(self) -> dict[str, int]:
        """Return the calling thread's clock. Called under the lock."""
        clock: dict[str, int] | None = getattr(self._threads, "clock", None)
        if clock is None:
            self._known += 1
            self._threads.name = f"thread {self._known} ({threading.current_thread().name})"
            clock = self._threads.clock = {}
        return clock

    def compare(
        self,
        operation: Operation,
        reads: Sequence[Span],
        writes: Sequence[Span],
        clock: Clock,
    ) -> None:
        """Compare accesses with those before, then note them. Called under the lock.

        Raises RaceError, and notes nothing, for a race that is not reported.
        """
        for race in self._history.races(operation, reads, writes, clock):
            if self._report is None:
                raise RaceError(str(race))
            self._report(race)
        self._history.note(operation, reads, writes)

    def _mine(self, stream: Stream, after: Sequence[Fence]) -> CheckedStream:
        if not isinstance(stream, CheckedStream):
            raise MisuseError("a checked device takes its own streams only, and wrapped ones")
        for fence in after:
            stream.joins(fence)
        return stream

    def _title(self, what: str, copies: Sequence[Copy], stream: CheckedStream) -> str:
        """Name a copy: how many it is, its first blocks, its stream, and who enqueues it."""
        with self.lock:
            self._copies += 1
            self.here()
            blocks = [str(block) for copy in copies[:1] for block in copy.blocks]
            more = ["…"] if len(blocks) > _NAMED or copies[1:] else []
            names = ", ".join([*blocks[:_NAMED], *more])
            who = f"on stream {stream.name}, enqueued by {self._threads.name}"
            return f"{what} {self._copies} of blocks {names} {who}"


def _plain(fences: Sequence[Fence]) -> list[Fence]:
    return [fence.inner if isinstance(fence, CheckedFence) else fence for fence in fences]


def _pages(copy: Copy) -> list[Span]:
    """Return the addresses of a copy's blocks, run by run of consecutive ones."""
    runs = list(block_runs(copy.blocks))
    each = (pages for pages, _ in copy.tensors())
    return spans([pages[:, first : first + to - at] for pages in each for at, to, first in runs])


def _slot(copy: Copy) -> list[Span]:
    """Return the addresses of a copy's part of a slot, holes left out."""
    if HOLE not in copy.blocks:
        return spans([copy.slot])
    return spans([copy.slot[:, at:to] for at, to, _ in block_runs(copy.blocks)])
