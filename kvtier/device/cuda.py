"""The CUDA device: copies between a GPU's blocks and pinned slots, on streams of their own.

It has not run on a GPU yet. All but the driver's calls (``torch_driver``) is tested on CPU
streams that stand in for the driver's, as adverse ones, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.clock import monotonic
from kvtier.device.base import Copy, Fence, Role, Stream
from kvtier.device.descriptors import Runs, joined
from kvtier.device.driver import Driver, Work
from kvtier.device.layout import byte_pages
from kvtier.device.paths import LINK_BYTES, Choice, Table
from kvtier.device.pinning import Pinned
from kvtier.device.spread import Spread, spreads
from kvtier.device.staging import Lot, Stage, Staged
from kvtier.device.tables import Launch, Tables, planes_of
from kvtier.device.turns import TABLE_PLANES, TABLE_RUNS, CudaFence, CudaStream
from kvtier.errors import ConfigError, MisuseError

IN_FLIGHT: Final = 64
"""Operations of one stream that are enqueued at a time. With some 1,000 an A100's queue is full,
and to enqueue takes 180 us and not 2: vllm-project/vllm#29013."""
STAGING_BYTES: Final = 32 << 20
_FEW_COPIES: Final = 8
"""Over the link, of one staged copy, whose length is not looked at."""
_SINGLE_COPIES: Final = 4
"""That are enqueued one by one, where the driver has batched copies: it takes no longer."""
_LEAST_IN_FLIGHT: Final = 2
_CHOICES: Final = 256  # that are remembered
_ROWS: Final = 3  # of what a batched copy takes
_CLOSE_SECONDS: Final = 10.0
_HANGING: Final[list[CudaDevice]] = []
"""Closed, while something of them was under way, which may go on: it reads and writes what is
theirs, so that nobody else may be given that."""
_log = logging.getLogger("kvtier")


