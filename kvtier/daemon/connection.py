"""One client's connection as the server sees it: what has come in, what has to go out."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from typing import Final, Generic, TypeVar

from kvtier.daemon import messages
from kvtier.daemon.frames import HEADER, KINDS, open_frame
from kvtier.errors import ProtocolError

S = TypeVar("S")

_PEER: Final = struct.Struct("iII")  # unix(7), struct ucred
_ASKED: Final = {number for number, kind in KINDS.items() if kind.__module__ == messages.__name__}
_ONE: Final = socket.CMSG_LEN(struct.calcsize("i"))


class Connection(Generic[S]):
    """A socket that does not block. session: of its Hello, None before that.

    pid, uid: of the process that connected. waiting: bytes that go out when the client reads.
    incoming: bytes of frames that are not dealt with yet.
    """

    __slots__ = (
        "_out",
        "broken",
        "ending",
        "incoming",
        "mute",
        "passed",
        "pid",
        "session",
        "sock",
        "uid",
        "waiting",
        "watched",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        self.pid, self.uid, _ = _PEER.unpack(peer)
        self.session: S | None = None
        self.incoming = bytearray()
        self.passed: list[int] = []  # descriptors that came, at most one
        self.waiting = 0
        self.watched = False  # for when it can be written
        self.broken = False  # it goes as soon as the loop comes to it
        self.mute = False  # nobody reads there any more; what was said before still counts
        self.ending = False  # nothing more is read; it goes when all is sent
        self._out: deque[memoryview] = deque()

    def read(self, into: memoryview) -> int:
        """Take what has arrived, once; return how much that was, 0 for nothing now.

        into: what it may be put in meanwhile. Raises EOFError at the end.
        """
        try:
            first = self.session is None
            count = self._read_first(into) if first else self.sock.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise EOFError from error
        if not count:
            raise EOFError
        self.incoming += into[:count]
        return count

    def _read_first(self, into: memoryview) -> int:
        """Take bytes and a descriptor; of several the system keeps what we have no room for."""
        flags = socket.MSG_CMSG_CLOEXEC
        count, control, _, _ = self.sock.recvmsg_into([into], _ONE, flags)
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) // numbers.itemsize * numbers.itemsize])
                self.passed += numbers
        if len(self.passed) > 1:
            raise EOFError
        return count

    def frame(self) -> tuple[int, int, bytes] | None:
        """Take the next frame: its kind, number and body; None when it is not whole yet.

        Raises ProtocolError for what no client says, as soon as its header has come.
        """
        size = HEADER.size
        if len(self.incoming) < size:
            return None
        kind, length, number = open_frame(bytes(self.incoming[:size]))
        if self.session is None and kind != messages.Hello.KIND:
            raise ProtocolError("the first message of a connection is Hello")
        if kind not in _ASKED:
            raise ProtocolError(f"a {KINDS[kind].__name__} is said by the daemon, not to it")
        if len(self.incoming) < size + length:
            return None
        body = bytes(self.incoming[size : size + length])
        del self.incoming[: size + length]
        return kind, number, body

    @property
    def more(self) -> bool:
        """Whether ``frame`` should be asked again: a frame is whole, or none."""
        size = HEADER.size
        if len(self.incoming) < size:
            return False
        try:
            _, length, _ = open_frame(bytes(self.incoming[:size]))
        except ProtocolError:
            return True
        return len(self.incoming) >= size + length

    def send(self, frame: bytes, descriptor: int | None = None) -> None:
        """Send a frame, or keep what the client does not take now."""
        if self.mute:
            return
        rest = memoryview(frame)
        if not self._out:
            try:
                if descriptor is None:
                    sent = self.sock.send(rest)
                else:
                    sent = socket.send_fds(self.sock, [rest], [descriptor])
            except BlockingIOError:
                sent = 0
            except OSError:
                self._fall_silent()
                return
            rest = rest[sent:]
        if rest:
            self._out.append(rest)
            self.waiting += len(rest)

    def flush(self) -> None:
        """Send what waits, as far as the client takes it."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self._out:
                    first = self._out[0]
                    sent = self.sock.send(first)
                    self.waiting -= sent
                    if sent == len(first):
                        self._out.popleft()
                    else:
                        self._out[0] = first[sent:]
            except BlockingIOError:
                raise
            except OSError:
                self._fall_silent()

    def _fall_silent(self) -> None:
        self.mute = True
        self._out.clear()
        self.waiting = 0

    def close(self) -> None:
        """Close the socket and what came over it."""
        self.broken = True
        self.sock.close()
        for number in self.passed:
            os.close(number)
        self.passed.clear()
        self._out.clear()
        self.incoming.clear()
