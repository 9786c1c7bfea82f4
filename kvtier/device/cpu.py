"""The CPU device: a worker thread a stream, really asynchronous, so that a missing fence shows."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import Copy, Fence, Role, Stream, block_runs
from kvtier.device.layout import byte_pages
from kvtier.device.rows import copy_rows, rows_of, scattered
from kvtier.errors import ConfigError, MisuseError

_CLOSE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_log = logging.getLogger("kvtier")


class CpuFence:
    """See Fence."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """Say whether it is done, however that ended."""
        return self._done.is_set()

    def done(self) -> bool:
        """See Fence."""
        if not self._done.is_set():
            return False
        self._raise()
        return True

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        if not self._done.wait(timeout):
            return False
        self._raise()
        return True

    def settle(self, error: BaseException | None = None) -> None:
        """Mark it done; called by the stream that recorded it."""
        self.error = error
        self._done.set()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


class CpuStream:
    """A queue of work and the thread that does it, started with the first work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
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

        def block() -> None:
            while not fence.wait(_LOOK_SECONDS):
                if self._closed and not fence.wait(_CLOSE_SECONDS / 2):
                    raise MisuseError(f"stream {self._name} closed before a fence was done")

        self.enqueue(block)

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

    def _fence(self) -> CpuFence:
        return CpuFence()

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise MisuseError(f"stream {self._name} is closed")
            self._work.put(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"kvtier-{self._name}", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (the next fence raises it)
                self._error = self._error or error
            del work  # or the slots that it copied are held until the next one comes


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
        queued = self._after(stream, after)
        self._enqueue(queued, _frozen(copies), into_slot=True)
        return queued.record()

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """See Device."""
        fences: list[Fence] = []
        for copies in groups:
            queued = self._after(stream, after)  # for each: one that failed holds back all groups
            self._enqueue(queued, _frozen(copies), into_slot=False)
            fences.append(queued.record())
        return fences

    def close(self) -> None:
        """See Device."""
        for stream in self._streams.values():
            stream.close()

    def _enqueue(self, stream: CpuStream, copies: Sequence[Copy], *, into_slot: bool) -> None:
        """Append copies to a stream."""
        stream.enqueue(partial(_copy_all, copies, into_slot=into_slot))

    @staticmethod
    def _after(stream: Stream, after: Sequence[Fence]) -> CpuStream:
        if not isinstance(stream, CpuStream):
            raise MisuseError("the CPU device takes its own streams only")
        for fence in after:
            stream.wait(fence)
        return stream


def _frozen(copies: Sequence[Copy]) -> list[Copy]:
    """Take down the blocks' ids: a block table goes on changing while a copy waits its turn."""
    return [
        copy
        if isinstance(copy.blocks, (tuple, range))
        else Copy(copy.pages, tuple(copy.blocks), copy.slot)
        for copy in copies
    ]


def _copy_all(copies: Sequence[Copy], *, into_slot: bool) -> None:
    for copy in copies:
        _copy(copy, into_slot=into_slot)


def _copy(copy: Copy, *, into_slot: bool) -> None:
    if scattered(copy) and (rows := rows_of(copy.pages)):
        copy_rows(rows, copy, into_slot=into_slot)
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
