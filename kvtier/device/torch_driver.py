"""The driver of a real GPU: torch owns streams, events and memory; CuPy launches the kernel.

Not one line of it has run on a GPU yet. It is short, and holds nothing but the driver's calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
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

_CHOOSE_CPU: Final = "the CPU is used only where you choose it: kvtier.device.cpu.CpuDevice"
_THREADS: Final = 512
_PORTABLE_MAPPED: Final = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_HOST_POINTERS: Final = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM; ANY ignores what a stream waits for
_BATCH_FIRST, _BATCH_NOW = 12080, 13000  # CUDA 12.8 and 13.0
_DEFAULT_KIND: Final = 4  # cudaMemcpyDefault: the addresses say which way
_log = logging.getLogger("kvtier")


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

    version: of CUDA, as its driver says it: 13000. copies: what enqueues batched ones, if any.
    Raises ConfigError, with the remedy, where torch or CuPy or NVRTC is missing, where the driver
    is none or too old, and for a GPU that is not there or that NVRTC does not know.
    """

    def __init__(self, index: int = 0, folder: Path | None = None) -> None:
        torch = torch_for_gpu(index, _CHOOSE_CPU)
        self._torch, self._device = torch, torch.device("cuda", index)
        cupy = _cupy()
        properties = torch.cuda.get_device_properties(index)
        self.processors = int(properties.multi_processor_count)
        self._index, self._runtime = index, cupy.cuda.runtime
        version = int(self._runtime.driverGetVersion())
        self.name = f"{properties.name}, CUDA {version // 1000}.{version % 1000 // 10}"
        self._here: Callable[[], Any] = lambda: cupy.cuda.Device(index)
        compiler = Nvrtc(newest=version // 1000)  # or the driver may not take what it made
        architecture = properties.major * 10 + properties.minor
        made = cubin(architecture, folder or default_folder(), compiler)
        try:
            with self._here():
                if not self._runtime.deviceGetAttribute(_HOST_POINTERS, index):
                    raise ConfigError(f"{self.name} cannot use the addresses of pinned host memory")
                self._kernel = _loaded(cupy, made)
                self.node = gpu_node(self._runtime.deviceGetPCIBusId(index))
        except RuntimeError as error:  # of CuPy's: it is for a newer CUDA than the driver's, say
            raise ConfigError(
                f"CuPy {cupy.__version__} cannot use {self.name}: {error}; install the CuPy of a "
                f"CUDA that this driver has, such as cupy-cuda{version // 1000}x"
            ) from error
        self._streams: dict[int, Any] = {}  # of CuPy, by the address of torch's
        self._external = partial(_external, cupy, index)
        self.version, self.copies = version, batched_copies(version)
        self.batches = self.copies is not None

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
        """See Driver. What CUDA does not know as registered needs no more."""
        try:
            with self._here():
                self._runtime.hostUnregister(address)
        except self._runtime.CUDARuntimeError as error:
            _log.warning("%s does not let memory at %#x go: %s", self.name, address, error)

    def copy(
        self, stream: Any, to: int, of: int, nbytes: int, planes: int = 1, step: int = 0
    ) -> None:
        """See Driver."""
        kind, where = _DEFAULT_KIND, stream.cuda_stream
        with self._here():
            if planes == 1:
                self._runtime.memcpyAsync(to, of, nbytes, kind, where)
            else:
                self._runtime.memcpy2DAsync(to, step, of, step, nbytes, planes, kind, where)

    def batch(self, stream: Any, table: Numbers) -> None:
        """See Driver."""
        if self.copies is None:
            raise ConfigError("this driver has no batched copies")
        with self._here():
            # The runtime's calls find a context by themselves. This one is the driver's: it needs
            # that the calling thread has one, which may be new and have called nothing yet.
            self._runtime.setDevice(self._index)
            status = self.copies(table[0], table[1], table[2], stream.cuda_stream)
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync of {table.shape[1]} runs: CUDA error {status}")

    def launch(self, stream: Any, work: Work, grid: int) -> None:
        """See Driver."""
        where = stream.cuda_stream
        with self._here():
            if where not in self._streams:  # made here: CuPy takes the GPU that is current for its
                self._streams[where] = self._external(where)
            with self._streams[where]:
                tables = map(np.uint64, (work.begins, work.table))
                counts = map(np.uint32, (work.planes, work.runs, work.all, work.row))
                self._kernel((grid,), (_THREADS,), (*tables, *counts))

    def close(self) -> None:
        """See Driver. What torch owns goes with its last reference."""
        self._streams.clear()


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
    try:
        import cupy
    except ImportError as error:  # its own libraries are not all there
        raise ConfigError(
            f"CuPy cannot be imported: {error}; pip install --force-reinstall 'kvtier[cuda]'"
        ) from error
    return cupy


def _loaded(cupy: Any, made: bytes) -> Any:
    """Return the kernel of a cubin, on the GPU: what it does not take is told here, at no copy.

    Raises RuntimeError.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made)
        file.flush()
        kernel = cupy.RawModule(path=file.name).get_function("kvtier_copy")
        threads = int(kernel.max_threads_per_block)  # CuPy loads a kernel when it is asked for
    if threads < _THREADS:
        raise ConfigError(f"this GPU takes {threads} threads of the copy kernel, not {_THREADS}")
    return kernel


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


def batched_copies(
    version: int, library: str = "libcuda.so.1", *, order: int = _STREAM_ORDER
) -> Callable[[Numbers, Numbers, Numbers, int], int] | None:
    """Return cuMemcpyBatchAsync of a driver; None before 12.8. In 13.0 its signature changed.

    order: in which sources are accessed, a CUmemcpySrcAccessOrder.
    """
    asked = next((one for one in (_BATCH_NOW, _BATCH_FIRST) if version >= one), None)
    if asked is None:
        return None
    try:
        look = ctypes.CDLL(library).cuGetProcAddress_v2
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
        attributes, first, which = _Attributes(order=order), size(0), size()
        rows = (to.ctypes.data, of.ctypes.data, nbytes.ctypes.data, len(nbytes))
        for_all = (ctypes.addressof(attributes), ctypes.addressof(first), 1)
        told = (ctypes.addressof(which),) if failed else ()
        return int(function(*rows, *for_all, *told, stream))

    return call
