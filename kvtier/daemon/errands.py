"""Errands: what takes a client's request longer than a moment. Coroutines on the depot's flow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from kvtier.catalog.catalog import LOT
from kvtier.daemon.answers import Failed, Removed, Told
from kvtier.daemon.busy import Busy
from kvtier.daemon.grants import Who
from kvtier.daemon.messages import Message
from kvtier.depot import Depot
from kvtier.errors import KvtierError, MisuseError
from kvtier.identity.record import RecordId
from kvtier.seams import CancelledError, Future

Reply = Callable[[Message], None]
"""Sends an answer. Called from any thread; it never blocks."""

_OF_ONE: Final = 128  # under way, of one process
_OF_ALL: Final = 1024
LATE: Final = Failed("TimeoutError", "it takes longer; the daemon goes on with it")
_log = logging.getLogger("kvtier")


class Errands:
    """Those of all sessions. Each is answered once, and one that hangs keeps no other waiting.

    busy: how many are under way. One that was answered as late is, until it has ended.
    """

    def __init__(self, depot: Depot) -> None:
        self.busy = Busy(_OF_ONE, _OF_ALL)
        self._depot = depot
        self._going: set[asyncio.Task[Message]] = set()  # the loop itself has weak references

    def start(
        self,
        who: Who,
        work: Callable[[], Coroutine[Any, Any, Message]],
        timeout: float,
        reply: Reply,
        *,
        late: Message = LATE,
        weight: int = 1,
    ) -> None:
        """Begin; reply with what comes of it, or with `late` after `timeout` seconds; it goes on.

        Raises MisuseError where that process has too many under way, and once the daemon ends.
        """
        self.begin(who, weight)

        async def counted() -> Message:
            try:
                return await work()
            finally:
                self.busy.end(who, weight)

        try:
            running = self._depot.flow.spawn(self._bounded(counted, timeout, late))
        except MisuseError:
            self.busy.end(who, weight)
            raise
        running.add_done_callback(lambda done: reply(outcome(done)))

    def begin(self, who: Who, weight: int = 1) -> None:
        """Count one more in. Raises MisuseError where that is too much."""
        if not self.busy.begin(who, weight):
            raise MisuseError(
                f"{self.busy.each} calls of one process that wait are as many as the daemon takes; "
                "let some end"
            )

    async def _bounded(
        self, work: Callable[[], Coroutine[Any, Any, Message]], within: float, late: Message
    ) -> Message:
        task = asyncio.create_task(work(), name="errand")
        self._going.add(task)
        task.add_done_callback(self._going.discard)
        await asyncio.wait((task,), timeout=within)
        return task.result() if task.done() else late

    async def purge(self, digest: bytes, tell: Callable[[int], None]) -> Message:
        """Take all of a namespace out of all tiers."""
        return Removed(*await self._depot.moves.sweeper.purge(digest, tell))

    async def clear(self, tier: int) -> Message:
        """Take what nobody holds out of a tier."""
        await self._depot.moves.clear(tier)
        return Told(value=True)

    async def drain(self) -> Message:
        """Wait until all that was saved is written down."""
        await self._depot.moves.drained()
        return Told(value=True)

    async def invalidate(self, names: Sequence[RecordId], within: float) -> Message:
        """Withdraw parts; wait `within` seconds at most for the Stores to delete them."""
        catalog, sweeper = self._depot.catalog, self._depot.moves.sweeper
        parts = records = 0
        for start in range(0, len(names), LOT):
            lot = catalog.withdraw(names[start : start + LOT], "invalidated")
            parts, records = parts + lot[0], records + lot[1]
            await asyncio.sleep(0)  # others wait for the Catalog's lock
        if not records:
            return Removed(parts, 0, ())

        async def sweep() -> Message:
            return Removed(parts, await sweeper.sweep_for(names), ())

        return await self._bounded(sweep, within, Removed(parts, records, ()))


def outcome(done: Future[Message]) -> Message:
    """Return an errand's answer, whatever came of it."""
    try:
        return done.result()
    except CancelledError:
        return Failed("MisuseError", "the daemon ends")
    except MisuseError as error:
        return Failed("MisuseError", str(error))
    except KvtierError as error:
        return Failed("ConfigError", str(error))
    except Exception as error:  # noqa: BLE001  (a defect here must not end the daemon)
        _log.exception("a request failed")
        return Failed(
            "MisuseError", f"the daemon failed at it ({type(error).__name__}); see its log"
        )
