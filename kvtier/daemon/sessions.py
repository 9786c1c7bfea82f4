"""Sessions: the daemon's clients, what each of them holds, and how all of that ends.

No sockets here: the server hands over decoded messages, and says which connection has closed and
which process has ended. A lease or a pin ends by release, by its deadline, or when the session's
last connection closes. What is in a plan that went out stays until its copies have ended: see
``out``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.clock import Clock
from kvtier.daemon.answers import Welcome
from kvtier.daemon.calls import Calls
from kvtier.daemon.errands import Reply
from kvtier.daemon.grants import Grant, Grants, Who, cells_for
from kvtier.daemon.holds import Holds
from kvtier.daemon.messages import Hello, Message
from kvtier.daemon.out import Out, Outs, first_plan, handles
from kvtier.daemon.process import Process
from kvtier.daemon.prompts import Recall
from kvtier.daemon.session import Session
from kvtier.depot import Depot
from kvtier.errors import ConfigError, KvtierError, MisuseError, ProtocolError
from kvtier.memory.arena import Slot
from kvtier.recorder import Recorder

__all__ = ["Session", "Sessions"]

_SESSIONS: Final = 4096
_SESSIONS_OF_ONE: Final = 256  # of one process
_CONNECTIONS: Final = 10_000
_CONNECTIONS_OF_ONE: Final = 16  # of one session
_ENGINES_OF_ONE: Final = 64  # that one process serves
_log = logging.getLogger("kvtier")


class Sessions:
    """All sessions of one server. Calls never block; the server makes them from one thread.

    depot: opened for this; it is closed with this, and so are the grants. share: of the arena that
    one session may hold by leases and plans, less pins, which have a limit of their own.
    again: finds the process of a number and a start time. turns: called by every ``tick``.
    recorder: of what all clients ask; it is closed with this, too.
    """

    def __init__(
        self,
        depot: Depot,
        grants: Grants,
        clock: Clock,
        *,
        share: float = 0.5,
        again: Callable[[int, int], Process] = Process.again,
        turns: Sequence[Callable[[], object]] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._turns = turns
        self._depot = depot
        self._grants = grants
        self._lock = threading.RLock()
        self._all: dict[bytes, Session] = {}
        self._connections = 0
        self._closed = False
        self._outs = Outs(grants)
        self._recall = Recall()
        self._slots: dict[Slot, int] = {}  # that earlier servers granted: in how many plans
        depot.plan_ids = itertools.count(first_plan(grants.life))
        depot.cache_numbers = handles(grants.generation)
        for grant in grants.left:
            self._take_over(grant)
        self._watched = [again(*who) for who in self._outs.processes()]
        for process in self._watched:
            if process.dead:
                self._outs.died(_who(process))
        leases = handles(grants.generation)
        self._holds = Holds(depot, self._outs, leases, self._lock, clock, share)
        self._recorder = recorder
        self._calls = Calls(depot, self._outs, self._all, self._lock, self._holds, recorder)

    # ---- what earlier servers granted

    def _take_over(self, grant: Grant) -> None:
        """Keep the slots of a plan that went out from an earlier server."""
        for slot in grant.slots:
            if slot not in self._slots:
                self._depot.arena.adopt(slot)
            self._slots[slot] = self._slots.get(slot, 0) + 1
        nbytes = sum(slot.nbytes for slot in grant.slots)
        cells = cells_for(bytes(24 * len(grant.slots)))

        def end(ok: bool) -> None:  # noqa: FBT001  (see Out)
            del ok  # nothing is published: its index is gone
            self._outs.charge(grant.session, -nbytes)
            for slot in grant.slots:
                self._slots[slot] -= 1
            over = [slot for slot in grant.slots if not self._slots[slot]]
            for slot in over:
                del self._slots[slot]
            self._depot.catalog.give_back(over)

        out = Out(
            grant.plan, grant.session, grant.engine, grant.who, nbytes, cells, end,
            ended=set(grant.ended),
        )  # fmt: skip
        self._outs.charge(grant.session, nbytes)
        self._outs.keep(out)

    def watched(self) -> list[Process]:
        """Return the processes that may still use what earlier servers granted, to be watched."""
        return [process for process in self._watched if not process.dead]

    # ---- life of a session

    @property
    def welcome(self) -> Welcome:
        """The answer to a Hello that was taken."""
        depot = self._depot
        return Welcome(
            self._grants.generation, depot.arena.id, depot.arena.nbytes, tuple(depot.numbers)
        )

    def hello(self, hello: Hello, process: Process) -> Session:
        """Take one more connection of a session, a new one or one that is known.

        Raises ProtocolError for a session of another process, or another role, and ConfigError
        where there are too many.
        """
        who = _who(process)
        with self._lock:
            if self._closed:
                raise ConfigError("the daemon ends; connect again when it is back")
            if process.dead:
                raise ProtocolError(f"process {process.pid}, which says Hello, has ended")
            session = self._all.get(hello.session)
            owner = session.who if session else self._outs.owner(hello.session)
            if owner is not None and owner != who:
                raise ProtocolError(
                    f"this session is process {owner.pid}'s; each process draws 16 bytes of its own"
                )
            self._check_room(session, who)
            engine = _digest(hello.engine or hello.session.hex())
            if session is None:
                if hello.role == "worker":
                    self._enter(engine, who)
                session = Session(hello.session, engine, who, hello.role, self._recall)
                self._all[hello.session] = session
            elif (session.engine, session.role) != (engine, hello.role):
                raise ProtocolError("the connections of one session have one engine and one role")
            session.connections += 1
            self._connections += 1
            return session

    def first_plan(self, session: Session) -> int:
        """Return from which plan on this client may copy: see ``Outs.executable``."""
        with self._lock:
            return self._outs.executable(session.engine) if session.role == "worker" else 0

    def _check_room(self, session: Session | None, who: Who) -> None:
        full = self._connections >= _CONNECTIONS
        if session is None:
            mine = sum(one.who == who for one in self._all.values())
            full = full or len(self._all) >= _SESSIONS or mine >= _SESSIONS_OF_ONE
        else:
            full = full or session.connections >= _CONNECTIONS_OF_ONE
        if full:
            raise ConfigError(
                f"{len(self._all)} sessions on {self._connections} connections are as many as this "
                f"daemon takes of process {who.pid}, or of all; close some"
            )

    def _enter(self, engine: bytes, who: Who) -> None:
        """Take it, before it has the arena, that a worker may execute its engine's plans."""
        if self._outs.memberships(who) >= _ENGINES_OF_ONE or not self._outs.enter(engine, who):
            raise ConfigError(
                f"process {who.pid} serves too many engines, or too many processes serve one; "
                "end some"
            )

    def handle(self, session: Session, message: Message, reply: Reply) -> None:
        """Do what a client asks. `reply` is called any number of times, now or later.

        It may be called from another thread, and under a lock: it must not call this object.
        Raises ProtocolError for what a sound client never says, and another KvtierError for what
        is refused.
        """
        with self._lock:
            if session.over:
                raise MisuseError("this session has ended; say Hello again")
            try:
                self._calls.take(session, message, reply)
            except KvtierError:
                raise
            except Exception as error:
                _log.exception("a %s failed", type(message).__name__)
                raise MisuseError(
                    f"the daemon failed at it ({type(error).__name__}); see its log"
                ) from error

    def closed(self, session: Session) -> None:
        """Note that one of a session's connections has closed; with the last one it ends."""
        with self._lock:
            self._connections -= 1
            session.connections -= 1
            if not session.connections:
                self._end(session)

    def died(self, process: Process) -> None:
        """Note that a process has ended: its sessions have, and it executes no plan any more."""
        who = _who(process)
        with self._lock:
            if self._closed:
                return
            for session in [one for one in self._all.values() if one.who == who]:
                self._end(session)
            self._outs.died(who)
            self._watched = [one for one in self._watched if _who(one) != who]

    def _end(self, session: Session) -> None:
        """End what a session holds, but not what is in plans."""
        if session.over:
            return
        session.over = True
        self._calls.let_go(session)
        self._recall.forget(session.token)
        del self._all[session.token]

    def tick(self) -> None:
        """Forget leases whose deadline has passed. Called a few times a second."""
        for turn in self._turns:
            turn()
        with self._lock:
            for session in self._all.values():
                self._holds.look_at(session)

    def rest(self) -> bool:
        """Mark one chain that was used, while nobody asks; say whether there are more."""
        return self._depot.catalog.rest()

    def close(self) -> None:
        """End all sessions; write down what waits, and close the depot. Blocks, bounded.

        Plans that are out stay in the grants.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for session in list(self._all.values()):
                self._end(session)
        self._calls.close()
        if self._recorder is not None:
            self._recorder.close()
        self._depot.leave()
        with self._lock:
            self._grants.close()

    def figures(self) -> dict[str, float]:
        """Return all metrics, gauges brought up to date."""
        with self._lock:
            return self._calls.figures()


def _who(process: Process) -> Who:
    return Who(process.pid, process.start_time)


@functools.lru_cache(64)
def _digest(engine: str) -> bytes:
    return hashlib.sha256(engine.encode()).digest()[:16]
