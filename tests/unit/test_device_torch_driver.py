"""What the driver of a GPU asks of torch and CuPy, by stand-ins for both; nothing runs on a GPU.

Their signatures are those of torch 2.11 and CuPy 14.2, as far as they are used.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.device import torch_driver as module
from kvtier.device.driver import Work
from kvtier.device.paths import Choice, Speed, Table
from kvtier.device.torch_driver import TorchDriver
from kvtier.errors import ConfigError

STREAM = 0x7FFF_0000_1000


class CUDARuntimeError(RuntimeError):
    """CuPy's."""


class Cupy:
    """CuPy, with a GPU that is not the current one. calls: what was asked for, in order."""

    __version__ = "14.2.0"

    def __init__(self, version=13000, host_pointers=1, threads=1024):
        self.calls, self.refuses, self.current = [], None, 0
        self._version, self._host_pointers, self._threads = version, host_pointers, threads
        self.cuda = SimpleNamespace(runtime=self, Device=self._device, Stream=self)
        self.CUDARuntimeError = CUDARuntimeError

    def _said(self, name, *arguments):
        self.calls.append((name, *arguments))
        if self.refuses == name:
            raise CUDARuntimeError(f"cudaError: {name}")

    @contextlib.contextmanager
    def _device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def driverGetVersion(self):  # noqa: N802
        return self._version

    def deviceGetAttribute(self, attribute, index):  # noqa: N802
        self._said("attribute", attribute, index)
        return self._host_pointers

    def deviceGetPCIBusId(self, index):  # noqa: N802
        return f"0000:{index:02X}:00.0"

    def setDevice(self, index):  # noqa: N802
        self._said("setDevice", index)

    def hostRegister(self, address, nbytes, flags):  # noqa: N802
        self._said("hostRegister", address, nbytes, flags, self.current)

    def hostUnregister(self, address):  # noqa: N802
        self._said("hostUnregister", address)

    def memcpyAsync(self, to, of, nbytes, kind, stream):  # noqa: N802
        self._said("memcpyAsync", to, of, nbytes, kind, stream)

    def memcpy2DAsync(self, to, to_pitch, of, of_pitch, width, height, kind, stream):  # noqa: N802
        pitches = (to, to_pitch, of, of_pitch)
        self._said("memcpy2DAsync", *pitches, width, height, kind, stream)

    def RawModule(self, *, path):  # noqa: N802
        self._said("load", Path(path).read_bytes(), self.current)
        return SimpleNamespace(get_function=lambda name: Kernel(self, name, self._threads))

    def from_external(self, stream):
        self._said("from_external", stream.__cuda_stream__(), self.current)
        return contextlib.nullcontext()


class Kernel:
    def __init__(self, cupy, name, threads):
        assert name == "kvtier_copy"
        self._cupy, self._threads = cupy, threads

    @property
    def max_threads_per_block(self):
        self._cupy._said("kernel")
        return self._threads

    def __call__(self, grid, block, arguments):
        types = tuple((type(one), int(one)) for one in arguments)
        self._cupy._said("launch", grid, block, types, self._cupy.current)


class Event:
    """torch's. on: the streams that it was recorded on, in order."""

    def __init__(self):
        self.on, self.ended = [], False

    def record(self, stream):
        self.on.append(stream)

    def query(self):
        return self.ended


class Stream:
    """torch's. waits: for which events, in order."""

    def __init__(self, device):
        self.device, self.waits, self.cuda_stream = device, [], STREAM

    def wait_event(self, event):
        self.waits.append(event)


class Cuda:
    """torch.cuda, and torch's own calls, on a stream for each GPU. made: tensors, and where."""

    def __init__(self):
        self.Event, self.Stream, self.uint8 = Event, Stream, torch.uint8
        self.device, self.cuda, self.made = torch.device, self, []
        self._current = {index: Stream(torch.device("cuda", index)) for index in range(2)}

    def get_device_properties(self, index):
        assert index == 1
        return SimpleNamespace(name="a GPU", multi_processor_count=132, major=9, minor=0)

    def current_stream(self, device):
        return self._current[device.index]

    @contextlib.contextmanager
    def stream(self, stream):
        before = self._current[stream.device.index]
        self._current[stream.device.index] = stream
        yield
        self._current[stream.device.index] = before

    def empty(self, nbytes, *, dtype, device=None, pin_memory=False):
        on = None if device is None else self.current_stream(device)
        self.made.append((nbytes, device, pin_memory, on))
        return torch.zeros(nbytes, dtype=dtype)


