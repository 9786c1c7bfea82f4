"""What a driver refuses halfway: told by a fence, after all that was enqueued before has ended."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing

import numpy as np
import pytest

from kvtier.device import cuda as module
from kvtier.device.base import Copy
from kvtier.device.cpu import CpuFence
from kvtier.device.cuda import CudaDevice
from kvtier.device.paths import DEFAULT, PATHS, Choice
from kvtier.device.turns import CudaFence
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.layouts import by_planes
from kvtier.transfer import CopyStatus, CopyTransfer

SECONDS = 10.0
PLANES, BYTES = 6, 48
every_way = pytest.mark.parametrize("way", PATHS)


class Refuses(CpuDriver):
    """A driver that takes so many batched copies and launches, and then none any more."""

    def __init__(self, takes: int) -> None:
        super().__init__()
        self._left = takes

    def batch(self, stream, table):
        self._take()
        super().batch(stream, table)

    def launch(self, stream, work, grid):
        self._take()
        super().launch(stream, work, grid)

    def _take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the driver refuses it")


def made(way, driver, **options):
    return CudaDevice(driver, DEFAULT, Choice(way, 3), **{"staging_bytes": 1 << 12, **options})


def pages() -> np.ndarray:
    shape = (PLANES, 20, BYTES)
    return np.random.default_rng(0).integers(0, 200, shape, np.uint8)


def halves(kv, slots):
    """Return two copies of more planes or fewer, so that each is an operation for itself."""
    return [Copy(kv[:2], (1, 5), slots[:2]), Copy(kv[2:], (2, 7), slots[2:])]


@every_way
def test_half_of_a_store_is_told_when_that_half_has_landed(way):
    kv, slots, gate = pages(), np.zeros((PLANES, 2, BYTES), np.uint8), CpuFence()
    with closing(made(way, Refuses(1))) as device:
        device.pin(slots)
        stream = device.stream("store")
        fence = device.gather(stream, halves(kv, slots), [CudaFence(gate)])
        assert not fence.done(), "what was enqueued is not over"
        assert not fence.wait(0)
        gate.settle()
        outcome = CopyTransfer([fence], 8, (1, 5, 2, 7)).result(SECONDS)
        assert (outcome.status, outcome.tokens) == (CopyStatus.FAILED, 0)
        assert "the driver refuses it" in outcome.cause
        assert outcome.failed_blocks == (1, 5, 2, 7)
        assert np.array_equal(slots[:2], kv[:2, [1, 5]]), "and nothing lands behind its fence"
        assert not slots[2:].any()


def test_told_at_once_the_slot_would_be_written_under_its_next_owner(monkeypatch):
    """The twin: an error that does not wait for what came before it."""

    def done(fence):
        if fence.error is not None:
            raise fence.error
        return fence.event.done()

    monkeypatch.setattr(CudaFence, "done", done)
    kv, slots, gate = pages(), np.zeros((PLANES, 2, BYTES), np.uint8), CpuFence()
    with closing(made("batch", Refuses(1))) as device:
        device.pin(slots)
        fence = device.gather(device.stream("store"), halves(kv, slots), [CudaFence(gate)])
        assert CopyTransfer([fence], 8, ()).poll()
        slots[:] = 250  # it has failed, so its slot is another's
        gate.settle()
    assert not (slots == 250).all()


@every_way
def test_groups_before_the_one_that_is_refused_have_landed_and_those_behind_it_never(way):
    kv, slots = pages(), np.full((PLANES, 2, BYTES), 201, np.uint8)
    before = kv.copy()
    with closing(made(way, Refuses(1))) as device:
        device.pin(slots)
        groups = by_planes([Copy(kv, (1, 5), slots)], 3)
        first, *others = device.scatter(device.stream("load"), groups, ())
        assert first.wait(SECONDS)
        assert len(others) == 2
        for fence in others:
            with pytest.raises(RuntimeError, match="refuses"):
                fence.wait(SECONDS)
            with pytest.raises(RuntimeError, match="refuses"):
                device.hold(fence, SECONDS)
            with pytest.raises(RuntimeError, match="refuses"):
                device.gather(device.stream("store"), [], [fence])
    assert (kv[:2, [1, 5]] == 201).all()
    assert np.array_equal(kv[2:], before[2:])


@every_way
def test_what_was_lent_to_an_operation_that_is_refused_is_lent_again(way):
    kv, slots, driver = pages(), np.zeros((PLANES, 2, BYTES), np.uint8), Refuses(0)
    with closing(made(way, driver, in_flight=2)) as device:
        device.pin(slots)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="refuses"):
                device.gather(device.stream("store"), halves(kv, slots), ()).wait(SECONDS)
        driver._left = 100
        assert device.gather(device.stream("store"), halves(kv, slots), ()).wait(SECONDS)
    assert np.array_equal(slots[2:], kv[2:, [2, 7]])


@every_way
def test_an_operation_that_failed_is_over_for_those_behind_it(way):
    """Its event raises, and it is asked when what was lent to it is to be lent again."""
    kv, slots, failed = pages(), np.zeros((PLANES, 2, BYTES), np.uint8), CpuFence()
    failed.settle(RuntimeError("the kernel failed"))
    with closing(made(way, CpuDriver(), in_flight=2)) as device:
        device.pin(slots)
        stream = device.stream("store")
        fence = device.gather(stream, halves(kv, slots), [CudaFence(failed)])
        with pytest.raises(RuntimeError, match="kernel failed"):
            fence.wait(SECONDS)
        assert not slots.any()
        assert device.gather(stream, halves(kv, slots), ()).wait(SECONDS)
    assert np.array_equal(slots[2:], kv[2:, [2, 7]])


def kept_after_close(monkeypatch) -> bool:
    """Close a device that hangs; say whether its tables are there when nobody has it any more."""
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    driver, gate, slots = CpuDriver(), CpuFence(), np.zeros((PLANES, 2, BYTES), np.uint8)
    device = made("direct", driver, in_flight=2)
    device.pin(slots)
    fence = device.gather(device.stream("store"), halves(pages(), slots), [CudaFence(gate)])
    device.close()
    alive = weakref.ref(device)
    del device
    gc.collect()
    kept = alive() is not None
    gate.settle(RuntimeError("it never goes on"))  # or it would read what may be gone
    with pytest.raises(RuntimeError, match="never goes on"):
        fence.wait(SECONDS)
    driver.close()
    return kept


def test_what_hangs_at_close_keeps_the_tables_that_it_will_read(monkeypatch):
    monkeypatch.setattr(module, "_HANGING", [])
    assert kept_after_close(monkeypatch)
    assert len(module._HANGING) == 1


def test_forgotten_they_would_be_given_to_others(monkeypatch):
    """The twin: torch lends pinned memory anew that nobody refers to."""

    class Forgets(list):
        def append(self, _):
            pass

    monkeypatch.setattr(module, "_HANGING", Forgets())
    assert not kept_after_close(monkeypatch)


class Lost(CpuDriver):
    """A GPU that is lost: all that it is asked of events raises, as CUDA's lasting errors do."""

    lost = False

    def record(self, stream):
        event = super().record(stream)
        return self if self.lost else event

    def done(self):
        raise RuntimeError("an illegal memory access was encountered")


def test_a_gpu_that_is_lost_is_closed_and_its_memory_let_go():
    driver, slots = Lost(), np.zeros((PLANES, 2, BYTES), np.uint8)
    device = made("direct", driver)
    device.pin(slots)
    driver.lost = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.gather(device.stream("store"), halves(pages(), slots), ()).wait(SECONDS)
    device.close()
    assert driver.pinned == {}


def test_of_a_gpu_that_tells_of_nothing_any_more_all_is_kept(monkeypatch, caplog):
    """Who closes it goes on: a cache still has its own to let go."""
    monkeypatch.setattr(module, "_HANGING", [])
    driver, slots = CpuDriver(), np.zeros((PLANES, 2, BYTES), np.uint8)

    def lost(_):
        raise RuntimeError("an illegal memory access was encountered")

    device = made("direct", driver)
    device.pin(slots)
    monkeypatch.setattr(driver, "record", lost)
    device.close()
    assert driver.pinned == {slots.ctypes.data: slots.nbytes}
    assert [device] == module._HANGING
    assert "illegal memory access" in caplog.text
    driver.close()
