"""The link: one session of this process with a daemon, over two connections.

An engine's calls go over the first, one at a time, and wait for `patience` at most. What takes
its time goes over the second, whose answers one daemon thread reads. That thread also notices that
the daemon is gone, and comes back to it: until then every call is a miss, at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvtier.clock import monotonic
from kvtier.daemon.answers import Failed, Joined, Resend
from kvtier.daemon.frames import encode
from kvtier.daemon.mapped import MappedArena
from kvtier.daemon.messages import Bye, Hello, Message, Settle
from kvtier.daemon.place import check_own
from kvtier.daemon.tether import Tether
from kvtier.daemon.up import Ask, Era, Seat, Up, resuming, stand_down
from kvtier.daemon.waits import Waits
from kvtier.daemon.wire import connect, failure, wait_for_daemon
from kvtier.errors import ConfigError, KvtierError, MisuseError, ProtocolError

_GREETING_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 0.05
_CHUNK_SECONDS: Final = 8e-7  # that a daemon takes at most to match or lease a chunk
_MOST_LOOKED: Final = 1000  # chunks: for half a millisecond at most nobody sleeps on their account
_GIVE_UP: Final = 0.25  # seconds of silence after which calls do not wait any more


class Link:
    """See the module. Safe from any thread; opening and closing block.

    up: the session while it holds. out: plans that were not settled, by the daemon's life.
    then: called when this has closed.
    """

    def __init__(
        self, path: str, engine: str, patience: float, then: Callable[[], None] | None = None
    ) -> None:
        self.path = path
        self._then = then
        self.patience = patience
        self.arena = MappedArena()
        self.up: Up | None = None
        self.out: dict[tuple[Era, int], Seat] = {}
        self._session = os.urandom(16)
        self._engine = engine or self._session.hex()
        self._seats: dict[Seat, bool] = {}  # whether it has joined, or still waits for that
        self._leaving = threading.Lock()
        self._left = False
        self._turn = threading.Lock()  # of the first connection
        self._outbox: deque[tuple[Up, Seat, Message]] = deque()
        self._owners: dict[bytes, int] = {}
        self._closed = self._greeted = False
        self._tether = Tether(
            path, "kvtier-link", watch=self._watch, come_up=self._come_up, gone=self.arena.unmap
        )
        self.report = self._tether.report
        self.here = self._tether.here

    def owner(self, digest: bytes) -> int:
        """Return a number that tells a namespace from others on this link."""
        return self._owners.setdefault(digest, len(self._owners) + 1)

    # ---- life

    def open(self, timeout: float) -> None:
        """Connect, and wait for the daemon so long. Raises ConfigError when it does not come."""
        try:
            wait_for_daemon(self.path, self._come_up, timeout)
            self._tether.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say goodbye, end the thread, and let the arena go. Idempotent."""
        if self._closed:
            return
        self._closed = self._tether.closing = True
        with self._turn:
            up, self.up = self.up, None
            if up is not None:
                with contextlib.suppress(OSError):
                    self._flush(up)
                    last = encode(resuming(self.out)) + encode(Bye())  # none that is owed stands
                    up.calls.put(last, 0.0)
                up.end()
        self._tether.end()
        if up is not None:
            self._bury(up)  # the thread may not have seen it
        self.arena.unmap()
        if self._then is not None:
            self._then()

    def join(self, seat: Seat, timeout: float) -> None:
        """Let a desk join, of a daemon started anew if need be. Blocks. Raises KvtierError.

        Raises MisuseError once the last desk has left.
        """
        self._seats[seat] = False
        until = monotonic() + timeout
        with contextlib.ExitStack() as undo:
            undo.callback(self._seats.pop, seat)
            while not self._joined(seat, until):
                self._check_open()
                if monotonic() >= until:
                    raise ConfigError(f"the daemon at {self.path} does not answer; try again later")
                select.select([], [], [], _AGAIN_SECONDS)  # the link's thread connects anew
            with self._leaving:
                self._check_open()
                self._seats[seat] = True
            undo.pop_all()

    def _check_open(self) -> None:
        if self._left:
            raise MisuseError("this cache is closed")

    def _joined(self, seat: Seat, until: float) -> bool:
        """Ask the daemon that is there to let a desk join, unless it was told already."""
        up = self.up
        if up is not None and seat in up.desks:
            return True
        found = self.ask(seat, seat.joining, Ask(within=max(until - monotonic(), 0.0)))
        if found is None:
            return False
        up, reply = found
        if isinstance(reply, Failed):
            raise failure(reply)
        if not isinstance(reply, Joined):
            raise ProtocolError(f"the daemon answers Join with {type(reply).__name__}")
        up.desks[seat] = reply.desk
        return True

    def leave(self, seat: Seat) -> bool:
        """Let a desk go; say whether it was the last. Those that would join now cannot, then."""
        with self._leaving:
            self._seats.pop(seat, None)
            self._left = not any(self._seats.values())
            return self._left

    # ---- calls

    def ask(self, seat: Seat, message: Message, how: Ask) -> tuple[Up, Message] | None:
        """Ask, and return the answer; None when none comes in time, or nobody is there."""
        up = self.up
        if up is None or how.only not in (None, up):
            return None
        within = self.patience if how.within is None else how.within
        until = monotonic() + within
        if not self._turn.acquire(timeout=within):
            return None
        try:
            if up is not self.up or (up.owed and not self._caught_up(up, until)):
                return None
            reply = self._ask(up, seat, message, how, until)
        except (OSError, KvtierError) as error:
            self._lose(up, error)
            return None
        finally:
            self._turn.release()
            if self._outbox:
                self._pump()
        return None if reply is None else (up, reply)

    def _ask(self, up: Up, seat: Seat, message: Message, how: Ask, until: float) -> Message | None:
        """Ask, on this thread's turn."""
        if self._outbox:
            self._flush(up)
        if not up.address(seat, message):
            return None
        if how.prefix is not None:
            up.name(message, how.prefix)
        reply = self._asked(up, seat, message, how, until)
        if isinstance(reply, Resend) and how.prefix is not None:
            up.name(message, how.prefix, whole=True)
            reply = self._asked(up, seat, message, how, until)
        if reply is not None and not isinstance(reply, Failed):
            if how.prefix is not None:
                up.told(message)
            if how.note is not None:
                how.note(up, reply)
        return reply

    def _asked(
        self, up: Up, seat: Seat, message: Message, how: Ask, until: float
    ) -> Message | None:
        """Send a request and return its answer; one that has not come is owed."""
        number = up.number()
        reply = None
        try:
            up.calls.put(encode(message, number), until)
            chunks = len(how.prefix.keys) if how.prefix is not None else 0
            reply = self._answer(up, number, until, min(chunks, _MOST_LOOKED) * _CHUNK_SECONDS)
        finally:
            if reply is None:  # also where an interrupt comes
                self._owe(up, number, seat, how)
        return reply

    def _answer(self, up: Up, number: int, until: float, longer: float) -> Message | None:
        """Return the answer to a request; take back late ones that come before it."""
        while (found := up.calls.take(until, longer)) is not None:
            if found[0] == number:
                return found[1]
            self._late(up, *found)
        return None

    def _owe(self, up: Up, number: int, seat: Seat, how: Ask) -> None:
        if not up.owed:
            up.silent_since = monotonic()
        up.owed[number] = (seat, how)
        self._tether.poke()

    def _late(self, up: Up, number: int, reply: Message) -> None:
        seat, how = up.owed.pop(number, (None, None))
        if seat is None or how is None or isinstance(reply, (Failed, Resend)):
            return
        back = how.late(up, reply) if how.late is not None else None
        if back is not None:
            self._outbox.append((up, seat, back))

    def _caught_up(self, up: Up, until: float) -> bool:
        """Wait for late answers; not at all once the daemon has been silent for long."""
        if monotonic() - up.silent_since > _GIVE_UP:
            until = 0.0
        while up.owed:
            found = up.calls.take(until)
            if found is None:
                return False
            self._late(up, *found)
        return True

    # ---- what needs no answer

    def post(self, up: Up | None, seat: Seat, message: Message) -> None:
        """Say something while `up` holds; where that is over, it is over too. Never waits."""
        if up is not None and up is self.up:
            self._outbox.append((up, seat, message))
            self._pump()

    def settle(self, seat: Seat, era: Era, plan: int, *, ok: bool) -> None:
        """Say that a plan has ended. Where nobody listens, Resume will say so."""
        self.out.pop((era, plan), None)
        up = self.up
        if self._closed:
            stand_down(self.path, self._hello(), self.out)
        if up is not None and up.era.arena == era.arena:
            self.post(up, seat, Settle(plan, ok))

    def _pump(self) -> None:
        """Send what stands in the outbox, unless somebody who holds the turn will."""
        while self._outbox and self._turn.acquire(blocking=False):
            up = self.up
            try:
                if up is None:
                    self._outbox.clear()
                else:
                    self._flush(up)
            except OSError as error:
                if up is not None:
                    self._lose(up, error)
            finally:
                self._turn.release()

    def _flush(self, up: Up) -> None:
        """Send what is meant for this session; what was meant for an earlier one is void."""
        while self._outbox:
            when, seat, message = self._outbox.popleft()
            if when is up and up.address(seat, message):
                up.calls.put(encode(message), 0.0)
        if up.calls.unsent:
            self._tether.poke()

    # ---- the thread

    def _watch(self) -> bool:
        """Read what comes until the connections are lost, if there are any."""
        up, wake = self.up, self._tether.wake
        if up is None:
            return False
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        try:
            while self.up is up:
                poll.register(up.calls, up.events)  # of a hang-up it tells in any case
                poll.register(up.waits.wire, up.waits.events)
                ready = dict(poll.poll(up.waits.milliseconds()))
                if wake in ready:
                    self._tether.heard()
                if up.calls.fileno() in ready:
                    self._take_late(up)
                up.waits.turn()
        except Exception as error:  # noqa: BLE001  (a defect, too: nobody waits for ever)
            self._lose(up, error)
        self._bury(up)
        return True

    def _take_late(self, up: Up) -> None:
        """Read the answers that nobody waits for, and send what could not be sent."""
        with self._turn:
            if self.up is up:
                if up.calls.unsent:
                    up.calls.put(b"", 0.0)
                while (found := up.calls.take(0.0)) is not None:
                    self._late(up, *found)
        self._pump()

    def _lose(self, up: Up, error: Exception) -> None:
        """Note that the connections of `up` are lost; all that went over them is over."""
        if self.up is up:
            self.up = None
            self._tether.lost(error)
        up.end()
        self._tether.poke()

    def _bury(self, up: Up) -> None:
        """Give the descriptors back, and end what was waited for. Idempotent.

        By the link's thread, or once that has ended.
        """
        with self._turn:
            up.calls.close()
        up.waits.close()

    # ---- coming up

    def _come_up(self, until: float) -> None:
        """Connect in time, say what still stands, and join again. Raises OSError, KvtierError."""
        check_own(self.path)
        with contextlib.ExitStack() as undo:
            calls, welcome, fd = connect(self.path, self._hello(), until)
            undo.callback(calls.close)
            if welcome.arena == self.arena.id:
                os.close(fd)
            else:
                self.arena.map(fd)
            wire, again, fd = connect(self.path, self._hello(), until)
            undo.callback(wire.close)
            os.close(fd)
            up = Up(calls, Waits(wire, self._tether.poke), welcome)
            if (again.arena, again.generation) != up.era:
                raise ConnectionResetError("the daemon was started again meanwhile")
            still = self._resume(up)
            for seat in list(self._seats):
                if self._closed:
                    return
                if refused := up.rejoin(seat, _GREETING_SECONDS):
                    self.report(refused)  # it has no cache until the next time
            with self._turn:
                if self._closed:
                    return
                self._greeted = True
                self.up = up
            undo.pop_all()
        for (era, plan), seat in still.items():
            if (era, plan) not in self.out:  # settled while nobody listened
                self.settle(seat, era, plan, ok=False)
        self._pump()  # what was said in between

    def _hello(self) -> Hello:
        return Hello(self._session, self._engine, "scheduler")

    def _resume(self, up: Up) -> dict[tuple[Era, int], Seat]:
        """Say which plans are out; those of an arena that is gone are over."""
        with self._turn:  # whoever has had an answer on the session before has noted its plan
            for key in list(self.out):  # plans are settled meanwhile
                if key[0].arena != up.era.arena:
                    self.out.pop(key, None)
            still = dict(self.out)
        if self._greeted:
            up.calls.put(encode(resuming(still)), monotonic() + _GREETING_SECONDS)
        return still
