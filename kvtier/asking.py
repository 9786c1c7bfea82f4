"""Asking the shared tiers what others have written there of a prompt. On the flow loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.catalog.catalog import Catalog, Part
from kvtier.catalog.explain import ago
from kvtier.catalog.probe import Probe, ends, rounds, search
from kvtier.catalog.removal import Withdrawn
from kvtier.catalog.strays import Strays
from kvtier.clock import Clock
from kvtier.deadline import Deadline
from kvtier.identity.record import RecordId
from kvtier.prefix import Prefix
from kvtier.tiers.pack import Run, pack_id
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Tier

_ASK_SECONDS: Final = 1.0  # that a look-up has, though its fetch has less: the next has the answer


class Asking:
    """The look-ups of one Depot. What is found is in the index; what not, is not asked for soon.

    shared: the tiers that others write to, by number. strays: of each tier, what it has to delete.
    """

    def __init__(
        self,
        catalog: Catalog,
        shared: Mapping[int, Tier],
        strays: Mapping[int, Strays],
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._shared = shared
        self._strays = strays
        self._clock = clock
        self._probe = Probe(clock)
        self._searches = 0
        self._under_way: dict[tuple[RecordId, RecordId], tuple[asyncio.Task[bool], Deadline]] = {}

    def worth(self, name: RecordId) -> bool:
        """Say whether a shared tier may have a part that the index does not know.

        Those that are left alone would not be asked: to remember that as an answer would keep the
        prompt from being asked for once they are back.
        """
        return not self._rest() and self._probe.due(name)

    def _rest(self) -> bool:
        """Say whether there is no tier that would be asked."""
        return all(tier.silent for tier in self._shared.values())

    def asked(self, name: RecordId) -> str:
        """Tell whether the shared tiers were asked for a part that the index does not know.

        And what each said then, or why it could not be asked, as far as that still is so.
        """
        found = self._probe.asked(name)
        if not self._shared:
            return ""
        if found is None and self._rest():
            whys = "; ".join(filter(None, (tier.ails for tier in self._shared.values())))
            return f" {self._named(self._shared)} does not answer{whys and f' ({whys})'}."
        if found is None:
            return f" {self._named(self._shared)} was not asked yet; a fetch asks."
        seconds, missed = found
        lacking = [each for each in self._shared if each not in (*missed.failed, *missed.newer)]
        said = []
        if missed.failed:
            whys = "; ".join(filter(None, (self._shared[each].ails for each in missed.failed)))
            said.append(f"{self._named(missed.failed)} failed{whys and f' ({whys})'}")
        if missed.newer:
            said.append(f"{self._named(missed.newer)} had it of a version that is not read here")
        if lacking:
            said.append(f"{self._named(lacking)} had it not")
        return f" {', '.join(said)} when asked {ago(seconds)}."

    def _named(self, numbers: Iterable[int]) -> str:
        return ", ".join(self._shared[each].name for each in numbers)

    async def within(self, prefix: Prefix, known: int, seconds: float) -> bool:
        """Ask the shared tiers for what they have of a prompt beyond the `known` chunks.

        False when they have not answered in time, or have nothing. A late answer is taken all
        the same: the next match knows it. Who asks for a prompt that is being asked for waits for
        that answer.
        """
        until = self._clock() + max(seconds, _ASK_SECONDS)
        which = prefix.names[known][0], prefix.names[-1][0]
        if which in self._under_way:
            asking, deadline = self._under_way[which]
            deadline.extend(until)
        else:
            deadline = Deadline(until)
            asking = asyncio.create_task(self._ask(prefix, known, deadline), name="ask")
            self._under_way[which] = asking, deadline
            asking.add_done_callback(lambda _: self._under_way.pop(which, None))
        await asyncio.wait((asking,), timeout=seconds)
        return asking.done() and asking.result()

    async def _ask(self, prefix: Prefix, known: int, deadline: Deadline) -> bool:
        """Index what a shared tier says it has of a prompt; say whether it has anything."""
        shape = prefix.shape
        stop = min(-(-prefix.limit // shape.chunk_tokens), len(prefix.names))
        places = shape.always or tuple(range(len(shape.names)))
        said: dict[int, list[Status]] = {}  # by tier, of what may have the chunk `known`
        for number, tier in self._shared.items():
            withdrawn = self._catalog.watch()
            try:
                found = self._before_doomed(prefix, known, stop, number)
                orders = [tier.longest_order(shape.nbytes[at]) for at in places]
                grids = dict.fromkeys(orders)  # parts of one grid are looked up together
                for order, most in zip(grids, rounds(shape, len(grids)), strict=True):
                    some = [at for at, one in zip(places, orders, strict=True) if one == order]
                    look = _Look(number, some, deadline, most, said.setdefault(number, []))
                    found = await self._search(prefix, known, found, look)
                if found > known:
                    parts = [prefix.part(c, at) for c in range(known, found) for at in places]
                    self._note(parts, number, withdrawn)
                    await self._ask_for_ends(prefix, found, number, withdrawn, deadline)
                    return True
            finally:
                self._catalog.unwatch(withdrawn)
        failed = [number for number, each in said.items() if Status.FAILED in each]
        newer = [number for number, each in said.items() if Status.NEWER in each]
        self._probe.missing(prefix.names[known][0], failed, newer)
        return False

    def _before_doomed(self, prefix: Prefix, known: int, stop: int, number: int) -> int:
        """Return the first chunk, of those asked for, of which a tier has yet to delete a part.

        It may be gone when the answer comes, so it is not asked for.
        """
        strays = self._strays[number]
        if not len(strays):
            return stop
        return next((c for c in range(known, stop) if strays.count(prefix.names[c])), stop)

    async def _search(self, prefix: Prefix, known: int, stop: int, look: _Look) -> int:
        """Return how far a tier has the parts of one grid, from a known chunk on.

        Of each run one part is asked for, and of the next prompt's another, so that a look-up
        costs the same for many ranks; what the others lack, their reads find out.
        """
        number, places, deadline, most, said = look
        tier, names, nbytes = self._shared[number], prefix.names, prefix.shape.nbytes
        self._searches += 1
        turn = self._searches

        async def ask(runs: Sequence[Run]) -> list[bool]:
            chosen = [places[(run.start + turn) % len(places)] for run in runs]
            last = [names[run.stop - 1][at] for run, at in zip(runs, chosen, strict=True)]
            packs = [pack_id(name, run.order) for name, run in zip(last, runs, strict=True)]
            told = await tier.contains(packs, deadline)
            said.extend(one for run, one in zip(runs, told, strict=True) if run.start <= known)
            return [status is Status.OK for status in told]

        end, packs = await search(known, stop, tier.longest_order(nbytes[places[0]]), ask, most)
        for run, at in itertools.product(packs, places):
            members = [names[chunk][at] for chunk in range(run.start, run.stop)]
            if not tier.learn(members, nbytes[at]):
                self._strays[number].doom(pack_id(members[-1], run.order))
                end = min(end, run.start)
        return max(end, known)

    async def _there(
        self, number: int, parts: Sequence[Part], deadline: Deadline
    ) -> dict[RecordId, bool]:
        """Say which parts a tier has, without those that are to be deleted there."""
        strays = self._strays[number]
        asked = [part.name for part in parts if part.name not in strays]
        told = await self._shared[number].contains(asked, deadline)
        answers = dict(zip(asked, told, strict=True))
        return {part.name: answers.get(part.name) is Status.OK for part in parts}

    async def _ask_for_ends(
        self, prefix: Prefix, stop: int, number: int, withdrawn: Withdrawn, deadline: Deadline
    ) -> None:
        """Index the windows and states that a shared tier has of a prompt's last chunks.

        Of each component one part of a chunk is asked for, as in ``_search``.
        """
        if prefix.shape.plain or not prefix.shape.always:
            return
        turn, strays = self._searches, self._strays[number]
        wanted = ends(prefix.shape, stop)
        parts = [
            [
                prefix.part(chunk, one.places[(chunk + turn) % len(one.places)])
                for chunk in one.chunks
            ]
            for one in wanted
        ]
        told = await self._there(number, list(itertools.chain.from_iterable(parts)), deadline)
        there = []
        for one, some in zip(wanted, parts, strict=True):
            answers = {c: told[part.name] for c, part in zip(one.chunks, some, strict=True)}
            found = itertools.product(one.there(answers), one.places)
            there += [prefix.part(chunk, at) for chunk, at in found]
        self._note([part for part in there if part.name not in strays], number, withdrawn)

    def _note(self, parts: Sequence[Part], number: int, withdrawn: Withdrawn) -> None:
        footprint_of = functools.cache(self._shared[number].footprint)
        for part in parts:
            self._catalog.stored(part, number, footprint_of(part.nbytes), withdrawn)


class _Look(NamedTuple):
    """A search for the parts of one grid in a tier.

    places: in a chunk. most: rounds. said: what the answers about the first chunk are added to.
    """

    number: int
    places: Sequence[int]
    deadline: Deadline
    most: int
    said: list[Status]
