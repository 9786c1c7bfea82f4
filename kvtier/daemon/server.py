"""``python -m kvtier.daemon.server``: one principal's catalog, tiers and loop, in one process.

Its supervisor starts it, with all that outlives it as inherited descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from kvtier.clock import epoch, monotonic
from kvtier.daemon.grants import Grants
from kvtier.daemon.health import Watch
from kvtier.daemon.limits import descriptors
from kvtier.daemon.logs import set_up
from kvtier.daemon.loop import Server
from kvtier.daemon.pulse import Pulse
from kvtier.daemon.sessions import Sessions
from kvtier.daemon.settings import Ails, Settings, Started
from kvtier.depot import Depot
from kvtier.errors import KvtierError
from kvtier.memory.arena import Arena
from kvtier.recorder import Recorder
from kvtier.seams import ThreadFlow

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_GARBAGE: Final = 50_000  # objects until the collector looks; CPython: 700
_MOST_SETTINGS: Final = 16 << 20


def main() -> int:
    """Serve until SIGTERM; return the exit status.

    Arguments: the numbers of the descriptors of the listening socket, arena, grants, settings and
    of the link to the supervisor; the supervisor's process; and how many servers have ended there,
    and how many have hung.
    """
    listening, arena, grants, settings, link, parent, ended_so, hung_so = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    set_up()
    for number in (signal.SIGINT, signal.SIGHUP):  # blocked so far: the terminal's
        signal.signal(number, signal.SIG_IGN)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with socket.socket(fileno=link) as told, socket.socket(fileno=listening) as door:
        pulse = Pulse(told, monotonic)
        try:
            wanted = Settings.decode(os.pread(settings, _MOST_SETTINGS, 0))
            descriptors()  # as many as may be, before there is one for each process of before
            again = ended_so + hung_so > 0
            depot = pulse.through(functools.partial(_depot, wanted, arena, again=again))
            pulse.flow = depot.flow
            table = Grants(grants, depot.arena.id)
            health = Watch(depot.troubles, functools.partial(_tell, told))
            turns = (pulse.beat, health.turn)
            sessions = Sessions(
                depot,
                table,
                monotonic,
                share=wanted.share,
                turns=turns,
                recorder=_recorder(wanted, depot, again=again),
            )
            server = Server(door, sessions, sessions.welcome, arena, wanted.uid, monotonic)
        except (KvtierError, OSError, MemoryError) as error:
            told.send(msgspec.json.encode(Started(wrong=_wrong(error))))
            return 1
        depot.metrics.add("server_restarts", ended_so, reason="ended")
        depot.metrics.add("server_restarts", hung_so, reason="hung")
        _give_back()
        # What is there stays; and leases come and go by the thousand, but in no cycles.
        gc.freeze()
        gc.set_threshold(_GARBAGE)
        server.watch(link, _orphaned)
        for process in sessions.watched():
            server.watch_process(process)
        signal.signal(signal.SIGTERM, lambda *_: server.end())
        if ended.is_set():
            server.end()
        welcome = sessions.welcome
        told.send(msgspec.json.encode(Started(welcome.generation, os.getpid(), welcome.tiers)))
        server.serve()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pulse.through(sessions.close)
        server.close()
    return 0


def _depot(settings: Settings, arena: int, *, again: bool) -> Depot:
    """Open the tiers. again: a server before this one had them open. Blocks."""
    config = settings.config()
    memory = Arena(0, fd=os.dup(arena), nodes=config.numa)
    return Depot.open(config, monotonic, ThreadFlow(), memory, again=again)


def _recorder(settings: Settings, depot: Depot, *, again: bool) -> Recorder | None:
    """Begin, or go on with, the recording. again: a server before this one could write it."""
    if settings.record is None:
        return None
    made = settings.record, depot.flow, depot.metrics, monotonic, epoch()
    return Recorder(*made, again=again)


def _tell(link: socket.socket, troubles: Mapping[str, str]) -> bool:
    """Tell the supervisor what is not served; False while it does not listen."""
    try:
        link.send(msgspec.json.encode(Ails(dict(troubles))), socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def _give_back() -> None:
    """Give the system back what opening took and does not need: a tenth of an index, as a rule."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def _wrong(error: Exception) -> str:
    """Say why it cannot serve."""
    if isinstance(error, KvtierError):
        return str(error)
    why = (isinstance(error, OSError) and error.strerror) or "no memory is left"
    return (
        f"the server cannot be set up ({why}); raise its limits of memory and of open files "
        "(ulimit -v, ulimit -n; LimitAS=, LimitNOFILE=)"
    )


def _orphaned() -> None:
    """End at once: the supervisor is gone, and the memory with it."""
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
