"""The supervisor: it holds what outlives a server, and starts the server again when that dies.

It has no catalog, and reads nothing that a client sends. It holds the listening socket, so that
clients who come while there is no server wait for the next one; the arena, so that its memory is
there once; and the table of grants, which clients cannot reach.

A server ends with it, however it ends: by the parent-death signal of the thread that started it,
which stays, and by the socket between both, which closes. A server that hangs is killed: it has
a pulse, see ``pulse``, and is silent then.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvtier.clock import Clock, monotonic
from kvtier.daemon.grants import make_grants
from kvtier.daemon.place import Place
from kvtier.daemon.pulse import BEAT, BEAT_SECONDS, Silence
from kvtier.daemon.settings import Ails, Down, Settings, Started
from kvtier.errors import ConfigError
from kvtier.memory.sealed import PAGE_BYTES, sealed_memory
from kvtier.seams import Future, IoPool

_DELAYS: Final = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0)  # seconds before a server starts again
_LIVED: Final = 1.0  # seconds of service after which the first of them applies again
_END_SECONDS: Final = 40.0  # what a server may take to write down what waits; then it is killed
_MISSED: Final = 10  # beats in a row that a server which hangs has not given
_MISSED_AT_END: Final = 5
_HUNG: Final = "the server hangs, or was stopped; it is killed"
_LATE: Final = "the server does not end in time; it is killed"
_log = logging.getLogger("kvtier")

Tell = Callable[[Started | Ails | Down], None]


class Supervisor:
    """One principal's daemon: takes path and memory when it is made. See ``start``.

    tell: called by the supervising thread whenever a server has started, has ended though nobody
    wished it, does not serve all of its tiers, or serves them again.
    program: what runs a server, after the Python that it runs in.
    Raises ConfigError for a path that another daemon has, and for more memory than there is.
    """

    program: tuple[str, ...] = ("-P", "-m", "kvtier.daemon.server")

    def __init__(
        self,
        settings: Settings,
        path: str | Path,
        *,
        tell: Tell | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.settings = settings
        self.server = 0  # its process, 0 while there is none
        config = settings.config()
        self.nbytes = config.dram // PAGE_BYTES * PAGE_BYTES
        self._tell = tell
        self._clock = clock
        self._ending = threading.Event()
        self._owner = os.getpid()
        self._first: Future[Started] = Future()
        self._pool = IoPool("supervisor", 1)
        self._open: list[int] = []
        self._restarts = {"ended": 0, "hung": 0}
        self.place = Place(path, settings.uid)
        try:
            self._arena = self._keep(sealed_memory(config.dram))
            self._grants = self._keep(make_grants())
            self._settings = self._keep(os.memfd_create("kvtier-settings", os.MFD_CLOEXEC))
            os.pwrite(self._settings, settings.encode(), 0)
            self._bell = self._keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError as error:
            self._release()
            raise ConfigError(
                f"the daemon cannot be set up ({error.strerror}); free memory or descriptors"
            ) from error
        except BaseException:
            self._release()
            raise
        _running.append(self)

    @property
    def path(self) -> Path:
        """Where clients connect."""
        return self.place.path

    def start(
        self, timeout: float | None = None, ended: Callable[[], object] | None = None
    ) -> Started:
        """Start the server, and go on starting it, on a thread that stays. Blocks until it serves.

        See ``begin``, and ``wait``.
        """
        self.begin(ended)
        return self.wait(timeout)

    def begin(self, ended: Callable[[], object] | None = None) -> None:
        """Begin to start the server. ended: called by that thread when the daemon has ended."""
        self._done = self._pool.submit(self._run)
        if ended is not None:
            self._done.add_done_callback(lambda _: ended())

    def wait(self, timeout: float | None = None) -> Started:
        """Wait until the server serves. Blocks.

        Raises ConfigError for what it cannot be started with, CancelledError where it is to end
        before that, and TimeoutError; all is closed then.
        """
        try:
            return self._first.result(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def failed(self) -> bool:
        """Whether it has ended by a defect, and not in order."""
        return self._done.done() and self._done.exception() is not None

    def end(self) -> None:
        """Have the server end in order, from any thread. Returns at once; ``close`` waits."""
        self._ending.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End in order, and let everything go. Waits for the server, bounded. Idempotent."""
        if os.getpid() != self._owner or self not in _running:
            return
        self.end()
        self._pool.close(_END_SECONDS + 5)
        _running.remove(self)
        self._release()

    # ---- the thread that stays

    def _run(self) -> None:
        # A server inherits that: the terminal's word to all of its group is the supervisor's.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
        failed = 0
        try:
            while not self._ending.is_set():
                started = self._clock()
                try:
                    why = self._serve_once()
                except OSError as error:  # no process, no descriptor
                    why = (
                        f"{sys.executable} cannot be started ({error.strerror}); see that this "
                        "user may run it, and raise the limits of processes and open files "
                        "(TasksMax=, LimitNOFILE=)"
                    )
                if self._ending.is_set():
                    if why in {_HUNG, _LATE}:
                        _log.warning("%s: %s, and what waited is not written down", self.path, why)
                    return
                if not self._first.done():
                    self._first.set_exception(ConfigError(why))
                    return
                self._restarts["hung" if why is _HUNG else "ended"] += 1
                failed = 0 if self._clock() - started > _LIVED else failed + 1
                delay = _DELAYS[min(failed, len(_DELAYS) - 1)]
                _log.warning("%s: %s; it starts again", self.path, why)
                if self._tell is not None:
                    self._tell(Down(why))
                self._rest(delay)
        except Exception:
            _log.exception("%s: the supervisor fails, and its server ends with it", self.path)
            raise
        finally:
            self.place.remove()
            if self._ending.is_set():
                self._first.cancel()  # where nothing has come of it
            elif not self._first.done():
                self._first.set_exception(ConfigError("the daemon ended before it served"))

    def _rest(self, seconds: float) -> None:
        """Wait, unless it is to end."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.poll(seconds * 1000)

    def _serve_once(self) -> str:
        """Start a server, and see to it until it has ended; return why it did."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._spawn(theirs.fileno())
            try:
                pidfd = os.pidfd_open(process.pid)
            except OSError:  # it must not outlive the next one's start
                process.kill()
                process.wait()
                raise
            self.server = process.pid
            try:
                said = self._watch(ours, pidfd)
            finally:
                self.server = 0
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
                status = process.wait()
        if status == 0:  # somebody ended it in order
            self._ending.set()
        return said or _why(status, first=not self._first.done())

    def _spawn(self, link: int) -> subprocess.Popen[bytes]:
        numbers = [self.place.socket.fileno(), self._arena, self._grants, self._settings, link]
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(  # noqa: S603  (our own command)
            [sys.executable, *self.program, *map(str, [*numbers, *self.facts])],
            pass_fds=numbers,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=_errors(),
            stderr=_errors(),
        )

    @property
    def facts(self) -> tuple[int, ...]:
        """What a server is told in numbers: this process, and why others before it are no more."""
        return os.getpid(), *self._restarts.values()

    def _watch(self, link: socket.socket, pidfd: int) -> str:
        """Wait until the server has ended, or hangs; return what is wrong, if anything."""
        poll = select.poll()
        for number in (link.fileno(), pidfd, self._bell):
            poll.register(number, select.POLLIN)
        wrong, until, silence = "", math.inf, Silence()
        while True:
            left = min(BEAT_SECONDS, max(until - self._clock(), 0.0))
            ready = [number for number, _ in poll.poll(left * 1000)]
            if link.fileno() in ready:
                said = link.recv(1 << 16)
                if not said:
                    poll.unregister(link.fileno())
                else:
                    silence.broken()
                    wrong = self._heard(said) if said != BEAT else wrong
            elif pidfd in ready:
                return wrong
            if self._bell in ready:
                poll.unregister(self._bell)
                self.place.remove()
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # it may be stopped
                until = self._clock() + _END_SECONDS
            if not ready:
                silence.lasts()
            if silence.beats >= (_MISSED if until == math.inf else _MISSED_AT_END):
                return _HUNG
            if self._clock() >= until:
                return _LATE

    def _heard(self, said: bytes) -> str:
        """Take what the server says: that it serves, and what not, or why it cannot."""
        told = msgspec.json.decode(said, type=Started | Ails)
        if isinstance(told, Started) and told.wrong:
            return told.wrong
        if isinstance(told, Started) and not self._first.done():
            self._first.set_result(told)
        if self._tell is not None:
            self._tell(told)
        return ""

    # ---- what is open

    def _keep(self, number: int) -> int:
        self._open.append(number)
        return number

    def _release(self) -> None:
        self.place.close()
        while self._open:
            os.close(self._open.pop())

    def forget(self) -> None:
        """In a forked child: close what is open here, and leave the daemon to the parent."""
        self.place.let_go()
        while self._open:
            os.close(self._open.pop())


def _why(status: int, *, first: bool) -> str:
    """Say how a server ended. first: before it ever served."""
    if status >= 0:
        return f"the server ended with status {status}; see what it wrote"
    why = f"the server was ended by signal {-status}"
    if first and -status in {signal.SIGKILL, signal.SIGBUS}:
        why += "; is the memory limit (MemoryMax=, memory.max) below dram? Ask for less"
    return why


def _errors() -> int:
    """Return where a server writes: this process's standard error, if it has one.

    What has its number else was opened here: no child inherits it, whose arena would get the number
    and what is printed.
    """
    try:
        has_one = os.get_inheritable(2)
    except OSError:
        has_one = False
    return 2 if has_one else subprocess.DEVNULL


_running: list[Supervisor] = []


def _forget_all() -> None:
    while _running:
        _running.pop().forget()


os.register_at_fork(after_in_child=_forget_all)
