"""What executes plans, and a load under way as an engine reads it: layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from kvtier.copyplan import CopyPlan
from kvtier.device.base import Device, Fence
from kvtier.transfer import CopyTransfer

_STALL_SECONDS: Final = 0.25
"""For which a step stands still for one group of layers: at 20 GB/s, 5 GB of it."""


class Executor(Protocol):
    """What executes plans over an engine's blocks: ``Pages`` here, ``RankedPages`` elsewhere."""

    def execute(self, plan: CopyPlan, after: Sequence[Fence]) -> CopyTransfer:
        """See ``Pages``."""
        ...


class LayersLanding:
    """See Landing."""

    def __init__(self, device: Device, transfer: CopyTransfer) -> None:
        self._device = device
        self._transfer = transfer
        self._held = -1  # the last group of layers that what is computed comes after
        self._lost = False

    def begun(self) -> bool:
        """See Landing."""
        try:
            return self._transfer.groups[0].done()
        except Exception:  # noqa: BLE001  (the load's result says what it is)
            return True

    def hold(self, component: int, layer: int) -> None:
        """See Landing. Blocks a quarter of a second at most, and never again after that."""
        group = self._transfer.group(component, layer)
        if group <= self._held or self._lost:
            return
        try:
            self._lost = not self._device.hold(self._transfer.groups[group], _STALL_SECONDS)
        except Exception:  # noqa: BLE001  (the load's result says what it is)
            self._lost = True
        self._held = group

    def settle(self) -> None:
        """See Landing. Blocks a quarter of a second at most."""
        if not self._lost:
            self._transfer.result(_STALL_SECONDS)
