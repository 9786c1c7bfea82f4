"""Several ranks: one Cache in the scheduler's process, and copies where each rank's blocks are.

The scheduler plans. A plan crosses to every rank as bytes, each copies its own shard between its
blocks and the arena, which ``kvtier.Worker`` maps, and says when that has settled. When a rank's
process has ended, by its pidfd, it can write nothing any more: its copies have failed, and are
over. A channel that has closed says nothing of that: whoever closed it may be copying still.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvtier.clock import monotonic
from kvtier.copier import Pages
from kvtier.copyplan import CopyPlan
from kvtier.device.base import Device, Fence
from kvtier.errors import KvtierError, ProtocolError
from kvtier.transfer import CopyStatus, CopyTransfer

_LENGTH: Final = struct.Struct("<I")
_SEND_SECONDS: Final = 5.0


def _untold(plan_id: int) -> None:
    del plan_id


class Channel:
    """Messages over a stream socket: a length, then MessagePack. For one thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._data = bytearray()
        self.closed = False
        self._jammed = False

    def send(self, *message: object) -> bool:
        """Send one message; say whether it went out. Blocks five seconds at most.

        False, now and from then on, once the other side is gone, or has not read for so long: a
        message that went out in part is never whole there.
        """
        if self.closed or self._jammed:
            return False
        data = msgspec.msgpack.encode(message)
        try:
            self._link.settimeout(_SEND_SECONDS)
            self._link.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            self._jammed = True
        except OSError:
            self.closed = True
        return not (self.closed or self._jammed)

    def receive(self, timeout: float | None) -> list[Any] | None:
        """Return the next message; None when none came in `timeout` seconds, or it is closed."""
        until = None if timeout is None else monotonic() + timeout
        while (message := self._complete()) is None and not self.closed:
            left = None if until is None else max(until - monotonic(), 0.0)
            self._link.settimeout(left)
            try:
                data = self._link.recv(1 << 20)
            except (BlockingIOError, TimeoutError):
                return None
            except OSError:
                data = b""
            self._data += data
            self.closed = not data
        return message

    def close(self) -> None:
        """Close this end."""
        self._link.close()
        self.closed = True

    def _complete(self) -> list[Any] | None:
        """Take a message out of what has arrived, if one is whole."""
        if len(self._data) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        message: list[Any] = msgspec.msgpack.decode(self._data[_LENGTH.size : end])
        del self._data[:end]
        return message


class _RankFence:
    """See Fence. One plan's copies on one rank."""

    def __init__(self, pages: RankedPages, rank: int, plan: tuple[int, int]) -> None:
        self._pages, self._rank, self._plan = pages, rank, plan
        self._cause: str | None = None

    def done(self) -> bool:
        """See Fence."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        if self._cause is None:
            self._cause = self._pages.outcome(self._rank, self._plan, timeout)
        if self._cause:
            raise OSError(f"rank {self._rank}: {self._cause}")
        return self._cause is not None


class RankedPages:
    """The ranks' blocks as the scheduler sees them: stands where ``Pages`` does.

    processes: a pidfd of each rank's, which stays the caller's.
    """

    def __init__(self, channels: Sequence[Channel], processes: Sequence[int]) -> None:
        self._channels = channels
        self._processes = processes
        self._outcomes: dict[tuple[int, tuple[int, int]], str] = {}  # by rank, arena and id

    def execute(self, plan: CopyPlan, after: Sequence[Fence]) -> CopyTransfer:
        """Send a plan to all ranks. after: each rank has its own compute, which it waits for."""
        del after
        which = (plan.arena, plan.id)
        for rank, channel in enumerate(self._channels):
            if not channel.send("plan", bytes(plan)):  # it is whole there never, nor executed
                cause = "gone" if channel.closed else "takes no plans; is it stopped?"
                self._outcomes[rank, which] = cause
        fences = [_RankFence(self, rank, which) for rank in range(len(self._channels))]
        blocks = tuple(dict.fromkeys(block for part in plan.parts for block in part.blocks))
        return CopyTransfer(fences, plan.tokens, blocks)

    def outcome(self, rank: int, plan: tuple[int, int], timeout: float) -> str | None:
        """Return, once, why a rank's copies failed, or ""; None if that is not known in time.

        plan: its arena, and its id, which another daemon may give again.
        """
        channel, until = self._channels[rank], monotonic() + timeout
        while (rank, plan) not in self._outcomes:
            message = channel.receive(max(until - monotonic(), 0.0))
            if message is None:
                over = channel.closed and _has_ended(self._processes[rank], until - monotonic())
                return "gone" if over else None
            self.take(rank, message)
        return self._outcomes.pop((rank, plan))

    def take(self, rank: int, message: Sequence[Any]) -> None:
        """Note a message of a rank that says how a plan has ended there."""
        kind, arena, plan_id, cause = message
        if kind != "copied":
            raise ProtocolError(f"rank {rank} says {kind!r}, which nobody asked for")
        self._outcomes[rank, (arena, plan_id)] = cause


def _has_ended(process: int, seconds: float) -> bool:
    """Say whether the process of a pidfd has ended, after so many seconds at most."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


class RankCopies:
    """The rank's side: executes plans over its own tensors, and reports each once.

    ended: called with a plan's id once this rank copies it no more: see ``kvtier.Worker.ended``.
    """

    def __init__(
        self,
        channel: Channel,
        pages: Pages,
        device: Device,
        ended: Callable[[int], None] = _untold,
    ) -> None:
        self._channel = channel
        self._pages = pages
        self._device = device
        self._ended = ended
        self._running: list[tuple[CopyPlan, CopyTransfer]] = []

    def execute(self, data: bytes) -> None:
        """Start a plan's copies, after all that this rank has computed."""
        plan = CopyPlan.decode(data)
        try:
            transfer = self._pages.execute(plan, after=(self._device.host_fence(),))
        except KvtierError as error:  # it does not fit, or memory cannot be pinned
            self._tell(plan, str(error))
            return
        self._running.append((plan, transfer))

    def report(self) -> bool:
        """Tell the scheduler what has settled; say whether more is under way."""
        running = []
        for plan, transfer in self._running:
            if transfer.poll():
                result = transfer.result(0)
                self._tell(plan, "" if result.status is CopyStatus.OK else result.cause)
            else:
                running.append((plan, transfer))
        self._running = running
        return bool(running)

    def _tell(self, plan: CopyPlan, cause: str) -> None:
        """Tell the daemon first: it must know by when the scheduler does."""
        self._ended(plan.id)
        self._channel.send("copied", plan.arena, plan.id, cause)
