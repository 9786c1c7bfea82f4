"""The CPU device at its most adverse: a seed chooses when and in what order work is done.

What streams and fences order stays in order; nothing else does. Work is done later than it is
enqueued, on whichever thread next calls the device or waits for a fence, a piece at a time. So
one seed is one schedule, as long as one thread calls; ``CpuDevice`` is the one with threads.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple, get_args

from kvtier.clock import monotonic
from kvtier.device.base import Copy, Fence
from kvtier.device.cpu import CpuDevice, CpuFence, CpuStream
from kvtier.device.stack import Bytes
from kvtier.errors import MisuseError, unknown

Order = Literal["random", "lazy", "starve load", "starve store", "starve compute"]
"""How a schedule treats streams: by chance, only what is waited for, or one of them last."""

ORDERS: Final[tuple[Order, ...]] = get_args(Order)
POISON: Final = 0xDB
"""What a copy fills its target with before it begins: until its fence, nothing there counts."""

_STEPS: Final = (0, 0, 1, 3, 30)  # that pass between two calls
_PIECES: Final = (1, 2, 3, 5, 8)  # of one copy
_PATIENCE: Final = 64  # who asks for lazy work so often is waiting, by asking
_CLOSE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.05


class _Item(NamedTuple):
    """A piece of work, and the fence before which it must not begin."""

    gate: Fence | None
    work: Callable[[], None]


class ChaosFence(CpuFence):
    """See Fence. To ask it lets time pass; to wait for it, with a timeout above zero, does work."""

    __slots__ = ("stream",)

    def __init__(self, stream: ChaosStream) -> None:
        super().__init__()
        self.stream = stream

    def done(self) -> bool:
        """See Fence."""
        self.stream.schedule.asked()
        return super().done()

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        if timeout <= 0:
            return self.done()
        self.stream.schedule.run_until(self, timeout)
        return super().done()


class ChaosStream(CpuStream):
    """See Stream. It does nothing by itself: its schedule chooses whose turn it is."""

    def __init__(self, name: str, schedule: _Schedule) -> None:
        super().__init__(name)
        self.name = name
        self.schedule = schedule
        self._items: deque[_Item] = deque()
        schedule.streams.append(self)

    @property
    def gate(self) -> Fence | None:
        """The fence that its next work waits for; None if it may begin, or there is no work."""
        fence = self._items[0].gate if self._items else None
        return None if fence is None or _settled(fence) else fence

    @property
    def ready(self) -> bool:
        """Say whether there is work that may begin."""
        return bool(self._items) and self.gate is None

    def wait(self, fence: Fence) -> None:
        """See Stream. What the fence raises, the next fence of this stream raises."""
        self._append(_Item(fence, partial(_look, fence)))

    def submit(
        self, after: Sequence[Fence], groups: Iterable[Iterable[Callable[[], None]]]
    ) -> list[CpuFence]:
        """See CpuStream. Piece by piece: time may pass between any two."""
        return self._each(after, groups)

    def step(self) -> None:
        """Do the next piece of work. Called by the schedule."""
        work = self._items.popleft().work
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (the next fence raises it)
            self._error = self._error or error

    def give_up(self) -> None:
        """Drop the fence that its next work waits for, which then counts as failed."""
        self._items.popleft()
        message = f"stream {self.name} closed before a fence was done"
        self._error = self._error or MisuseError(message)

    def close(self) -> None:
        """Take no more work. What is queued, ``ChaosDevice.close`` does."""
        self._closed = True

    def _fence(self) -> CpuFence:
        return ChaosFence(self)

    def _put(self, work: Callable[[], None]) -> None:
        self._append(_Item(None, work))

    def _append(self, item: _Item) -> None:
        with self.schedule.lock:
            if self._closed:
                raise MisuseError(f"stream {self.name} is closed")
            self._items.append(item)
        self.schedule.idle()


class _Schedule:
    """Whose turn it is. Calls come from any thread; work is done under one lock."""

    def __init__(self, seed: int, order: Order) -> None:
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[ChaosStream] = []
        self._lazy = order == "lazy"
        self._starved = order.removeprefix("starve ")
        self._asked = 0

    def idle(self) -> None:
        """Let some time pass, unless everything waits until it is waited for."""
        if not self._lazy:
            with self.lock:
                for _ in range(self.rng.choice(_STEPS)):
                    self._step(None)

    def asked(self) -> None:
        """Let time pass because of a question; a lazy schedule bears many of them."""
        self.idle()
        with self.lock:
            self._asked += 1
            if self._asked > _PATIENCE:
                self._step(None)

    def run_until(self, fence: ChaosFence | None, timeout: float) -> bool:
        """Do work until a fence is done, or all is; at most `timeout` seconds of waiting.

        Where nothing can begin before a fence of elsewhere, that one is waited for.
        """
        until = monotonic() + timeout
        while fence is None or not fence.settled:
            with self.lock:
                self._asked = 0
                if self._step(fence):
                    continue
                elsewhere = self._elsewhere()
            if elsewhere is None:
                return fence is None
            left = until - monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(Exception):  # the stream that waits for it hears of it
                elsewhere.wait(min(left, _LOOK_SECONDS))
        return True

    def _step(self, wanted: ChaosFence | None) -> bool:
        """Do a piece of work; say whether there was any that may begin."""
        if self._lazy and wanted is not None:
            stream = self._needed(wanted)
        else:
            ready = [stream for stream in self.streams if stream.ready]
            ready = [stream for stream in ready if stream.name != self._starved] or ready
            stream = self.rng.choice(ready) if ready else None
        if stream is not None:
            stream.step()
        return stream is not None

    def _elsewhere(self) -> Fence | None:
        """Return a fence that work waits for, and that no work of here settles."""
        gates = [stream.gate for stream in self.streams]
        return next((gate for gate in gates if gate is not None and not self._ours(gate)), None)

    def _ours(self, fence: Fence) -> bool:
        return isinstance(fence, ChaosFence) and fence.stream.schedule is self

    def _needed(self, wanted: ChaosFence) -> ChaosStream | None:
        """Return the stream whose next work a fence waits for, through the fences before it."""
        stream = wanted.stream
        while isinstance(gate := stream.gate, ChaosFence) and self._ours(gate):
            stream = gate.stream
        return stream if stream.ready else None


class ChaosDevice(CpuDevice):
    """Copies in any order, and in any pieces, that streams and fences allow. See Device.

    seed: of all choices. order: see Order; by default the seed chooses that as well.
    compute: a stream for the engine's work; ``host_fence`` is a fence of it.
    A copy's target is poisoned before its first piece: who reads early, or what is never
    written, shows. Raises ConfigError for an unknown order.
    """

    name = "chaos"

    def __init__(self, seed: int, order: Order | None = None) -> None:
        self.order: Order = ORDERS[seed % len(ORDERS)] if order is None else order
        if self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)
        self._schedule = _Schedule(seed, self.order)
        super().__init__(self._stream)
        self.compute = self._stream("compute")

    def idle(self) -> None:
        """Let some time pass: some work is done, or none."""
        self._schedule.idle()

    def host_fence(self) -> CpuFence:
        """See Device. A fence of the compute stream, which may be done late."""
        return self.compute.record()

    def close(self) -> None:
        """See Device. Waits five seconds for fences that other devices have to settle."""
        for stream in self._schedule.streams:
            stream.close()
        if self._schedule.run_until(None, _CLOSE_SECONDS):
            return
        with self._schedule.lock:
            while stuck := [stream for stream in self._schedule.streams if stream.gate is not None]:
                stuck[0].give_up()
                self._schedule.run_until(None, 0)

    def _stream(self, name: str) -> ChaosStream:
        return ChaosStream(name, self._schedule)

    def _works(
        self, groups: Sequence[Sequence[Copy]], index: int, *, into_slot: bool
    ) -> Iterator[Callable[[], None]]:
        """Yield poison and pieces of any order, copy by copy. What does not fit is left whole."""
        for copy in groups[index]:
            blocks, shape = copy.blocks, copy.pages.shape
            fits = copy.slot.shape == (shape[0], len(blocks), shape[2])
            pieces = [copy]
            if fits and blocks and shape[0] and 0 <= min(blocks) <= max(blocks) < shape[1]:
                each = list(copy.tensors())
                yield partial(_poison, each, blocks, into_slot=into_slot)
                pieces = [one for some, slot in each for one in self._pieces(some, blocks, slot)]
                self._schedule.rng.shuffle(pieces)
            for piece in pieces:
                yield from super()._works([[piece]], 0, into_slot=into_slot)

    def _pieces(self, pages: Bytes, blocks: Sequence[int], slot: Bytes) -> list[Copy]:
        planes, _, size = pages.shape
        pieces = []
        for some, which, part in self._cut((range(planes), range(len(blocks)), range(size))):
            rows, inner = slice(some.start, some.stop), slice(part.start, part.stop)
            columns = slice(which.start, which.stop)
            mine = slot[rows, columns, inner]
            pieces.append(Copy(pages[rows, :, inner], blocks[columns], mine))
        return pieces

    def _cut(self, whole: tuple[range, range, range]) -> list[tuple[range, range, range]]:
        """Cut a box of planes, blocks and bytes into some."""
        rng, boxes = self._schedule.rng, [whole]
        for _ in range(rng.choice(_PIECES) - 1):
            planes, blocks, inner = boxes.pop(rng.randrange(len(boxes)))
            sides = [planes, blocks, inner]
            axis = rng.randrange(len(sides))
            at = rng.randint(0, len(sides[axis]))
            for half in (sides[axis][:at], sides[axis][at:]):
                sides[axis] = half
                if half:
                    boxes.append((sides[0], sides[1], sides[2]))
        return boxes


def _settled(fence: Fence) -> bool:
    """Say whether a fence is done, however that ended. Does no work."""
    if isinstance(fence, CpuFence):
        return fence.settled
    try:
        return fence.done()
    except Exception:  # noqa: BLE001  (it is raised where the stream comes to it)
        return True


def _look(fence: Fence) -> None:
    """Raise what a settled fence raises."""
    if isinstance(fence, CpuFence):
        CpuFence.done(fence)
    else:
        fence.done()


def _poison(each: Sequence[tuple[Bytes, Bytes]], blocks: Sequence[int], *, into_slot: bool) -> None:
    for pages, slot in each:
        if into_slot:
            slot[:] = POISON
        else:
            pages[:, list(blocks)] = POISON
