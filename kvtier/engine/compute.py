"""Where an engine computes: on the CPU, or on a GPU, on a stream of its own.

All that is torch.cuda's in the engine is here. It has not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.gpus import gpu_index, torch_for_gpu

_CHOOSE_CPU: Final = 'the CPU is used only where you choose it: device="cpu"'
_WARM_UPS: Final = 2
"""Runs before a capture: libraries make their handles and choose their kernels meanwhile."""


class Graph(Protocol):
    """Recorded work over fixed memory. Nothing but the content of that memory can change."""

    def replay(self) -> None:
        """Enqueue it once more."""
        ...


@runtime_checkable
class Compute(Protocol):
    """One device to compute on. Calls come from the engine's thread.

    captures: whether ``capture`` can be had.
    """

    device: torch.device
    captures: bool

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which what this thread computes goes onto the engine's stream."""
        ...

    def upload(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """Enqueue a copy of host memory into a tensor of the device. Does not wait for it.

        numbers: not looked at again, so that it may change at once.
        """
        ...

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Return a tensor of the device on the host. Waits for all that was enqueued before."""
        ...

    def capture(self, step: Callable[[], None]) -> Graph:
        """Record what `step` enqueues, which has to be the same each time. Runs it before."""
        ...


class CpuCompute:
    """See Compute. What is computed is done when the call returns."""

    device = torch.device("cpu")
    captures = False

    def current(self) -> AbstractContextManager[Any]:
        """See Compute."""
        return contextlib.nullcontext()

    def upload(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """See Compute."""
        into.copy_(numbers)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """See Compute."""
        found: NDArray[Any] = tensor.numpy()
        return found

    def capture(self, step: Callable[[], None]) -> Graph:
        """See Compute. A CPU records nothing."""
        raise NotImplementedError(step)


class CudaCompute:
    """See Compute. index: of the GPU, as torch counts them.

    The stream is this engine's own, and not the default one, which other work would wait for.
    Raises ConfigError, with the remedy, where that GPU cannot be used.
    """

    captures = True

    def __init__(self, index: int) -> None:
        # One workspace a stream: with more, cuBLAS may sum in another order from call to call
        # (NVIDIA's cuBLAS documentation, "Results Reproducibility"). Read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch_for_gpu(index, _CHOOSE_CPU)
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)
        self._pool: Any = None

    def current(self) -> AbstractContextManager[Any]:
        """See Compute."""
        return torch.cuda.stream(self._stream)

    def upload(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """See Compute. torch lends the pinned memory to nobody else until the copy has ended."""
        into.copy_(numbers.pin_memory(), non_blocking=True)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """See Compute."""
        found: NDArray[np.generic] = tensor.cpu().numpy()
        return found

    def capture(self, step: Callable[[], None]) -> Graph:
        """See Compute. All graphs share one pool of memory: they never run at the same time."""
        for _ in range(_WARM_UPS):
            step()
        self._stream.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # What other threads do on the GPU meanwhile, copies say, is no part of it.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            step()
        return graph


def compute_on(device: str) -> Compute:
    """Return the device of a name: "cpu", "cuda" or "cuda:1". Raises ConfigError."""
    index = gpu_index(device)
    return CpuCompute() if index is None else CudaCompute(index)
