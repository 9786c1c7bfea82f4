"""The CPU device: a worker thread a stream, really asynchronous, so that a missing fence shows."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import Copy, Fence, PlaneGroups, Role, Stream, block_runs
from kvtier.device.layout import byte_pages
from kvtier.device.rows import copy_scattered
from kvtier.errors import ConfigError, MisuseError

_CLOSE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_log = logging.getLogger("kvtier")


class CpuFence:
    """See Fence.

    It waits on a lock that is held until it is done: ``threading.Event`` takes ten times as long to
    make, and each copy has two fences.
    """

    __slots__ = ("_held", "error", "settled")

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()
        self.error: BaseException | None = None
        self.settled = False  # done, however that ended

    def done(self) -> bool:
        """See Fence."""
        if self.settled and self.error is not None:
            raise self.error
        return self.settled

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        if not self.settled and self._held.acquire(timeout=max(timeout, 0.0)):
            self._held.release()  # for who else waits
        return CpuFence.done(self)

    def settle(self, error: BaseException | None = None) -> None:
        """Mark it done, once; called by the stream that recorded it."""
        if not self.settled:
            self.error = error
            self.settled = True
            self._held.release()


class CpuStream:
    """A queue of work and the thread that does it, started with the first work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[deque[Callable[[], None]] | None] = queue.SimpleQueue()
        self._together: deque[Callable[[], None]] | None = None  # what ``submit`` puts
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._closed = False

    def enqueue(self, work: Callable[[], None]) -> None:
        """Append work. After an error, what is left before the next fence is not done."""

        def unless_failed() -> None:
            if self._error is None:
                work()

        self._put(unless_failed)

    def record(self) -> CpuFence:
        """See Stream. The fence raises the first error since the fence before it."""
        fence = self._fence()

        def settle() -> None:
            error, self._error = self._error, None
            fence.settle(error)

        self._put(settle)
        return fence

    def wait(self, fence: Fence) -> None:
        """See Stream."""
        if isinstance(fence, CpuFence) and fence.settled and fence.error is None:
            self._check_open()
            return

        def block() -> None:
            while not fence.wait(_LOOK_SECONDS):
                if self._closed and not fence.wait(_CLOSE_SECONDS / 2):
                    raise MisuseError(f"stream {self._name} closed before a fence was done")

        self.enqueue(block)

    def submit(
        self, after: Sequence[Fence], groups: Iterable[Iterable[Callable[[], None]]]
    ) -> list[CpuFence]:
        """Append groups of work, each after the fences; return a fence for each.

        The thread is woken once for all of it: that takes longer than all else here.
        """
        with self._lock:
            works: deque[Callable[[], None]] = deque()
            self._together = works
            try:
                return self._each(after, groups)
            finally:
                self._together = None
                if works:
                    self._wake(works)

    def close(self) -> None:
        """Do what is queued, bounded, and end the thread. Idempotent."""
        with self._lock:
            self._closed = True
            if self._thread is None:
                return
            self._work.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("%s still hangs at close; it is left behind", self._thread.name)

    def _each(
        self, after: Sequence[Fence], groups: Iterable[Iterable[Callable[[], None]]]
    ) -> list[CpuFence]:
        fences: list[CpuFence] = []
        for works in groups:
            for fence in after:  # for each: one that failed holds back all groups
                self.wait(fence)
            for work in works:
                self.enqueue(work)
            fences.append(self.record())
        return fences

    def _fence(self) -> CpuFence:
        return CpuFence()

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError(f"stream {self._name} is closed")

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._check_open()
            if self._together is not None:
                self._together.append(work)
            else:
                self._wake(deque((work,)))

    def _wake(self, works: deque[Callable[[], None]]) -> None:
        """Put work into the queue. Called under the lock.

        Raises ConfigError, and puts nothing there, where the system gives no thread.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"kvtier-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ConfigError(
                    f"there is no thread for copies on stream {self._name} ({error}): raise the "
                    f"limit of processes (ulimit -u, or TasksMax= in the systemd unit)"
                ) from error
            self._thread = thread
        self._work.put(works)

    def _run(self) -> None:
        while (works := self._work.get()) is not None:
            while works:
                try:
                    works.popleft()()  # kept nowhere, or the slots that it copied would be
                except BaseException as error:  # noqa: BLE001  (the next fence raises it)
                    self._error = self._error or error


class CpuDevice:
    """Copies on worker threads with numpy, which releases the GIL. See Device.

    streams: makes a stream by its name.
    """

    name = "cpu"

    def __init__(self, streams: Callable[[str], CpuStream] = CpuStream) -> None:
        self._streams: dict[Role, CpuStream] = {"load": streams("load"), "store": streams("store")}

    def stream(self, role: Role) -> CpuStream:
        """See Device."""
        return self._streams[role]

    def pages(self, tensor: Any, planes: int, block_bytes: int) -> NDArray[np.uint8]:
        """See Device."""
        if not isinstance(tensor, np.ndarray):
            if getattr(getattr(tensor, "device", None), "type", None) != "cpu":
                raise ConfigError("the CPU device needs KV tensors of torch (CPU) or numpy")
            tensor = tensor.detach()
        return byte_pages(tensor, planes, block_bytes)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """See Device. A CPU copies from and to any memory."""

    def host_fence(self) -> CpuFence:
        """See Device. The CPU engine computes on the calling thread, so it is done."""
        fence = CpuFence()
        fence.settle()
        return fence

    def hold(self, fence: Fence, timeout: float) -> bool:
        """See Device."""
        return fence.wait(timeout)

    def gather(self, stream: Stream, copies: Sequence[Copy], after: Sequence[Fence]) -> Fence:
        """See Device."""
        (fence,) = self._submit(stream, [_frozen(copies)], after, into_slot=True)
        return fence

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """See Device."""
        kept: Sequence[Sequence[Copy]]
        if isinstance(groups, PlaneGroups):  # which are cut into groups on the stream's thread
            kept = PlaneGroups(_frozen(groups.copies), groups.cuts, len(groups))
        else:
            kept = [_frozen(copies) for copies in groups]
        return self._submit(stream, kept, after, into_slot=False)

    def close(self) -> None:
        """See Device."""
        for stream in self._streams.values():
            stream.close()

    def _submit(
        self,
        stream: Stream,
        groups: Sequence[Sequence[Copy]],
        after: Sequence[Fence],
        *,
        into_slot: bool,
    ) -> list[Fence]:
        if not isinstance(stream, CpuStream):
            raise MisuseError("the CPU device takes its own streams only")
        each = (self._works(groups, index, into_slot=into_slot) for index in range(len(groups)))
        return [*stream.submit(after, each)]

    def _works(
        self, groups: Sequence[Sequence[Copy]], index: int, *, into_slot: bool
    ) -> Iterable[Callable[[], None]]:
        """Return the work of a group of copies, piece by piece."""
        return (partial(_copy_group, groups, index, into_slot=into_slot),)


def _frozen(copies: Sequence[Copy]) -> list[Copy]:
    """Take down the blocks' ids: a block table goes on changing while a copy waits its turn."""
    return [
        copy
        if isinstance(copy.blocks, (tuple, range))
        else Copy(copy.pages, tuple(copy.blocks), copy.slot)
        for copy in copies
    ]


