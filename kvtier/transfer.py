"""Transfers: handles of bytes on the move. Poll them, wait for them, or await them.

A wait that times out frees nothing: blocks and slots stay the Transfer's until it has settled.
A fault of a tier or a copy is a value in the result; only misuse raises.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kvtier.catalog.lease import Lease
from kvtier.checks import check_seconds
from kvtier.clock import monotonic
from kvtier.device.base import Fence
from kvtier.seams import CancelledError, Future

T = TypeVar("T")

_log = logging.getLogger("kvtier")
_POLL_SECONDS: Final = 0.0005  # a CUDA event has no callback, so awaiting one means asking


class CopyStatus(enum.Enum):
    """How a copy stands."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Outcome of a plan's execution.

    tokens: valid tokens, from the plan's first; failed_blocks: engine blocks whose content means
    nothing.
    """

    status: CopyStatus
    tokens: int = 0
    failed_blocks: tuple[int, ...] = ()
    cause: str = ""


class CopyTransfer:
    """Copies of one plan, enqueued on a stream.

    groups: fences in the order in which groups of layers become readable.
    layers: of each component, where `groups` are of layers: see ``group_layers``.
    """

    def __init__(
        self,
        groups: Sequence[Fence],
        tokens: int,
        blocks: tuple[int, ...],
        layers: Sequence[int] = (),
    ) -> None:
        self.groups = tuple(groups)
        self.layers = tuple(layers)
        self._tokens = tokens
        self._blocks = blocks

    def group(self, component: int, layer: int) -> int:
        """Return the group after whose fence a layer may be read. Of a load that has `layers`.

        That is said of the layer, not of the load: a later group may fail yet.
        """
        return _group_of(layer, self.layers[component], len(self.groups))

    def poll(self) -> bool:
        """Say whether it has settled. Never blocks, never raises for a fault."""
        return self._look(None) is not None

    def result(self, timeout: float) -> CopyResult:
        """Return the outcome, blocking at most `timeout` seconds; TIMEOUT if not settled."""
        check_seconds("a timeout", timeout)
        return self._look(timeout) or CopyResult(CopyStatus.TIMEOUT)

    def __await__(self) -> Generator[Any, None, CopyResult]:
        """Await the outcome."""
        return self._settled().__await__()

    async def _settled(self) -> CopyResult:
        while (found := self._look(None)) is None:  # noqa: ASYNC110  (fences: ask)
            await asyncio.sleep(_POLL_SECONDS)
        return found

    def _look(self, timeout: float | None) -> CopyResult | None:
        """Return the outcome; None when not settled within `timeout`, or now."""
        cause = ""
        until = None if timeout is None else monotonic() + timeout
        for fence in self.groups:
            try:
                left = None if until is None else max(until - monotonic(), 0.0)
                if not (fence.done() if left is None else fence.wait(left)):
                    return None
            except Exception as error:  # noqa: BLE001  (a copy's fault is a value)
                cause = cause or f"{type(error).__name__}: {error}"
        if cause:
            return CopyResult(CopyStatus.FAILED, 0, self._blocks, cause)
        return CopyResult(CopyStatus.OK, self._tokens)


class LeavingTransfer(CopyTransfer):
    """A save whose copies are enqueued group by group, while layers are computed.

    enqueue: enqueues the copies of a component's group, after what the calling thread has
        computed; returns their fence. count: of groups. For the thread that computes, but ``poll``.
    It settles once ``end`` was called and all that was enqueued has ended. void: ``end`` said so.
    """

    def __init__(
        self,
        enqueue: Callable[[int, int], Fence],
        count: int,
        tokens: int,
        blocks: tuple[int, ...],
        layers: Sequence[int],
    ) -> None:
        super().__init__((), tokens, blocks, layers)
        self._enqueue = enqueue
        self._left = {(one, group): None for one in range(len(layers)) for group in range(count)}
        self._count = count
        self._lost = ""
        self._ended = self.void = False

    def written(self, component: int, layer: int) -> None:
        """Say that a layer's blocks are written, or will be by work that is enqueued.

        A group leaves with its last layer. Layers come in order. Does not block.
        """
        group = _group_of(layer, self.layers[component], self._count)
        last = group_layers(self.layers[component], group, self._count).stop - 1
        if layer == last and not self._ended and (component, group) in self._left:
            del self._left[component, group]
            self.groups += (self._enqueue(component, group),)

    def end(self, *, good: bool) -> None:
        """Say that no more layers come. good: whether what was written counts."""
        if not self._ended:
            self._ended, self.void = True, not good
            if self.void:
                self._lost = "the step that computed it does not count"
            elif self._left:
                self._lost = f"{len(self._left)} groups of layers were never computed"

    def _look(self, timeout: float | None) -> CopyResult | None:
        if not self._ended:
            return None
        found = super()._look(timeout)
        if found is not None and self._lost:
            return CopyResult(CopyStatus.FAILED, 0, self._blocks, self._lost)
        return found


def group_layers(layers: int, group: int, count: int) -> range:
    """Return the layers of one of `count` groups of about equal size."""
    return range(layers * group // count, layers * (group + 1) // count)


def _group_of(layer: int, layers: int, count: int) -> int:
    """Return the group that has a layer."""
    return ((layer + 1) * count - 1) // layers


class _UpTransfer(Generic[T]):
    """Chunks on their way up into DRAM."""

    def __init__(self, running: Future[T | None]) -> None:
        self._running = running

    def poll(self) -> bool:
        """Say whether it has settled. Never blocks."""
        return self._running.done()

    def result(self, timeout: float) -> T | None:
        """Return the result; None when there is none, or not within `timeout` seconds."""
        check_seconds("a timeout", timeout)
        try:
            return self._running.result(timeout)
        except (TimeoutError, CancelledError):
            return None
        except Exception:  # noqa: BLE001  (a bug of ours must not end the engine: P2)
            _log.exception("a fetch failed; it counts as a miss")
            return None

    def on_settled(self, call: Any) -> None:
        """Call `call()` once it has settled, from any thread. It must not wait for the cache."""
        self._running.add_done_callback(lambda _: call())

    def __await__(self) -> Generator[Any, None, T | None]:
        """Await the result. Cancelling this cancels nothing: ask again, or abandon it."""
        return self._arrived().__await__()

    async def _arrived(self) -> T | None:
        await asyncio.wait((asyncio.wrap_future(self._running),))  # cancels nothing
        return self.result(0)


class FetchTransfer(_UpTransfer[Lease]):
    """A fetch or a pin. The result is a Lease, or None for none at all."""

    def abandon(self) -> None:
        """Let go: whatever arrives is released at once, and stays in DRAM."""
        self._running.add_done_callback(_release)


class PrefetchTransfer(_UpTransfer[int]):
    """A prefetch. The result is how many of the prompt's tokens DRAM has then."""


def _release(running: Future[Lease | None]) -> None:
    if not running.cancelled() and running.exception() is None:
        lease = running.result()
        if lease is not None:
            with lease:
                pass
