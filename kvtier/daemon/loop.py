"""The server's loop: it reads what clients ask, hands it on, and sends what is answered.

It runs in one thread and never waits but for its sockets; whatever takes time answers later, from
any thread. No client can hold it up: each has one short turn, what it does not read is kept up
to a cap, and what it began to send has to be whole within seconds.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvtier.clock import Clock
from kvtier.daemon.answering import Answering, failed
from kvtier.daemon.answers import Closing, Failed, Welcome
from kvtier.daemon.connection import Connection
from kvtier.daemon.frames import decode, encode
from kvtier.daemon.limits import Limits, descriptors
from kvtier.daemon.lookout import Lookout
from kvtier.daemon.messages import Bye, Hello, Message
from kvtier.daemon.process import Process
from kvtier.errors import ConfigError, KvtierError, ProtocolError
from kvtier.events import Reporter

_TICK: Final = 0.25  # seconds
_SCRATCH: Final = 256 << 10
_ACCEPTED: Final = 64  # connections at a time, so that a flood of them keeps nobody waiting
_TURN_FRAMES: Final = 8
_TURN_BYTES: Final = 64 << 10
_FAREWELL: Final = 1.0  # seconds until clients have read that the daemon ends
_log = logging.getLogger("kvtier")


class Server:
    """See the module. listening: a socket that listens and does not block.

    welcome: what every client is told; arena: the descriptor that comes with it. uid: who may
    connect, beside this process's own user. ``serve`` returns after ``end``.
    """

    def __init__(
        self,
        listening: socket.socket,
        sessions: Answering[Any],
        welcome: Welcome,
        arena: int,
        uid: int,
        clock: Clock,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._listening = listening
        self._sessions = sessions
        self._welcome = welcome
        self._arena = arena
        self._users = {uid, os.geteuid()}
        self._clock = clock
        self._report = Reporter(clock)
        self._most = min(self.limits.connections, descriptors() // 2)
        self._connections: dict[int, Connection[Any]] = {}
        self._processes: dict[tuple[int, int], Process] = {}
        self._late: dict[Connection[Any], float] = {}  # when each must have said Hello, or more
        self._more: dict[Connection[Any], None] = {}  # whole frames wait for their next turn
        self._gone: list[Connection[Any]] = []
        self._held = 0  # bytes of frames that are not dealt with
        self._unread = 0  # bytes that wait for clients
        self._posted: deque[tuple[Connection[Any], bytes]] = deque()
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._thread = 0
        self._ending = False
        self._deaf = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lookout = Lookout(clock, sessions.rest)
        self._calls: dict[int, Callable[[], object]] = {}  # by descriptor, of what is no client
        self.watch(self._bell, functools.partial(os.eventfd_read, self._bell))
        self.watch(listening.fileno(), self._accept)

    def watch(self, number: int, call: Callable[[], object]) -> None:
        """Have the loop call this when a descriptor can be read. By its thread, or before."""
        self._calls[number] = call
        self._lookout.add(number)

    def watch_process(self, process: Process) -> None:
        """Tell the sessions when this process has ended; the loop closes it then."""
        self._processes[process.pid, process.start_time] = process
        self.watch(process.pidfd, functools.partial(self._ended, process))

    # ---- the loop

    def serve(self) -> None:
        """Serve until ``end``; then tell all clients, and let them go."""
        self._thread = threading.get_ident()
        tick = self._clock() + _TICK
        while not self._ending:
            wait = 0.0 if self._more else max(tick - self._clock(), 0.0)
            self._round(wait)
            if self._clock() >= tick:
                self._tick()
                tick = self._clock() + _TICK
        self._farewell()

    def end(self) -> None:
        """Make ``serve`` return. From any thread, and from a signal's handler."""
        self._ending = True
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close what the loop had open, but not the listening socket."""
        for connection in list(self._connections.values()):
            connection.close()
        for process in self._processes.values():
            process.close()
        self._lookout.close()
        os.close(self._bell)

    def _round(self, wait: float) -> None:
        """Give each client that has something a turn, and send what others answered."""
        again = self._more
        self._more = {}
        for number, events in self._lookout.wait(wait):
            connection = self._connections.get(number)
            if connection is None:
                self._calls[number]()
                continue
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT and connection not in again:
                self._read(connection)
        for connection in again:
            self._turn(connection)
        self._send_posted()
        self._forget_gone()

    def _ended(self, process: Process) -> None:
        self._lookout.drop(process.pidfd)
        del self._calls[process.pidfd]
        del self._processes[process.pid, process.start_time]
        process.dead = True
        self._sessions.died(process)
        process.close()

    def _tick(self) -> None:
        """Drop who is late, and let sessions see to what is over."""
        if self._deaf:
            self._lookout.add(self._listening)
            self._deaf = False
        now = self._clock()
        late = [one for one, when in self._late.items() if when <= now]
        for connection in late:
            self._drop(connection)
        self._forget_gone()
        self._sessions.tick()

    # ---- connections come and go

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor left, or the client went
                self._report.warn("a client could not be let in", str(error.strerror))
                self._lookout.drop(self._listening)  # it would be readable for ever
                self._deaf = True
                return
            sock.settimeout(0.0)
            connection: Connection[Any] = Connection(sock)
            self._connections[sock.fileno()] = connection
            self._lookout.add(sock)
            self._late[connection] = self._clock() + self.limits.seconds
            if len(self._connections) > self._most:
                self._refuse(
                    connection,
                    0,
                    ConfigError(
                        f"the daemon has {self._most} connections, and takes no more; close some, "
                        "or raise its limit of open files (ulimit -n, LimitNOFILE=)"
                    ),
                )

    def _drop(self, connection: Connection[Any]) -> None:
        """Let a connection go, when the loop comes to it."""
        connection.broken = True
        self._gone.append(connection)

    def _forget_gone(self) -> None:
        while self._gone:
            self._forget(self._gone.pop())

    def _forget(self, connection: Connection[Any]) -> None:
        number = connection.sock.fileno()
        if self._connections.get(number) is not connection:
            return  # it went before
        self._lookout.drop(number)
        del self._connections[number]
        self._late.pop(connection, None)
        self._more.pop(connection, None)
        self._held -= len(connection.incoming)
        self._unread -= connection.waiting
        connection.close()
        if connection.session is not None:
            self._sessions.closed(connection.session)

    # ---- what comes in

    def _read(self, connection: Connection[Any]) -> None:
        if connection.broken or connection.ending:
            self._discard(connection)
            return
        try:
            self._held += connection.read(self._scratch)
        except EOFError:
            self._drop(connection)
            return
        self._turn(connection)

    def _discard(self, connection: Connection[Any]) -> None:
        """Read what nobody looks at any more: else the loop would be told of it for ever."""
        try:
            if not connection.sock.recv_into(self._scratch):
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _turn(self, connection: Connection[Any]) -> None:
        """Deal with some of a client's frames; the rest waits until others had theirs."""
        taken = frames = 0
        before = len(connection.incoming)
        try:
            while frames < _TURN_FRAMES and taken < _TURN_BYTES:
                if connection.broken or connection.ending:
                    break
                frame = connection.frame()
                if frame is None:
                    break
                frames += 1
                taken += len(frame[2])
                self._deal_with(connection, *frame)
        except ProtocolError as error:
            self._refuse(connection, 0, error)
        self._held -= before - len(connection.incoming)
        if connection.incoming and self._held > self.limits.total:
            busy = ProtocolError("the daemon has too much to read; connect again later")
            self._refuse(connection, 0, busy)
        if connection.ending:
            self._held -= len(connection.incoming)
            connection.incoming.clear()
        if connection.more and not connection.ending:
            self._more[connection] = None
        if connection.session is not None and not connection.ending:
            self._wait_for_rest(connection, frames)

    def _wait_for_rest(self, connection: Connection[Any], frames: int) -> None:
        """Expect the rest of a frame within seconds."""
        if not connection.incoming:
            self._late.pop(connection, None)
        elif frames or connection not in self._late:
            self._late[connection] = self._clock() + self.limits.seconds

    def _deal_with(self, connection: Connection[Any], kind: int, number: int, body: bytes) -> None:
        """Deal with one frame. Raises ProtocolError for what no client says."""
        try:
            message = decode(kind, body)
            if isinstance(message, Hello):
                self._greet(connection, number, message)
            elif isinstance(message, Bye):
                self._drop(connection)
            else:
                reply = functools.partial(self._reply, connection, number)
                self._sessions.handle(connection.session, message, reply)
        except ProtocolError as error:
            self._refuse(connection, number, error)
        except KvtierError as error:
            if connection.session is None:
                self._refuse(connection, number, error)
            elif number and not connection.broken:
                self._send(connection, failed(error, number))
        except Exception:  # noqa: BLE001  (a defect here: other clients go on)
            _log.exception("a request could not be dealt with; its connection is closed")
            self._drop(connection)

    def _greet(self, connection: Connection[Any], number: int, hello: Hello) -> None:
        """Let a client in. Raises ProtocolError and ConfigError."""
        if connection.session is not None:
            raise ProtocolError("Hello comes once, as the first message of a connection")
        if connection.uid not in self._users:
            raise ConfigError(
                f"this socket is not for the user {connection.uid}; connect to that of this "
                "user's principal, or have the operator add one ([principals.NAME] with uid)"
            )
        connection.session = self._sessions.hello(hello, self._process(connection))
        self._late.pop(connection, None)
        first = self._sessions.first_plan(connection.session)
        welcome = msgspec.structs.replace(self._welcome, first=first)
        connection.send(encode(welcome, number), self._arena)
        self._sent(connection, 0)

    def _process(self, connection: Connection[Any]) -> Process:
        """Return the process that connected, by the pidfd that it passed, and watch for its end."""
        if not connection.passed:
            raise ProtocolError("no pidfd came with Hello: os.pidfd_open(os.getpid())")
        process = Process.of(connection.passed.pop(), connection.pid)
        known = self._processes.get((process.pid, process.start_time))
        if known is not None:
            process.close()
            return known
        self.watch_process(process)
        return process

    # ---- what goes out

    def _reply(self, connection: Connection[Any], number: int, message: Message) -> None:
        """Answer a request, from any thread; nothing where no answer is wanted."""
        if not number or connection.broken:
            return
        try:
            frame = encode(message, number)
        except ProtocolError as error:
            frame = encode(Failed("ProtocolError", str(error)), number)
        if threading.get_ident() == self._thread:
            self._send_posted()  # an answer does not overtake what was said before it
            self._send(connection, frame)
        else:
            self._posted.append((connection, frame))
            os.eventfd_write(self._bell, 1)

    def _send_posted(self) -> None:
        while self._posted:
            self._send(*self._posted.popleft())

    def _send(self, connection: Connection[Any], frame: bytes) -> None:
        """Send, or keep; a client that does not read is let go."""
        if connection.broken:
            return
        full = connection.waiting > self.limits.unread or self._unread > self.limits.total
        if connection.waiting and full:
            self._report.warn(f"process {connection.pid}", "it does not read its answers")
            self._drop(connection)
            return
        before = connection.waiting
        connection.send(frame)
        self._sent(connection, before)

    def _flush(self, connection: Connection[Any]) -> None:
        before = connection.waiting
        connection.flush()
        self._sent(connection, before)

    def _sent(self, connection: Connection[Any], before: int) -> None:
        """Count what waits, and have the loop say when the client takes more."""
        self._unread += connection.waiting - before
        if connection.broken or (connection.ending and not connection.waiting):
            self._drop(connection)
        elif bool(connection.waiting) is not connection.watched:
            connection.watched = not connection.watched
            self._lookout.change(connection.sock, writing=connection.watched)

    def _refuse(self, connection: Connection[Any], number: int, error: KvtierError) -> None:
        """Say why, read no more, and close when it is sent, or after seconds."""
        self._report.warn(f"process {connection.pid} is refused", str(error))
        connection.ending = True
        self._late[connection] = self._clock() + self.limits.seconds
        before = connection.waiting
        connection.send(failed(error, number))
        self._sent(connection, before)

    # ---- the end

    def _farewell(self) -> None:
        """Tell all clients that the daemon ends, and give them a second to read it."""
        if not self._deaf:
            self._lookout.drop(self._listening)
        self._send_posted()
        frame = encode(Closing())
        for connection in list(self._connections.values()):
            if connection.session is not None and not connection.ending:
                self._send(connection, frame)
        until = self._clock() + _FAREWELL
        while (left := until - self._clock()) > 0 and self._unread:
            for number, events in self._lookout.wait(left):
                found = self._connections.get(number)
                if found is not None and events & select.EPOLLOUT:
                    self._flush(found)
                elif found is not None:
                    self._drop(found)
            self._forget_gone()
