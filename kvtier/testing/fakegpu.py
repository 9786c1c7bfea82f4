"""A GPU without bytes: tensors know their shape and that they are on it, and that is checked.

torch's fake tensors refuse an operation whose tensors are on several devices, whether there is a
GPU or not. What is shown so is that nothing was left on the CPU; not what is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from kvtier.errors import MisuseError

FAKE_GPU: Final = torch.device("cuda", 0)


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeCompute]:
    """Make all tensors within fake; yield the GPU that an engine may compute on there."""
    with FakeTensorMode(), _ByOperators():
        yield FakeCompute()


class FakeCompute:
    """See Compute. Every answer is token 0, or a row of zeros. calls: of each kind, counted."""

    device = FAKE_GPU
    captures = True

    def __init__(self) -> None:
        self.calls = {"upload": 0, "download": 0, "capture": 0, "replay": 0}

    def current(self) -> AbstractContextManager[Any]:
        """See Compute."""
        return contextlib.nullcontext()

    def upload(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """See Compute."""
        self.calls["upload"] += 1
        _where("uploaded", numbers, "cpu")
        _where("uploaded to", into, "cuda")
        torch.ops.aten.copy_.default(into, numbers)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """See Compute."""
        self.calls["download"] += 1
        _where("downloaded", tensor, "cuda")
        return np.zeros(tuple(tensor.shape), np.int64 if tensor.ndim == 1 else np.float32)

    def capture(self, step: Callable[[], None]) -> _Replayed:
        """See Compute."""
        self.calls["capture"] += 1
        step()
        return _Replayed(step, self.calls)


class _Replayed:
    """See Graph."""

    def __init__(self, step: Callable[[], None], calls: dict[str, int]) -> None:
        self._step, self._calls = step, calls

    def replay(self) -> None:
        """See Graph."""
        self._calls["replay"] += 1
        self._step()


def _where(what: str, tensor: torch.Tensor, kind: str) -> None:
    if tensor.device.type != kind:
        raise MisuseError(f"what is {what} is on {tensor.device}, not on {kind}")


class _ByOperators(TorchFunctionMode):
    """Replaces what asks for CUDA itself, of a torch that has none, by the operators below it.

    Copies from one device to another are refused, but for ``Tensor.to``, which says that it is one.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.Tensor.__getitem__:
            return _part(*args)
        if func is torch.Tensor.__setitem__:
            target, at, value = args
            if not isinstance(value, torch.Tensor):
                return _part(target, at).fill_(value)
            return _copied(_part(target, at), value)
        if func is torch.Tensor.copy_:
            return _copied(*args)
        found = func(*args, **(kwargs or {}))
        if isinstance(found, FakeTensor):
            found.constant = None  # of numbers that torch remembers, it would make a real copy
        return found


def _copied(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if target.device != source.device:
        raise MisuseError(f"a copy from {source.device} to {target.device} that nobody asked for")
    copied: torch.Tensor = torch.ops.aten.copy_.default(target, source)
    return copied


def _part(tensor: torch.Tensor, at: Any) -> torch.Tensor:
    """Return a view: whole numbers, slices, an ellipsis and None are understood."""
    each = list(at) if isinstance(at, tuple) else [at]
    place = next((place for place, one in enumerate(each) if one is Ellipsis), None)
    if place is not None:
        named = sum(one is not None for one in each) - 1
        each[place : place + 1] = [slice(None)] * (tensor.ndim - named)
    dim = 0
    for one in each:
        if one is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
        elif isinstance(one, slice):
            start, stop, step = one.indices(tensor.shape[dim])
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, max(stop, start), step)
            dim += 1
        elif isinstance(one, int):
            tensor = tensor.select(dim, one)
        else:
            raise MisuseError(f"{one!r} is no part of a tensor: use index_select")
    return tensor