@pytest.fixture
def made(monkeypatch, tmp_path):
    def make(cupy, index=1, batch=None):
        monkeypatch.setattr(module, "torch_for_gpu", lambda *_: Cuda())
        monkeypatch.setattr(module, "_cupy", lambda: cupy)
        monkeypatch.setattr(module, "Nvrtc", lambda newest: f"of CUDA {newest}")
        monkeypatch.setattr(
            module, "cubin", lambda architecture, _folder, by: f"{architecture} {by}".encode()
        )
        monkeypatch.setattr(module, "batched_copies", lambda _version: batch)
        return TorchDriver(index, tmp_path)

    return make


def stream():
    return SimpleNamespace(cuda_stream=STREAM)


def test_the_kernel_is_loaded_when_the_driver_is_made_on_its_own_gpu(made):
    cupy = Cupy()
    driver = made(cupy)
    assert cupy.calls == [("attribute", 91, 1), ("load", b"90 of CUDA 13", 1), ("kernel",)]
    assert (driver.name, driver.processors) == ("a GPU, CUDA 13.0", 132)


def test_a_launch_has_the_kernels_types_and_the_streams_own_gpu(made):
    cupy = Cupy()
    driver = made(cupy)
    cupy.calls.clear()
    work = Work(begins=1 << 40, table=(1 << 40) + 16, planes=2, runs=5, all=3, row=7)
    for _ in range(2):
        driver.launch(stream(), work, 8)
    wide, narrow = np.uint64, np.uint32
    counts = tuple((narrow, count) for count in (2, 5, 3, 7))
    types = ((wide, 1 << 40), (wide, (1 << 40) + 16), *counts)
    launched = ("launch", (8,), (512,), types, 1)
    assert cupy.calls == [("from_external", (0, STREAM), 1), launched, launched]


def test_memory_is_registered_exactly_mapped_and_for_all_contexts(made):
    cupy = Cupy()
    driver = made(cupy)
    cupy.calls.clear()
    driver.pin(4096, 4097)
    driver.copy(stream(), 8192, 4096, 100)
    driver.copy(stream(), 8192, 4096, 100, 5, 256)
    driver.unpin(4096)
    portable_mapped, which_way_by_address = 3, 4
    assert cupy.calls == [
        ("hostRegister", 4096, 4097, portable_mapped, 1),
        ("memcpyAsync", 8192, 4096, 100, which_way_by_address, STREAM),
        ("memcpy2DAsync", 8192, 256, 4096, 256, 100, 5, which_way_by_address, STREAM),
        ("hostUnregister", 4096),
    ]


def test_a_batched_copy_has_a_context_on_any_thread(made):
    cupy = Cupy()
    driver = made(cupy)
    cupy.calls.clear()
    driver.copies = lambda *given: cupy._said("batch", given[3]) or 0
    driver.batch(stream(), np.zeros((3, 2), np.uint64))
    assert cupy.calls == [("setDevice", 1), ("batch", STREAM)]
    driver.copies = lambda *_: 201
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync of 2 runs: CUDA error 201"):
        driver.batch(stream(), np.zeros((3, 2), np.uint64))


# -------------------------------------------------------------------------------- torch's calls

MINE = torch.device("cuda", 1)


def test_streams_are_new_ones_of_the_drivers_own_gpu(made):
    driver = made(Cupy())
    first, second = driver.stream(), driver.stream()
    assert first is not second
    assert first.device == second.device == MINE


def test_each_moment_has_an_event_of_its_own_that_is_recorded_once(made):
    driver = made(Cupy())
    stream, other = driver.stream(), driver.stream()
    before, after = (driver.record(one) for one in (stream, other))
    assert (before.event.on, after.event.on) == ([stream], [other])
    assert not before.done()
    before.event.ended = True
    assert before.done()
    assert not after.done()


