"""The driver of a real GPU: torch owns streams, events and memory; CuPy launches the kernel.

Not one line of it has run on a GPU yet. It is short, and holds nothing but the driver's calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.cuda import CudaDevice
from kvtier.device.descriptors import Numbers
from kvtier.device.driver import Event, Work
from kvtier.device.nvrtc import Nvrtc, cubin, default_folder
from kvtier.device.paths import Choice, kept_table
from kvtier.errors import ConfigError
from kvtier.gpus import gpu_node, torch_for_gpu
from kvtier.units import format_bytes

__all__ = ["TorchDriver", "cuda_device"]

_CHOOSE_CPU: Final = "the CPU is used only where you choose it: kvtier.device.cpu.CpuDevice"
_THREADS: Final = 512
_PORTABLE_MAPPED: Final = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_HOST_POINTERS: Final = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM; ANY ignores what a stream waits for
_BATCH_FIRST, _BATCH_NOW = 12080, 13000  # CUDA 12.8 and 13.0
_DEFAULT_KIND: Final = 4  # cudaMemcpyDefault: the addresses say which way


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h: the order of source accesses, hints of place, flags."""

    _fields_ = (
        ("order", ctypes.c_uint),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _TorchEvent:
    """See Event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        """See Event."""
        return bool(self.event.query())


class _TorchBuffer:
    """See Buffer."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.address = int(tensor.data_ptr())


class TorchDriver:
    """See Driver. index: of the GPU, as torch counts them.

    Raises ConfigError, with the remedy, where torch or CuPy or NVRTC is missing, where the driver
    is none or too old, and for a GPU that is not there or that NVRTC does not know.
    """

    def __init__(self, index: int = 0, folder: Path | None = None) -> None:
        torch = torch_for_gpu(index, _CHOOSE_CPU)
        self._torch, self._device = torch, torch.device("cuda", index)
        cupy = _cupy()
        properties = torch.cuda.get_device_properties(index)
        self.processors = int(properties.multi_processor_count)
        version = int(cupy.cuda.runtime.driverGetVersion())
        self.name = f"{properties.name}, CUDA {version // 1000}.{version % 1000 // 10}"
        with cupy.cuda.Device(index):
            if not cupy.cuda.runtime.deviceGetAttribute(_HOST_POINTERS, index):
                raise ConfigError(f"{self.name} cannot use the addresses of pinned host memory")
            compiler = Nvrtc(newest=version // 1000)  # or the driver may not take what it made
            architecture = properties.major * 10 + properties.minor
            made = cubin(architecture, folder or default_folder(), compiler)
            # CuPy may look into the file as late as at the first launch.
            self._cubin = tempfile.NamedTemporaryFile(suffix=".cubin")  # noqa: SIM115
            self._cubin.write(made)
            self._cubin.flush()
            self._kernel = cupy.RawModule(path=self._cubin.name).get_function("kvtier_copy")
        self._streams: dict[int, Any] = {}  # of CuPy, by the address of torch's
        self._external = partial(_external, cupy, index)
        self._here: Callable[[], Any] = lambda: cupy.cuda.Device(index)
        self._runtime = cupy.cuda.runtime
        self._batch = _batched_copies(version)
        self.batches = self._batch is not None
        self.node = gpu_node(cupy.cuda.runtime.deviceGetPCIBusId(index))

    def stream(self) -> Any:
        """See Driver."""
        return self._torch.cuda.Stream(self._device)

    def record(self, stream: Any) -> Event:
        """See Driver."""
        event = self._torch.cuda.Event()
        event.record(stream)
        return _TorchEvent(event)

    def wait(self, stream: Any, event: Event) -> None:
        """See Driver."""
        if not isinstance(event, _TorchEvent):
            raise ConfigError(f"{event!r} is no event of torch")
        stream.wait_event(event.event)

    def caller(self) -> Event:
        """See Driver."""
        return self.record(self._torch.cuda.current_stream(self._device))

    def hold(self, event: Event) -> None:
        """See Driver."""
        self.wait(self._torch.cuda.current_stream(self._device), event)

    def own(self, tensor: Any) -> Any:
        """See Driver."""
        where = getattr(tensor, "device", None)
        if where != self._device:
            raise ConfigError(
                f"a CUDA device for {self._device} needs KV tensors that are there, not "
                f"{'a ' + type(tensor).__name__ if where is None else f'on {where}'}"
            )
        return tensor.detach()

    def memory(self, nbytes: int, stream: Any) -> _TorchBuffer:
        """See Driver."""
        with self._torch.cuda.stream(stream):  # its allocator hands it to no other stream's work
            tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        return _TorchBuffer(tensor)

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """See Driver."""
        pinned = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        found: NDArray[np.uint8] = pinned.numpy()
        return found

    def pin(self, address: int, nbytes: int) -> None:
        """See Driver."""
        try:
            with self._here():
                self._runtime.hostRegister(address, nbytes, _PORTABLE_MAPPED)
        except self._runtime.CUDARuntimeError as error:
            raise ConfigError(
                f"CUDA does not pin {format_bytes(nbytes)} of host memory: {error}; make the dram "
                "tier smaller, or raise the limit: ulimit -l, or LimitMEMLOCK= in the systemd "
                "unit. Memory that is not pinned is never used in its place"
            ) from error

    def unpin(self, address: int) -> None:
        """See Driver."""
        self._runtime.hostUnregister(address)

    def copy(self, stream: Any, to: int, of: int, nbytes: int) -> None:
        """See Driver."""
        with self._here():
            self._runtime.memcpyAsync(to, of, nbytes, _DEFAULT_KIND, stream.cuda_stream)

    def batch(self, stream: Any, table: Numbers) -> None:
        """See Driver."""
        if self._batch is None:
            raise ConfigError("this driver has no batched copies")
        with self._here():
            status = self._batch(table[0], table[1], table[2], stream.cuda_stream)
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync of {table.shape[1]} runs: CUDA error {status}")

    def launch(self, stream: Any, work: Work, grid: int) -> None:
        """See Driver."""
        where = stream.cuda_stream
        if where not in self._streams:
            self._streams[where] = self._external(where)
        with self._here(), self._streams[where]:
            tables = map(np.uint64, (work.begins, work.table))
            counts = map(np.uint32, (work.planes, work.runs, work.row))
            self._kernel((grid,), (_THREADS,), (*tables, *counts))

    def close(self) -> None:
        """See Driver. What torch owns goes with its last reference."""
        self._cubin.close()


def cuda_device(
    index: int = 0, way: Choice | None = None, *, folder: Path | None = None
) -> CudaDevice:
    """Return the device of a GPU; the ways of its copies as `kvtier doctor --device` measured them.

    folder: of cubins and measured tables; by default this user's cache. Raises ConfigError as
    ``TorchDriver`` does: it never falls back to the CPU.
    """
    driver = TorchDriver(index, folder)
    return CudaDevice(driver, kept_table(folder or default_folder(), driver.name), way)


def _cupy() -> Any:
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError("a CUDA device needs CuPy: pip install 'kvtier[cuda]'")
    import cupy

    return cupy


class _Foreign:
    """A stream of another library, as CuPy takes one: by NVIDIA's CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._address)


def _external(cupy: Any, index: int, address: int) -> Any:
    """Return CuPy's view of a stream: its 14 has a new way to it, and warns of the old one."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(address))
    return cupy.cuda.ExternalStream(address, index)


def _batched_copies(version: int) -> Callable[[Numbers, Numbers, Numbers, int], int] | None:
    """Return cuMemcpyBatchAsync of a driver; None before 12.8. In 13.0 its signature changed."""
    asked = next((one for one in (_BATCH_NOW, _BATCH_FIRST) if version >= one), None)
    if asked is None:
        return None
    try:
        look = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    entry, status = ctypes.c_void_p(), ctypes.c_int()
    names = (b"cuMemcpyBatchAsync", ctypes.byref(entry), asked)
    if look(*names, ctypes.c_uint64(0), ctypes.byref(status)) or not entry.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    failed = (pointer,) if asked == _BATCH_FIRST else ()  # which copy has failed
    arguments = (pointer, pointer, pointer, size, pointer, pointer, size, *failed, pointer)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(entry.value)

    def call(to: Numbers, of: Numbers, nbytes: Numbers, stream: int) -> int:
        attributes, first, which = _Attributes(order=_STREAM_ORDER), size(0), size()
        rows = (to.ctypes.data, of.ctypes.data, nbytes.ctypes.data, len(nbytes))
        for_all = (ctypes.addressof(attributes), ctypes.addressof(first), 1)
        told = (ctypes.addressof(which),) if failed else ()
        return int(function(*rows, *for_all, *told, stream))

    return call
