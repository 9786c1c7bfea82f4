"""Holds: what sessions get of the arena, by lease or by plan. Under Sessions' lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import numpy as np

from kvtier.catalog.catalog import Part
from kvtier.catalog.lease import Lease
from kvtier.checks import check_ahead, check_wait, is_number
from kvtier.clock import Clock
from kvtier.daemon import answers, messages
from kvtier.daemon.busy import Busy
from kvtier.daemon.errands import Reply
from kvtier.daemon.grants import CELLS, cells_for
from kvtier.daemon.out import Out, Outs
from kvtier.daemon.prompts import weight
from kvtier.daemon.session import Holding, Session
from kvtier.depot import Depot
from kvtier.desk import Issued, Match
from kvtier.errors import KvtierError, ProtocolError
from kvtier.identity.record import KEY_BYTES, record_id
from kvtier.local import LocalDesk
from kvtier.memory.arena import Slot
from kvtier.memory.packed import pack_slots
from kvtier.prefix import Prefix
from kvtier.retention import Term
from kvtier.seams import CancelledError, Future

T = TypeVar("T")

_LEASES: Final = 4096  # of one session
_FETCHES: Final = 256  # of one process, under way
_ALL_FETCHES: Final = 1024
_NONE: Final = answers.Leased(0, 0, 0, b"", b"", 0.0)
_log = logging.getLogger("kvtier")


class Holds:
    """Leases, fetches and plans of all sessions.

    numbers: of leases.
    share: of the arena that one session may hold by leases and plans; beyond it a lease is none,
    and a save is refused as busy. Pins have a limit of their own, with the Catalog.
    """

    def __init__(
        self,
        depot: Depot,
        outs: Outs,
        numbers: Iterator[int],
        lock: AbstractContextManager[Any],
        clock: Clock,
        share: float,
    ) -> None:
        self._depot = depot
        self._outs = outs
        self._lock = lock
        self._clock = clock
        self._most_bytes = int(share * depot.arena.nbytes)
        self._most_cells = int(share * CELLS)
        self._numbers = numbers
        self._busy = Busy(_FETCHES, _ALL_FETCHES)

    def _spare(self, session: Session) -> int:
        """Return the bytes that a session may hold beside what it does."""
        return self._most_bytes - self._outs.charged(session.token)

    # ---- leases

    def lease(
        self,
        session: Session,
        desk: LocalDesk,
        match: Match,
        message: messages.Lease,
        reply: Reply,
    ) -> None:
        """Lease what a match needs, all in DRAM; answer at once."""
        check_ahead("a lease's deadline", message.seconds)
        lease = None
        if len(session.holdings) < _LEASES:
            lease = desk.lease(match, message.first, message.seconds)
        reply(self._leased(session, desk, lease))

    def fetch(
        self,
        session: Session,
        desk: LocalDesk,
        match: Match,
        message: messages.Fetch,
        reply: Reply,
    ) -> None:
        """Bring up what a match needs, and lease it; answer when that has come."""
        check_ahead("a lease's deadline", message.hold)
        check_wait("a timeout", message.within)
        size = weight(match.prefix)
        if not self._begin(session, size):
            reply(_NONE)
            return
        running = self._spawned(
            session,
            size,
            lambda: desk.fetch(
                match, message.first, within=message.within, hold=message.hold, pin=message.pin
            ),
        )

        def arrived(done: Future[Lease | None]) -> None:
            with self._lock:
                self._busy.end(session.who, size)
                lease = _result(done)
                if session.desks.get(desk.number) is not desk:  # it has ended meanwhile
                    if lease is not None and lease.held:
                        lease.release()
                    lease = None
                reply(self._leased(session, desk, lease))

        running.add_done_callback(arrived)

    def prefetch(
        self, session: Session, desk: LocalDesk, match: Match, within: float, reply: Reply
    ) -> None:
        """Bring up what a match needs, and hold nothing; answer when that has ended."""
        check_wait("a prefetch's budget", within)
        size = weight(match.prefix)
        if not self._begin(session, size):
            reply(answers.Count(0))
            return

        def ended(done: Future[int | None]) -> None:
            with self._lock:
                self._busy.end(session.who, size)
                reply(answers.Count(_result(done) or 0))

        self._spawned(session, size, lambda: desk.prefetch(match, within)).add_done_callback(ended)

    def _begin(self, session: Session, size: int) -> bool:
        """Count a fetch in, unless too many are under way, or this session holds too much."""
        return len(session.holdings) < _LEASES and self._busy.begin(session.who, size)

    def _spawned(self, session: Session, size: int, start: Callable[[], Future[T]]) -> Future[T]:
        try:
            return start()
        except KvtierError:  # the daemon ends
            self._busy.end(session.who, size)
            raise

    def _leased(self, session: Session, desk: LocalDesk, lease: Lease | None) -> answers.Leased:
        """Keep a lease for its session, and return the answer; none that is too much for it."""
        if lease is None or not lease.held:
            return _NONE
        holding = Holding(next(self._numbers), lease, desk)
        if len(session.holdings) >= _LEASES or holding.weight > self._spare(session):
            lease.release()
            self._depot.metrics.add("refused_holds")
            return _NONE
        session.holdings[holding.number] = holding
        self._weigh(session.token, holding)
        return answers.Leased(
            holding.number,
            lease.tokens,
            lease.first,
            _numbered(lease.sources, self._depot.numbers),
            lease.packed,
            max(lease.deadline - self._clock(), 0.0),
        )

    def renew(self, session: Session, message: messages.Renew, reply: Reply) -> None:
        """Move the deadline of a lease; False for one that has ended."""
        holding = session.holdings.get(message.lease)
        reply(answers.Told(holding is not None and holding.lease.renew(message.seconds)))

    def release(self, session: Session, holding: Holding) -> None:
        """End a lease."""
        if holding.lease.held:
            holding.lease.release()
        del session.holdings[holding.number]
        self._weigh(session.token, holding)

    def look_at(self, session: Session) -> None:
        """Forget the leases whose deadline has passed."""
        for holding in [one for one in session.holdings.values() if not one.lease.held]:
            del session.holdings[holding.number]
            self._weigh(session.token, holding)

    def _weigh(self, token: bytes, holding: Holding) -> None:
        """Charge a session what it holds by a lease now."""
        weight = holding.weight
        self._outs.charge(token, weight - holding.charged)
        holding.charged = weight

    # ---- plans

    def issue(self, session: Session, desk: LocalDesk, lease_number: int) -> int:
        """Let a plan of a lease go out; return its id, 0 when the lease has ended."""
        holding = session.holdings.get(lease_number)
        if holding is None:
            return 0
        more = holding.nbytes - holding.charged  # a pin counts from its first plan on
        cells = cells_for(holding.lease.packed)
        if more > self._spare(session) or not self._have(session, cells):
            self._depot.metrics.add("refused_holds")
            return 0
        lease, token = holding.lease, session.token
        plan = desk.issue(lease)
        if not plan:
            return 0

        def end(ok: bool) -> None:  # noqa: FBT001  (see Out)
            holding.plans -= 1
            desk.settle(plan, lease, ok=ok)
            self._weigh(token, holding)

        holding.plans += 1
        self._weigh(token, holding)
        return self._sent(session, plan, holding.nbytes, lease.packed, end)

    def reserve(
        self,
        session: Session,
        desk: LocalDesk,
        prefix: Prefix,
        message: messages.Reserve,
        reply: Reply,
    ) -> None:
        """Hand out slots for a save."""
        places, kept = _places(desk, prefix, message), _terms(prefix, message)
        if self._spare(session) <= 0 or not self._have(session, 1):
            refused = sum(map(bool, places))
            self._depot.metrics.add("dropped_saves", refused, reason="busy")
            reply(answers.Reserved(0, refused, b"", b"", b""))
            return
        plan, taken, refused = desk.reserve(prefix, message.first, places, kept)
        taken, more = self._cut(session, taken)
        packed = pack_slots([slot for _, slot in taken])
        nbytes = sum(slot.nbytes for _, slot in taken)
        token = session.token

        def end(ok: bool) -> None:  # noqa: FBT001  (see Out)
            self._outs.charge(token, -nbytes)
            desk.settle(plan, issued, ok=ok)

        issued: Issued = taken
        if taken:
            self._outs.charge(token, nbytes)
            plan = self._sent(session, plan, nbytes, packed, end)
            if not plan:
                more += len({part.depth for part, _ in taken})
        if not taken or not plan:
            reply(answers.Reserved(0, refused + more, b"", b"", b""))
            return
        suffixes = {record_id(b"", name): at for at, name in enumerate(desk.shape.names)}
        chunks = np.array([part.depth for part, _ in taken], "<u4")
        at = np.array([suffixes[part.name[KEY_BYTES:]] for part, _ in taken], "<u4")
        answer = answers.Reserved(plan, refused + more, chunks.tobytes(), at.tobytes(), packed)
        reply(answer)

    def _cut(
        self, session: Session, taken: list[tuple[Part, Slot]]
    ) -> tuple[list[tuple[Part, Slot]], int]:
        """Give back the chunks that are too much for a session; return the others, and how many."""
        spare, used, keep = self._spare(session), 0, len(taken)
        for part, slot in taken:
            used += slot.nbytes
            if used > spare:
                keep = next(at for at, (one, _) in enumerate(taken) if one.depth == part.depth)
                break
        for part, slot in reversed(taken[keep:]):
            self._depot.catalog.abort(part.name, slot, "busy")
        chunks = len({part.depth for part, _ in taken[keep:]})
        if chunks:
            self._depot.metrics.add("dropped_saves", chunks, reason="busy")
        return taken[:keep], chunks

    def _have(self, session: Session, cells: int) -> bool:
        """Say whether a session may have so many cells of the grants more."""
        return self._outs.cells(session.token) + cells <= self._most_cells

    def _sent(
        self, session: Session, plan: int, nbytes: int, packed: bytes, end: Callable[[bool], None]
    ) -> int:
        """Write down that a plan goes out, before its session hears of it; 0 without room."""
        out = Out(plan, session.token, session.engine, session.who, nbytes, cells_for(packed), end)
        if self._have(session, out.cells) and self._outs.add(out, packed):
            return plan
        end(False)  # noqa: FBT003  (see Out)
        self._depot.metrics.add("refused_holds")
        return 0


def _numbered(tiers: tuple[str, ...], numbers: Mapping[str, int]) -> bytes:
    """Return the numbers of tiers, as messages carry them."""
    first = tiers[:1]
    if tiers == first * len(tiers):  # as a rule
        return bytes([numbers[tier] for tier in first]) * len(tiers)
    return bytes(map(numbers.__getitem__, tiers))


def _result(done: Future[T | None]) -> T | None:
    """Return what came of a fetch; a fault of ours is a miss."""
    try:
        return done.result()
    except CancelledError:
        return None
    except Exception:  # noqa: BLE001  (a defect here must not end the daemon)
        _log.exception("a fetch failed; it counts as a miss")
        return None


def _places(desk: LocalDesk, prefix: Prefix, message: messages.Reserve) -> Sequence[Sequence[int]]:
    """Return the positions of the parts to be saved, of each chunk from the first wanted one."""
    chunks, parts = len(prefix.names) - message.first, len(desk.shape.names)
    if message.places is None:
        return [range(parts)] * max(chunks, 0)
    if len(message.places) > max(chunks, 0):
        raise ProtocolError(f"{len(message.places)} chunks are not behind {message.first} of these")
    for chunk in message.places:
        if len(set(chunk)) < len(chunk) or (chunk and max(chunk) >= parts):
            raise ProtocolError(f"a chunk of this model has not the parts {chunk[:8]}")
    return message.places


def _terms(prefix: Prefix, message: messages.Reserve) -> list[Term]:
    """Return what holds for each chunk of the prompt, or nothing."""
    if message.kept and len(message.kept) != len(prefix.names):
        raise ProtocolError(f"{len(message.kept)} terms are not of {len(prefix.names)} chunks")
    kept = [Term(*one) for one in message.kept]
    if not all(is_number(one.seconds) and one.seconds > 0 for one in kept):
        raise ProtocolError("a term has no seconds, or none ahead")
    return kept
