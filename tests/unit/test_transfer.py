"""Transfers: a wait that ends early settles nothing, a fault is a value, awaiting works."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Self

import pytest

from kvtier import transfer as module
from kvtier.device.cpu import CpuFence
from kvtier.seams import Future
from kvtier.transfer import CopyResult, CopyStatus, CopyTransfer, FetchTransfer

SECONDS = 10.0
OK, FAILED, TIMEOUT = CopyStatus.OK, CopyStatus.FAILED, CopyStatus.TIMEOUT


def started(count: int = 2) -> tuple[list[CpuFence], CopyTransfer]:
    fences = [CpuFence() for _ in range(count)]
    return fences, CopyTransfer(fences, 64, (3, 4, 5, 6))


def test_a_wait_that_times_out_settles_nothing():
    fences, transfer = started()
    assert not transfer.poll()
    assert transfer.result(0) == CopyResult(TIMEOUT)
    fences[0].settle()
    assert not transfer.poll()
    assert transfer.result(0.001) == CopyResult(TIMEOUT)
    fences[1].settle()
    assert transfer.poll()
    assert transfer.result(0) == transfer.result(SECONDS) == CopyResult(OK, 64)


def test_a_fault_is_a_value_and_names_the_blocks():
    fences, transfer = started()
    fences[0].settle(OSError("bus"))
    assert not transfer.poll(), "the other copies still run: nothing may be given back"
    assert transfer.result(0).status is TIMEOUT
    fences[1].settle(ValueError("later"))
    assert transfer.poll()
    assert transfer.result(0) == CopyResult(FAILED, 0, (3, 4, 5, 6), "OSError: bus")


def test_the_groups_share_one_time_limit(monkeypatch):
    """Each group is done just within the limit; all together are not."""
    now = [0.0]

    class Late(CpuFence):
        def wait(self, timeout: float) -> bool:
            took = min(timeout, 0.9)
            now[0] += took
            return took == 0.9

    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    assert CopyTransfer([Late() for _ in range(4)], 64, ()).result(1.0).status is TIMEOUT
    assert now[0] <= 1.0


def test_no_groups_are_settled():
    assert CopyTransfer((), 0, ()).result(0) == CopyResult(OK)


def test_awaiting_gives_the_outcome():
    async def main() -> tuple[CopyResult, CopyResult]:
        fences, transfer = started()
        waiting = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        assert not waiting.done()
        for fence in fences:
            fence.settle()
        broken = CpuFence()
        broken.settle(OSError("bus"))
        return await waiting, await CopyTransfer((broken,), 64, (1,))

    good, bad = asyncio.run(main())
    assert good == CopyResult(OK, 64)
    assert (bad.status, bad.failed_blocks) == (FAILED, (1,))


def test_a_cancelled_await_settles_nothing():
    async def main() -> None:
        fences, transfer = started()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await transfer
        assert not transfer.poll()
        for fence in fences:
            fence.settle()
        assert (await transfer).status is OK

    asyncio.run(main())


# ----------------------------------------------------------------------------------------- fetch


class Leased:
    """Stands for a Lease: it only tells whether it was released."""

    released = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.released += 1


def test_a_fetch_is_polled_waited_for_and_told():
    running, told = Future(), []
    transfer = FetchTransfer(running)
    transfer.on_settled(lambda: told.append(1))
    assert not transfer.poll()
    assert transfer.result(0) is None
    assert not told
    lease = Leased()
    running.set_result(lease)
    assert transfer.poll()
    assert transfer.result(0) is lease
    assert told == [1]
    assert not lease.released


def test_a_fetch_that_was_cancelled_with_its_loop_is_a_miss():
    running = Future()
    running.cancel()
    transfer = FetchTransfer(running)
    assert transfer.result(0) is None
    transfer.abandon()

    async def main() -> object:
        return await transfer

    assert asyncio.run(main()) is None


def test_what_an_abandoned_fetch_brings_is_released():
    early, late = Future(), Future()
    leases = [Leased(), Leased()]
    early.set_result(leases[0])
    for running in (early, late):
        FetchTransfer(running).abandon()
    late.set_result(leases[1])
    assert [lease.released for lease in leases] == [1, 1]
    for outcome in (None, RuntimeError("bug")):
        running = Future()
        FetchTransfer(running).abandon()
        running.set_exception(outcome) if outcome else running.set_result(None)


def test_a_bug_in_a_fetch_is_a_miss_with_its_trace_in_the_log(caplog):
    running = Future()
    running.set_exception(RuntimeError("bug"))
    assert FetchTransfer(running).result(0) is None
    assert "bug" in caplog.text


def test_awaiting_a_fetch_gives_its_lease():
    lease, running = Leased(), Future()

    async def main() -> object:
        waiting = asyncio.ensure_future(FetchTransfer(running))
        await asyncio.sleep(0)
        threading.Timer(0, running.set_result, (lease,)).start()
        return await waiting

    assert asyncio.run(main()) is lease


def test_a_cancelled_await_leaves_the_fetch_alone():
    lease, running = Leased(), Future()

    async def main() -> object:
        transfer = FetchTransfer(running)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await transfer
        assert not running.cancelled()
        running.set_result(lease)
        return await transfer

    assert asyncio.run(main()) is lease


def test_chained_it_would_be_cancelled_and_its_lease_lost():
    """The twin: what awaiting the future itself does."""
    running = Future()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.wrap_future(running)

    asyncio.run(main())
    assert running.cancelled()


def test_waiting_for_a_fetch_is_bounded():
    began = time.monotonic()
    assert FetchTransfer(Future()).result(0.01) is None
    assert time.monotonic() - began < SECONDS