class CudaDevice:
    """Copies on two streams of one GPU, which `driver` drives. See Device.

    table: chooses the way that a copy goes. way: all go this one, where it is set. in_flight: how
    many operations of a stream at a time, two or more; beyond it a call waits for the oldest. Calls
    come from one thread a stream. Slots have to lie in pinned memory: others are refused, never
    copied slowly.
    """

    def __init__(
        self,
        driver: Driver,
        table: Table,
        way: Choice | None = None,
        *,
        in_flight: int = IN_FLIGHT,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        if way is not None and way.way == "batch" and not driver.batches:
            raise ConfigError(
                "this driver has no batched copies: they need CUDA 12.8, a driver of 570 or later"
            )
        if in_flight < _LEAST_IN_FLIGHT:
            raise ConfigError(f"{in_flight} operations in flight: a staged copy needs at least 2")
        self.name = f"cuda: {driver.name}"
        self.driver = driver
        # Measured, a table is long, and a copy in groups asks it once for each of them.
        self._choose = lru_cache(_CHOICES)(partial(table.choose, batches=driver.batches))
        self.way = way
        self._staging_bytes = staging_bytes
        self._pinned = Pinned(driver)
        self._streams: dict[Role, CudaStream] = {
            "load": CudaStream(driver, driver.stream(), in_flight),
            "store": CudaStream(driver, driver.stream(), in_flight),
        }
        self._staging = {
            stream: driver.memory(staging_bytes, stream.handle) for stream in self._streams.values()
        }

    def stream(self, role: Role) -> CudaStream:
        """See Device."""
        return self._streams[role]

    def pages(self, tensor: Any, planes: int, block_bytes: int) -> NDArray[np.uint8]:
        """See Device. The array says where the bytes are; the host must not look inside."""
        return byte_pages(self.driver.own(tensor), planes, block_bytes)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """See Device."""
        if self._pinned.holds(memory):
            return
        stale = self._pinned.stale(memory)
        if stale:  # what was mapped there is gone, or this is it by another size
            if not self._drain(_CLOSE_SECONDS):
                raise ConfigError(
                    f"{self.name} still copies to or from memory that is mapped anew; start the "
                    f"engine again if it goes on"
                )
            self._pinned.drop(stale)
        self._pinned.add(memory)

    def host_fence(self) -> CudaFence:
        """See Device. A fence of the stream that the calling thread computes on."""
        return CudaFence(self.driver.caller())

    def hold(self, fence: Fence, timeout: float) -> bool:
        """See Device. The stream that the calling thread computes on waits."""
        if not isinstance(fence, CudaFence):
            return fence.wait(timeout)
        if fence.error is not None:
            raise fence.error
        self.driver.hold(fence.event)
        return True

    def gather(self, stream: Stream, copies: Sequence[Copy], after: Sequence[Fence]) -> Fence:
        """See Device. Raises MisuseError for what does not match, and enqueues nothing then."""
        mine = self._mine(stream)
        (planned,) = self._planned([copies])
        for fence in after:
            mine.wait(fence)
        (fence,) = self._moved(mine, "store", [planned], into_slot=True)
        return fence

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """See Device. Raises MisuseError for what does not match, and enqueues nothing then."""
        mine = self._mine(stream)
        each = self._planned(groups)
        for fence in after:
            mine.wait(fence)
        return self._moved(mine, "load", each, into_slot=False)

    def close(self) -> None:
        """See Device. Memory that work may still use after ten seconds stays pinned."""
        if all(stream.closed for stream in self._streams.values()):
            return
        for stream in self._streams.values():
            stream.closed = True
        if not self._drain(_CLOSE_SECONDS):
            _log.warning("%s may still copy at close; its memory stays pinned", self.name)
            _HANGING.append(self)
            return
        self._pinned.drop()
        self.driver.close()

    def _drain(self, timeout: float) -> bool:
        """Say whether all copies have ended, after so many seconds at most."""
        until = monotonic() + timeout
        try:
            # Not record(): this may be another thread than a stream's, whose turns these would end.
            fences = [CudaFence(self.driver.record(one.handle)) for one in self._streams.values()]
        except Exception as error:  # noqa: BLE001  (of a GPU that is lost, most likely)
            _log.warning("%s does not say what it still copies: %s", self.name, error)
            return False
        for fence in fences:
            with contextlib.suppress(Exception):  # who holds the copy's own fence hears of it
                if not fence.wait(max(until - monotonic(), 0)):
                    return False
        return True

    def _mine(self, stream: Stream) -> CudaStream:
        if not any(stream is one for one in self._streams.values()):
            raise MisuseError("a CUDA device takes its own streams only")
        mine: CudaStream = stream  # type: ignore[assignment]  # it is one of them
        if mine.closed:
            raise MisuseError(f"{self.name} is closed")
        return mine

    def _planned(self, groups: Sequence[Sequence[Copy]]) -> list[list[Spread]]:
        """Return the runs of groups, all of whose slots are pinned."""
        each = spreads(groups)
        wholes = {id(one.whole): one.whole for one in chain.from_iterable(each)}
        for spread in wholes.values():
            low, high = spread.reach()
            if not self._pinned.covers(low, high):
                raise MisuseError(
                    f"slots at {low:#x} to {high:#x} are not in one memory that this device has "
                    "pinned: call its pin() with the arena's memory first"
                )
        return each

    def _moved(
        self, stream: CudaStream, role: Role, each: Sequence[Sequence[Spread]], *, into_slot: bool
    ) -> list[Fence]:
        """Enqueue groups of runs; return a fence for each.

        Where the driver refuses something, what was enqueued before is under way: so this is told
        by the fence of that group, and of those behind it, which are not enqueued.
        """
        fences: list[Fence] = []
        try:
            with self._tables(stream, each, into_slot=into_slot) as tables:
                for planned in each:
                    self._move(stream, role, planned, tables, into_slot=into_slot)
                    fences.append(stream.record())
        except Exception as error:  # noqa: BLE001  (a copy's fault is told by its fence)
            return [*fences, *[stream.record(error)] * (len(each) - len(fences))]
        return fences

    def _move(
        self,
        stream: CudaStream,
        role: Role,
        planned: Sequence[Spread],
        tables: Tables,
        *,
        into_slot: bool,
    ) -> None:
        """Enqueue runs, on the way that is best for them."""
        choice = self.way
        if choice is None:
            total, count = (sum(one.total for one in planned), sum(one.count for one in planned))
            choice = self._choose(role, total, count)
        for spread in planned:
            if choice.way == "batch":
                self._batch(stream, joined(spread.expanded(stream.room)), into_slot=into_slot)
            elif choice.way == "direct" or not self._stages(
                stream, spread, tables, into_slot=into_slot
            ):
                self._launch(stream, spread, choice.grid, tables, into_slot=into_slot)

    def _batch(self, stream: CudaStream, runs: Runs, *, into_slot: bool) -> None:
        some_runs = len(runs) > TABLE_RUNS
        each = map(runs.some, _parts(len(runs), TABLE_RUNS)) if some_runs else [runs]
        for some in each:
            with stream.turn() as turn:  # whose table is kept: it may be read after the call
                table = turn.table(some.ends(into_slot=into_slot))
                self.driver.batch(stream.handle, table.reshape(_ROWS, -1))

    def _launch(
        self, stream: CudaStream, spread: Spread, grid: int, tables: Tables, *, into_slot: bool
    ) -> None:
        """Copy by the kernel, planes of what other groups have others of by one table for all."""
        whole, known = spread.whole, tables.direct
        if whole is not spread and id(whole) not in known:
            cut = whole.cut()
            lent = tables.lend(cut)
            known[id(whole)] = lent and partial(lent, range(len(cut.runs)))
        launch = known.get(id(whole))
        if launch is not None:
            with stream.turn():  # it is an operation in flight, as each is
                launch(planes_of(spread), grid)
            return
        spread = spread.cut()
        for planes, runs in product(
            _parts(len(spread.planes[0]), TABLE_PLANES), _parts(len(spread.runs), TABLE_RUNS)
        ):
            part = Spread(spread.planes[:, planes], spread.runs.some(runs))
            with self._uploaded(stream, part, into_slot=into_slot) as launched:
                launched(range(len(part.runs)), range(len(part.planes[0])), grid)

    def _tables(
        self, stream: CudaStream, planned: Sequence[Sequence[Spread]], *, into_slot: bool
    ) -> Tables:
        """Return the tables of a call, which leave two turns: an operation takes no more."""
        upload = partial(self._uploaded, stream, into_slot=into_slot)
        return Tables(planned, stream.in_flight - 2, upload)

    @contextlib.contextmanager
    def _uploaded(self, stream: CudaStream, spread: Spread, *, into_slot: bool) -> Iterator[Launch]:
        """Enqueue a table; give what launches the kernel on some runs and planes, on a grid.

        A turn has room for so many runs and planes.
        """
        count, row = len(spread.planes[0]), len(spread.runs)
        with stream.turn() as turn:
            table = turn.table(spread.rows(into_slot=into_slot))
            there, item = turn.upload(self.driver, stream.handle, table), table.itemsize

            def launch(runs: range, planes: range, grid: int) -> None:
                begins = there + planes.start * item
                first = there + (2 * count + runs.start) * item
                work = Work(begins, first, len(planes), len(runs), count, row)
                self.driver.launch(stream.handle, work, min(grid, len(planes) * len(runs)))

            yield launch

    def _stages(
        self, stream: CudaStream, spread: Spread, tables: Tables, *, into_slot: bool
    ) -> bool:
        """Copy through the GPU's own memory: the kernel there, the copy engine over the link.

        All is on one stream, so that one staging buffer is enough: in it nothing meets.
        False, and nothing is enqueued, for many short pieces.
        """
        whole = spread.whole
        if id(whole) not in tables.staged:
            tables.staged[id(whole)] = Staged(whole)
        staged = tables.staged[id(whole)]
        pieces = staged.pieces(len(spread.planes[0]))
        if pieces > _FEW_COPIES and spread.total < pieces * LINK_BYTES:
            return False
        if whole is not spread and id(whole) not in tables.grouped:
            tables.grouped[id(whole)] = self._grouped(stream, staged, tables.groups(whole), tables)
        shared = tables.grouped.get(id(whole))
        if shared is not None:
            (stage, launch), planes = shared, planes_of(spread)
            mine = stage.lots[planes.start]
            with stream.turn():  # it is an operation in flight, as each is
                self._lots(stream, mine, stage.step, planes, launch, into_slot=into_slot)
            return True
        if whole is not spread:
            staged = Staged(spread)
        for stage in staged.stages(*self._place(stream), TABLE_PLANES, TABLE_RUNS):
            first, planes = 0, range(len(stage.inner.planes[0]))
            for lots in _few(stage.lots[0], TABLE_RUNS):
                runs = stage.inner.runs.some(slice(first, lots[-1].stop))
                inner = Spread(stage.inner.planes, runs)
                with self._uploaded(stream, inner, into_slot=into_slot) as launch:
                    self._lots(stream, lots, stage.step, planes, launch, first, into_slot=into_slot)
                first = lots[-1].stop
        return True

    def _place(self, stream: CudaStream) -> tuple[int, int]:
        """Return where copies of a stream are staged, and how many bytes of them."""
        return self._staging[stream].address, self._staging_bytes

    def _grouped(
        self, stream: CudaStream, staged: Staged, groups: Sequence[range], tables: Tables
    ) -> tuple[Stage, Launch] | None:
        """Return how groups of planes are staged by one table; None where that cannot be."""
        stage = staged.grouped(groups, *self._place(stream), TABLE_RUNS)
        lent = stage and tables.lend(stage.inner)
        return stage and lent and (stage, lent)

    def _lots(
        self,
        stream: CudaStream,
        lots: Sequence[Lot],
        step: int,
        planes: range,
        launch: Launch,
        first: int = 0,
        *,
        into_slot: bool,
    ) -> None:
        """Copy lots on some planes, that lie `step` bytes apart in slots.

        launch: by their table, whose first run is number `first`.
        """
        at = 0
        for lot in lots:
            runs, at = range(at, lot.stop - first), lot.stop - first
            if into_slot:
                launch(runs, planes, self.driver.processors)
            self._link(stream, lot.whole, into_slot=into_slot)
            for ends in () if lot.parts is None else lot.parts.each(into_slot=into_slot):
                self.driver.copy(stream.handle, *ends, len(planes), step)
            if not into_slot:
                launch(runs, planes, self.driver.processors)

    def _link(self, stream: CudaStream, runs: Runs, *, into_slot: bool) -> None:
        """Copy over the link, by few calls: each is the caller's time."""
        if self.driver.batches and len(runs) > _SINGLE_COPIES:
            self._batch(stream, runs, into_slot=into_slot)
            return
        for ends in runs.each(into_slot=into_slot):
            self.driver.copy(stream.handle, *ends)


def _parts(count: int, most: int) -> list[slice]:
    """Return so many in parts of at most so many."""
    return [slice(at, at + most) for at in range(0, count, most)]


def _few(lots: Sequence[Lot], most: int) -> Iterator[Sequence[Lot]]:
    """Yield consecutive lots that have at most so many runs in all."""
    at = first = 0
    while at < len(lots):
        stop = at + 1
        while stop < len(lots) and lots[stop].stop - first <= most:
            stop += 1
        yield lots[at:stop]
        at, first = stop, lots[stop - 1].stop
