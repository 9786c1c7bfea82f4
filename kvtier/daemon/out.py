"""Plans that are out, and what each session is charged for them and for its leases.

The slots of a plan are let go when its session says that the copies have ended everywhere, or when
that session's process is dead, and each that serves its engine has ended the plan or is dead, too.
Until then nobody else gets the slots, whoever wants them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvtier.daemon.grants import Grants, Who

PLAN_BITS: Final = 36
"""A plan's id is the life of the server that issued it, and so many bits that count its plans."""

_LIFE_BITS: Final = 27
_MOST_OVER: Final = 4096  # engines that are told apart
_HANDLE_BITS: Final = 40


def first_plan(life: int) -> int:
    """Return the first id of a server's plans.

    No other server has these ids, also of an arena that comes after: what a rank says of a plan
    may be late, and is never to be taken for another plan's.
    """
    return life % (1 << _LIFE_BITS) << PLAN_BITS | 1


def handles(generation: int) -> Iterator[int]:
    """Count leases or desks of one server, so that none is named like an earlier one's."""
    return itertools.count(generation << _HANDLE_BITS | 1)


@dataclass(slots=True, eq=False)
class Out:
    """One plan. end: called once, with whether what it saved is whole. nbytes: of its slots.

    engine: whose members may execute it, besides `who`, whose session it is. orphan: whether that
    process is dead. ended: members that execute it no more.
    """

    plan: int
    session: bytes
    engine: bytes
    who: Who
    nbytes: int
    cells: int
    end: Callable[[bool], None]
    orphan: bool = False
    ended: set[Who] = field(default_factory=set)


class Outs:
    """All of one server, its predecessors' included. Called under the lock of Sessions."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants
        self._first = first_plan(grants.life)
        self._over: dict[bytes, int] = {}  # by engine, the last plan that ended with its scheduler
        self._all: dict[int, Out] = {}
        self._by_session: dict[bytes, dict[int, Out]] = {}
        self._members: dict[bytes, dict[Who, None]] = {}
        self._charged: dict[bytes, int] = {}
        self._cells: dict[bytes, int] = {}
        for engine, who in grants.members:
            self._members.setdefault(engine, {})[who] = None

    def __len__(self) -> int:
        """Plans that are out."""
        return len(self._all)

    # ---- what sessions are charged

    def charge(self, session: bytes, nbytes: int) -> None:
        """Charge a session so many bytes more, or less."""
        left = self._charged.get(session, 0) + nbytes
        if left:
            self._charged[session] = left
        else:
            self._charged.pop(session, None)

    def charged(self, session: bytes) -> int:
        """Return the bytes that a session is charged."""
        return self._charged.get(session, 0)

    def cells(self, session: bytes) -> int:
        """Return the cells of the grants that a session has out."""
        return self._cells.get(session, 0)

    # ---- plans

    def add(self, out: Out, slots: bytes) -> bool:
        """Write down a plan, and keep its slots until it ends; False when there is no room."""
        if not self._grants.add(out.plan, out.session, out.engine, out.who, slots):
            return False
        self.keep(out)
        return True

    def keep(self, out: Out) -> None:
        """Keep the slots of a plan that is written down."""
        self._all[out.plan] = out
        self._by_session.setdefault(out.session, {})[out.plan] = out
        self._cells[out.session] = self._cells.get(out.session, 0) + out.cells

    def settle(self, plan: int, session: bytes, *, ok: bool) -> None:
        """End a plan as its session says. Another's, or one that has ended, is left as it is."""
        out = self._all.get(plan)
        if out is not None and out.session == session:
            self._end(out, ok=ok)

    def resume(self, session: bytes, standing: Container[int]) -> None:
        """End all plans of a session but those that it says are out."""
        for plan, out in list(self._by_session.get(session, {}).items()):
            if plan not in standing:
                self._end(out, ok=False)

    def owner(self, session: bytes) -> Who | None:
        """Return the process of a session that has plans out; None for one that has none."""
        return next((out.who for out in self._by_session.get(session, {}).values()), None)

    def nbytes(self, connected: Container[bytes]) -> int:
        """Return the bytes in plans of sessions that are not connected."""
        return sum(out.nbytes for out in self._all.values() if out.session not in connected)

    def _end(self, out: Out, *, ok: bool) -> None:
        del self._all[out.plan]
        mine = self._by_session[out.session]
        del mine[out.plan]
        self._cells[out.session] -= out.cells
        if not mine:
            del self._by_session[out.session], self._cells[out.session]
        self._grants.drop(out.plan)
        out.end(ok)

    # ---- processes

    def enter(self, engine: bytes, who: Who) -> bool:
        """Take it that a process executes an engine's plans; False when there is no room."""
        if not self._grants.enter(engine, who):
            return False
        self._members.setdefault(engine, {})[who] = None
        return True

    def executable(self, engine: bytes) -> int:
        """Return from which plan on a process that enters now may execute an engine's plans.

        Earlier ones may be on their way to it, though their scheduler is dead and nobody else
        was left to execute them: so their slots are others' by now.
        """
        return max(self._first, self._over.get(engine, 0) + 1)

    def memberships(self, who: Who) -> int:
        """Return how many engines a process serves."""
        return sum(who in members for members in self._members.values())

    def processes(self) -> Iterable[Who]:
        """Return all processes that may execute a plan."""
        named = dict.fromkeys(out.who for out in self._all.values())
        for members in self._members.values():
            named |= members
        return named

    def ended(self, plan: int, engine: bytes, who: Who) -> None:
        """Note that a process, of that engine, executes a plan no more."""
        out = self._all.get(plan)
        if out is not None and out.engine == engine and who not in out.ended:
            out.ended.add(who)
            self._grants.ended(plan, who)
            self._look_at(out)

    def died(self, who: Who) -> None:
        """Note that a process executes nothing any more."""
        for engine, members in list(self._members.items()):
            if who in members:
                self._grants.remove(engine, who)
                del members[who]
                if not members:
                    del self._members[engine]
        for out in list(self._all.values()):
            out.orphan |= out.who == who
            self._look_at(out)

    def _look_at(self, out: Out) -> None:
        """End a plan that nobody executes any more."""
        members = self._members.get(out.engine, {})
        if out.orphan and all(who in out.ended for who in members):
            self._over[out.engine] = max(self._over.get(out.engine, 0), out.plan)
            if len(self._over) > _MOST_OVER:
                self._first = max(self._first, *self._over.values()) + 1
                self._over.clear()
            self._end(out, ok=False)
