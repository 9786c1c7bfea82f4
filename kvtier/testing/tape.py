"""A stand-in for CUDA graphs on the CPU: what a step did is recorded, and done again, op by op.

As a graph does, a replay runs no Python of the step and touches the very memory of its recording.
So a step that takes anything else from outside than the content of tensors gives stale answers
here, too. What a graph cannot record is refused: reading a tensor's content, or making a tensor
of the host's numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtier.engine.compute import CpuCompute
from kvtier.errors import MisuseError

_REFUSED: Final = ("aten::_local_scalar_dense", "aten::lift_fresh", "aten::item")


_Op = tuple[Any, Sequence[Any], Mapping[str, Any], list[torch.Tensor | None]]
"""What was called with what, and those of its results that were in memory of their own."""


class Tape(TorchDispatchMode):
    """See Graph. Records what runs within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._done: list[_Op] = []

    def __len__(self) -> int:
        return len(self._done)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op and take it down. Raises MisuseError for one that a graph refuses."""
        del types
        if func.name() in _REFUSED:
            raise MisuseError(f"{func.name()} cannot be recorded: it needs the host")
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        changes = any(one.alias_info and one.alias_info.is_write for one in func._schema.arguments)
        known = {_memory(one) for one in _tensors((args, kwargs))}
        fresh = [None if _memory(one) in known else one for one in _tensors(found)]
        if changes or any(one is not None for one in fresh):  # a view of fixed memory is fixed
            self._done.append((func, args, kwargs, [] if changes else fresh))
        return found

    def replay(self) -> None:
        """Do it all again. What was fresh memory then is filled once more."""
        for func, args, kwargs, fresh in self._done:
            again = _tensors(func(*args, **kwargs))
            for target, tensor in zip(fresh, again if fresh else (), strict=True):
                if target is not None:
                    target.copy_(tensor)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeCompute(CpuCompute):
    """See Compute. uploads, downloads: bytes of each copy from and to the host."""

    captures = True

    def __init__(self) -> None:
        self.uploads: list[int] = []
        self.downloads: list[int] = []

    def current(self) -> AbstractContextManager[Any]:
        """See Compute."""
        return contextlib.nullcontext()

    def upload(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """See Compute."""
        self.uploads.append(numbers.nbytes)
        super().upload(numbers, into)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """See Compute."""
        self.downloads.append(tensor.nbytes)
        return super().download(tensor)

    def capture(self, step: Callable[[], None]) -> Tape:
        """See Compute."""
        step()
        tape = Tape()
        with tape:
            step()
        return tape