def _copy_group(groups: Sequence[Sequence[Copy]], index: int, *, into_slot: bool) -> None:
    _copy_all(groups[index], into_slot=into_slot)


def _copy_all(copies: Sequence[Copy], *, into_slot: bool) -> None:
    for copy in copies:
        _copy(copy, into_slot=into_slot)


def _copy(copy: Copy, *, into_slot: bool) -> None:
    if copy_scattered(copy, into_slot=into_slot):
        return
    runs, count = list(block_runs(copy.blocks)), copy.pages.shape[1]
    if runs and max(copy.blocks) >= count:  # before any of them is copied
        raise MisuseError(f"blocks up to {max(copy.blocks)} do not match pages of {count}")
    for pages, slot in copy.tensors():
        _copy_runs(pages, runs, slot, into_slot=into_slot)


def _copy_runs(
    pages: NDArray[np.uint8],
    runs: Sequence[tuple[int, int, int]],
    slot: NDArray[np.uint8],
    *,
    into_slot: bool,
) -> None:
    for at, stop, first in runs:  # one strided copy each
        some, part = pages[:, first : first + stop - at], slot[:, at:stop]
        if some.shape != part.shape:  # numpy would repeat one block in the place of many
            raise MisuseError(f"blocks {some.shape} do not match their slot {part.shape}")
        np.copyto(*((part, some) if into_slot else (some, part)))
