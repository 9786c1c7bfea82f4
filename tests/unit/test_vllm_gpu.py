"""vLLM's connector where KV is on a GPU: what its copies wait for. No GPU is in it.

The device is the one that drives a GPU; its driver's streams are the CPU's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvtier.connectors import vllm_worker
from kvtier.connectors.vllm_worker import WorkerSide
from kvtier.copyplan import CopyPlan
from kvtier.device.cpu import CpuDevice, CpuFence, CpuStream
from kvtier.device.cuda import CudaDevice
from kvtier.device.paths import DEFAULT
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.hands import Hands
from kvtier.testing.vllm_steps import FULL, VllmSteps
from kvtier.transfer import CopyResult, CopyStatus

PROMPT = list(range(200))


class Later(VllmSteps):
    """vLLM on a GPU: a step's work is enqueued on a stream, and done later."""

    compute_stream: CpuStream
    driver: CpuDriver

    def compute(self, request: SimpleNamespace, start: int = 0) -> None:
        self.compute_stream.enqueue(partial(super().compute, request, start))


@pytest.fixture
def later(monkeypatch) -> Iterator[Later]:
    """The connector on a device that is driven as a GPU is, whose streams are the CPU's."""
    stream = Later.compute_stream = CpuStream("compute")

    def device_of(tensor: torch.Tensor) -> CudaDevice:
        assert tensor.dtype is torch.uint8
        Later.driver = CpuDriver(compute=stream)
        return CudaDevice(Later.driver, DEFAULT)

    monkeypatch.setattr(vllm_worker, "device_of", device_of)
    found = Later(FULL)
    yield found
    stream.close()
    found.close()


def saves_what_is_computed_late(later: Later, seconds: float) -> bool:
    """Say whether a save takes what a step computes that is not done when the save is enqueued.

    seconds: that the save is given to end too early.
    """
    gate = threading.Event()
    later.compute_stream.enqueue(lambda: assert_set(gate))
    first = later.serve("a", PROMPT, list(range(1, 14)))
    (save,) = later.worker._saves.values()
    early = save.result(seconds).status is CopyStatus.OK
    gate.set()
    later.settle()
    second = later.request("b", PROMPT)
    assert later.load(second, list(range(20, 33))) == {}
    return not early and later.holds(second, range(12), first)


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(20)


def test_on_a_gpu_a_save_waits_for_what_fills_its_blocks(later: Later):
    assert saves_what_is_computed_late(later, 0.05)
    assert set(later.driver.pinned)


def test_without_the_fence_it_takes_what_was_there_before(later: Later, monkeypatch):
    fence = CpuFence()
    fence.settle()
    monkeypatch.setattr(CudaDevice, "host_fence", lambda self: fence)
    assert not saves_what_is_computed_late(later, 20)


def test_what_copies_is_where_the_kv_is(monkeypatch):
    monkeypatch.setattr(vllm_worker, "cuda_device", lambda index: index)
    where = [torch.device("cuda:1"), torch.device("cuda", 0)]
    assert [vllm_worker.device_of(SimpleNamespace(device=one)) for one in where] == [1, 0]
    with closing(vllm_worker.device_of(torch.zeros(1))) as device:
        assert isinstance(device, CpuDevice)


def test_closing_waits_once_however_many_copies_hang(later: Later, monkeypatch):
    clock, waits = Hands(), []

    def hangs(seconds: float) -> CopyResult:
        waits.append(seconds)
        clock.now += seconds
        return CopyResult(CopyStatus.TIMEOUT)

    monkeypatch.setattr(vllm_worker, "monotonic", clock)
    for number in range(50):
        later.worker._saves[number] = SimpleNamespace(result=hangs, poll=lambda: False)
    later.worker.close()
    assert len(waits) == 50
    assert sum(waits) == pytest.approx(vllm_worker._SLOW_SECONDS)
    later.worker._saves.clear()


def test_a_plan_before_there_is_kv_fails(later: Later):
    plan = CopyPlan(1, 1, "save", 1, 0, ())
    worker = WorkerSide(later.place, SimpleNamespace(kv_cache_groups=[], num_blocks=0))
    assert worker._execute(plan) is None
    assert "before vLLM has shown its KV" in worker._causes[1]
