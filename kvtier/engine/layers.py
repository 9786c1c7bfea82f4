"""What a step does before and after a layer touches the KV pool: the seam of overlap.

A load's layers land one group after the other, and a save's leave so. A forward pass calls its
hook, if it has one, around each layer: what it computes next then comes after the layer's bytes,
and its own bytes may go once they are written. A step without either has no hook, and can be
captured whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.connectors.base import Landing, Leaving


class LayerHook(Protocol):
    """Called by a forward pass, layer by layer, on the thread that enqueues its work."""

    def before(self, component: int, layer: int) -> None:
        """Come before the layer reads or writes its KV. layer: of the component's, from 0."""
        ...

    def after(self, component: int, layer: int) -> None:
        """Come after the layer's KV of this step is written, or its writing enqueued."""
        ...


class StepHook:
    """One step's: waits for loads under way, and lets saves go.

    waited: seconds that the calling thread stood still for loads.
    """

    def __init__(
        self,
        landing: Sequence[Landing],
        leaving: Sequence[Leaving],
        clock: Callable[[], float],
    ) -> None:
        self.waited = 0.0
        self._landing = landing
        self._leaving = leaving
        self._clock = clock

    def before(self, component: int, layer: int) -> None:
        """See LayerHook."""
        began = self._clock() if self._landing else 0.0
        for one in self._landing:
            one.hold(component, layer)
        self.waited += self._clock() - began if self._landing else 0.0

    def after(self, component: int, layer: int) -> None:
        """See LayerHook."""
        for one in self._leaving:
            one.written(component, layer)
