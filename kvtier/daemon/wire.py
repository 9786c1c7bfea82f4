"""One connection to a daemon: frames in and out, and the words that open it."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from kvtier import errors
from kvtier.clock import monotonic
from kvtier.daemon.answers import Closing, Failed, Welcome
from kvtier.daemon.frames import HEADER, decode, encode, open_frame
from kvtier.daemon.lookout import Hope
from kvtier.daemon.messages import Hello, Message
from kvtier.errors import ConfigError, KvtierError, ProtocolError

_BUFFER_BYTES: Final = 128 << 10
_AGAIN_SECONDS: Final = 0.05
_LEAST_SECONDS: Final = 0.1  # in which a daemon that is there can answer
_LOOK_SECONDS: Final = 0.0001
"""An answer is looked for so long before its thread sleeps: to wake up takes longer than most."""
_WANTING: Final = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE))


class Wire:
    """Frames over a connected stream socket. One thread at a time sends, one receives."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)  # noqa: FBT003  (no keyword)
        self._link = link
        self._poll_in = select.poll()
        self._poll_in.register(link, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(link, select.POLLOUT)
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._first = self._end = 0  # what has arrived and was not taken
        self._hope = Hope()
        self.unsent = bytearray()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._link.fileno()

    def put(self, frame: bytes, until: float) -> bool:
        """Send a frame, or what is left unsent; False when time runs out, and the rest is kept.

        Raises OSError once the other side is gone.
        """
        if not self.unsent:
            try:
                sent = self._link.send(frame)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return True
            frame = frame[sent:]
        self.unsent += frame
        while self.unsent:
            left = until - monotonic()
            if not self._poll_out.poll(max(left, 0) * 1e3) and left <= 0:
                return False
            try:
                del self.unsent[: self._link.send(self.unsent)]
            except BlockingIOError:
                continue
        return True

    def take(self, until: float, longer: float = 0.0) -> tuple[int, Message] | None:
        """Return the next message with its number; None when time runs out.

        longer: seconds to look for it before this sleeps, beyond those that any answer takes.
        Raises ConnectionError once the other side is gone or says so, ProtocolError, and what
        the daemon closes the connection for.
        """
        looks = until > 0 and self._hope.look()
        asleep = min(monotonic() + _LOOK_SECONDS + longer, until) if looks else 0.0
        while (found := self._complete()) is None:
            try:
                count = self._link.recv_into(self._view[self._end :])
            except BlockingIOError:
                now = monotonic()
                if now < asleep:
                    continue
                if looks:
                    self._hope.tell(found=False)
                    looks = False
                if not self._poll_in.poll(max(until - now, 0) * 1e3) and now >= until:
                    return None
                continue
            if not count:
                raise ConnectionResetError("the daemon has closed the connection")
            self._end += count
        if looks:
            self._hope.tell(found=True)
        if isinstance(found[1], Closing):
            raise ConnectionResetError("the daemon ends")
        if isinstance(found[1], Failed) and not found[0]:
            raise failure(found[1])
        return found

    def _complete(self) -> tuple[int, Message] | None:
        """Take a message out of what has arrived, if one is whole; make room for the next."""
        size, have = HEADER.size, self._end - self._first
        if have >= size:
            kind, length, number = open_frame(self._view[self._first : self._first + size])
            begin = self._first + size
            if have >= size + length:
                message = decode(kind, self._view[begin : begin + length])
                self._first = begin + length
                if self._first == self._end:
                    self._first = self._end = 0
                return number, message
            size += length
        if self._first or size > len(self._view):
            rest = bytes(self._view[self._first : self._end])
            if size > len(self._view):
                self._view = memoryview(bytearray(size))
            self._view[: len(rest)] = rest
            self._first, self._end = 0, len(rest)
        return None

    def feed(self, data: bytes) -> None:
        """Take in what was received before this wire was made of the socket."""
        self._view[: len(data)] = data
        self._end = len(data)

    def end(self) -> None:
        """End the connection for both sides and all copies of its descriptor. From any thread."""
        try:
            self._link.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was first

    def close(self) -> None:
        """Give the descriptor back: no other thread may use it then."""
        self.end()
        self._link.close()


def connect(path: str, hello: Hello, until: float) -> tuple[Wire, Welcome, int]:
    """Open a connection and greet; return it, the answer, and the arena's descriptor. Blocks.

    until: when all of that has to be done. Raises OSError where nobody listens or answers in time,
    ProtocolError for another version, and what the daemon refuses with.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    try:
        _give(link, until)
        link.connect(path)
        _greet(link, hello, until)
        _give(link, until)
        data, fds = _first_bytes(link)
        wire = Wire(link)
        wire.feed(data)
        welcome = _welcome(wire, len(fds), until)
        _check_arena(fds[0], welcome)
    except BaseException:
        link.close()
        for fd in fds:
            os.close(fd)
        raise
    return wire, welcome, fds[0]


def _give(link: socket.socket, until: float) -> None:
    """Let a socket wait no longer than that. Raises TimeoutError when it is over."""
    left = until - monotonic()
    if left <= 0:
        raise TimeoutError("the daemon does not answer")
    link.settimeout(left)


def wait_for_daemon(path: str, come_up: Callable[[float], None], timeout: float) -> None:
    """Call ``come_up`` until it raises no OSError. Blocks, `timeout` seconds at most.

    come_up: is told until when it may take.
    Raises ConfigError when the daemon does not come, or is another user's.
    """
    until = monotonic() + max(timeout, _LEAST_SECONDS)
    cause: OSError | None = None
    while True:
        try:
            come_up(until)
        except PermissionError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; a daemon's socket is for one user"
            ) from error
        except OSError as error:
            if error.errno in _WANTING:
                raise ConfigError(
                    f"this process cannot take part in the daemon at {path} ({error.strerror}); "
                    "raise its limits of memory and of open files (ulimit -v, ulimit -n)"
                ) from error
            if cause is None or not isinstance(error, TimeoutError):
                cause = error  # that time runs out at last says nothing of why
            left = until - monotonic()
            if left <= 0:
                raise ConfigError(
                    f"no daemon answers at {path} within {timeout:g} s ({cause}); start one with "
                    "`kvtier serve`, or see that the path or the engine's id is right"
                ) from error
            select.select([], [], [], min(_AGAIN_SECONDS, left))
        else:
            return


def _welcome(wire: Wire, fds: int, until: float) -> Welcome:
    """Read the answer to Hello."""
    found = wire.take(until)
    if found is None:
        raise TimeoutError("the daemon does not answer")
    if isinstance(found[1], Failed):
        raise failure(found[1])
    if not isinstance(found[1], Welcome) or fds != 1:
        raise ProtocolError(f"a {type(found[1]).__name__} with {fds} descriptors is no welcome")
    return found[1]


def _check_arena(fd: int, welcome: Welcome) -> None:
    """Raise ProtocolError for a descriptor that is not of the arena which was announced."""
    found = os.fstat(fd)
    if (found.st_ino, found.st_size) != (welcome.arena, welcome.nbytes) or not welcome.nbytes:
        raise ProtocolError(
            f"the daemon announces an arena of {welcome.nbytes} bytes, and passes another file, "
            f"of {found.st_size}"
        )


def _greet(link: socket.socket, hello: Hello, until: float) -> None:
    """Say hello, and hand over this process's descriptor."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        frame = encode(hello, 1)
        _give(link, until)
        sent = socket.send_fds(link, [frame], [pidfd])
        _give(link, until)
        link.sendall(frame[sent:])
    finally:
        os.close(pidfd)


def _first_bytes(link: socket.socket) -> tuple[bytes, list[int]]:
    """Return the first bytes of the answer, and the descriptors that come with them."""
    item = array.array("i").itemsize
    room = socket.CMSG_SPACE(4 * item)
    data, extra, _, _ = link.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, raw in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(raw[: len(raw) - len(raw) % item])
    if not data:
        for fd in fds:
            os.close(fd)
        raise ConnectionResetError("the daemon closed the connection without a word")
    return data, list(fds)


def failure(failed: Failed) -> KvtierError | TimeoutError:
    """Return the exception that an answer stands for."""
    kind = TimeoutError if failed.error == "TimeoutError" else getattr(errors, failed.error)
    error: KvtierError | TimeoutError = kind(failed.text)
    return error