def test_a_stream_waits_for_an_event_and_for_nothing_else(made):
    driver = made(Cupy())
    stream, event = driver.stream(), driver.record(driver.stream())
    driver.wait(stream, event)
    assert stream.waits == [event.event]
    with pytest.raises(ConfigError, match="is no event of torch"):
        driver.wait(stream, SimpleNamespace(done=lambda: True))


def test_what_the_caller_computes_is_what_its_current_stream_has(made):
    driver = made(Cupy())
    engines = Stream(MINE)
    with driver._torch.cuda.stream(engines):
        assert driver.caller().event.on == [engines]
        event = driver.record(driver.stream())
        driver.hold(event)
    assert engines.waits == [event.event]


def test_memory_is_the_streams_own_and_the_hosts_is_pinned(made):
    driver = made(Cupy())
    stream = driver.stream()
    buffer, host = driver.memory(100, stream), driver.host(200)
    assert driver._torch.made == [(100, MINE, False, stream), (200, None, True, None)]
    assert buffer.address == buffer._tensor.data_ptr()
    assert (host.nbytes, host.dtype) == (200, np.uint8)


def test_where_a_gpu_is_on_the_bus_says_which_memory_is_near(made, monkeypatch):
    monkeypatch.setattr(module, "gpu_node", {"0000:01:00.0": 3}.get)
    assert made(Cupy()).node == 3


def test_batched_copies_are_had_where_the_driver_has_them(made):
    assert not made(Cupy()).batches
    assert made(Cupy(), batch=lambda *_: 0).batches
    with pytest.raises(ConfigError, match="has no batched copies"):
        made(Cupy()).batch(stream(), np.zeros((3, 2), np.uint64))


def test_the_device_chooses_by_what_was_measured_for_its_gpu(made, monkeypatch, tmp_path):
    driver = made(Cupy())
    monkeypatch.setattr(module, "TorchDriver", lambda _index, _folder: driver)
    choice = Choice("direct", 5)
    for gpu, found in (("another GPU", Choice("staged")), (driver.name, choice)):
        Table(gpu, (Speed("store", 4096, 64, choice, 40.0),)).keep(tmp_path)
        device = module.cuda_device(1, folder=tmp_path)
        assert device._choose("store", 64 * 4096, 64) == found


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        (torch.zeros(3), "on cpu"),
        (torch.zeros(3, device="meta"), "on meta"),
        (SimpleNamespace(device=torch.device("cuda", 0)), "on cuda:0"),
        ([1, 2], "a list"),
    ],
    ids=["cpu", "meta", "another GPU", "no tensor"],
)
def test_tensors_of_elsewhere_are_refused_when_they_are_registered(made, tensor, where):
    driver = made(Cupy())
    with pytest.raises(ConfigError, match=rf"for cuda:1 needs KV tensors .* not {where}"):
        driver.own(tensor)


def test_pinned_memory_that_the_system_refuses_is_told_with_its_remedy(made):
    cupy = Cupy()
    driver = made(cupy)
    cupy.refuses = "hostRegister"
    with pytest.raises(ConfigError, match=r"does not pin 1 MiB of host .*: ulimit -l.* never used"):
        driver.pin(4096, 1 << 20)


def test_memory_that_cuda_does_not_let_go_is_told_and_no_error(made, caplog):
    cupy = Cupy()
    driver = made(cupy)
    cupy.refuses = "hostUnregister"
    with caplog.at_level(logging.WARNING, "kvtier"):
        driver.unpin(4096)
    assert "does not let memory at 0x1000 go" in caplog.text


@pytest.mark.parametrize("call", ["attribute", "load", "kernel"])
def test_a_driver_too_old_for_this_cupy_is_told_when_the_device_is_made(made, call):
    cupy = Cupy(version=12040)
    cupy.refuses = call
    with pytest.raises(
        ConfigError, match=r"CuPy 14.2.0 cannot use a GPU, CUDA 12.4: .*such as cupy-cuda12x"
    ):
        made(cupy)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"host_pointers": 0}, "cannot use the addresses of pinned host memory"),
        ({"threads": 256}, "takes 256 threads of the copy kernel, not 512"),
    ],
)
def test_a_gpu_that_cannot_do_it_is_refused_when_the_device_is_made(made, lacks, said):
    with pytest.raises(ConfigError, match=said):
        made(Cupy(**lacks))
