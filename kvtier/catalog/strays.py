"""Strays: records that a tier's Store may have although the index does not say so.

A write or a delete that was reported as failed may have taken effect all the same, and a
spoilt record stays where it is, as does one of a part that was withdrawn. Such a record counts
against the tier's budget until its deletion is confirmed, or it would be there for good and
nobody would know.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Tier

_MOST: Final = 1 << 16
_MOST_UNKNOWN: Final = 1 << 20  # of some 300 bytes each
_BATCH: Final = 1024
_SLICE: Final = 256


class Strays:
    """Those of one tier, by name. Used on the flow loop.

    A shared tier has none but those withdrawn: what is in it may be another host's, and its
    budget is a target. withdrawn: hands over records that have to be deleted, each once. gives_up:
    told how many of those are no more tried, the oldest of a million that only the Store may know.
    changing: held by whoever writes to the Store or deletes from it, so that no delete meets a
    write of the same record.
    """

    def __init__(
        self,
        tier: Tier,
        withdrawn: Callable[[], Mapping[RecordId, int]] = dict,
        gives_up: Callable[[int], object] = int,
    ) -> None:
        self.changing = asyncio.Lock()
        self._tier = tier
        self._withdrawn = withdrawn
        self._gives_up = gives_up
        self._nbytes = 0
        self._none = tier.store.capabilities.shared
        self._charged: dict[RecordId, int] = {}
        self._noted: OrderedDict[RecordId, None] = OrderedDict()  # not withdrawn, oldest first
        self._unknown: OrderedDict[RecordId, None] = OrderedDict()  # withdrawn, and charged nothing

    def __len__(self) -> int:
        """How many there may be."""
        self.collect()
        return len(self._charged)

    @property
    def nbytes(self) -> int:
        """What all of them are charged."""
        self.collect()
        return self._nbytes

    def __contains__(self, name: RecordId) -> bool:
        """Say whether there may be one of that name."""
        return bool(self.count((name,)))

    def count(self, names: Iterable[RecordId]) -> int:
        """Return of how many names there may be one."""
        self.collect()
        return sum(name in self._charged for name in names)

    def note(self, name: RecordId, charged: int) -> None:
        """Take it that the Store has a record of `charged` bytes."""
        if self._none:
            return
        self.forget(name)
        if len(self._noted) >= _MOST:
            self.forget(next(iter(self._noted)))
        self._add(name, charged)
        self._noted[name] = None

    def doom(self, name: RecordId) -> None:
        """Have a record deleted, whoever wrote it: it has a part that was withdrawn."""
        self._add(name, 0)

    def charge(self, name: RecordId, charged: int) -> None:
        """Charge one that is among them, now that it is known what it takes."""
        self._nbytes += charged - self._charged[name]
        self._charged[name] = charged
        self._unknown.pop(name, None)

    def forget(self, name: RecordId) -> None:
        """Take it that the Store has not got it, or that the index knows."""
        self._nbytes -= self._charged.pop(name, 0)
        self._noted.pop(name, None)
        self._unknown.pop(name, None)

    def _add(self, name: RecordId, charged: int) -> None:
        self._charged[name] = charged
        self._nbytes += charged

    def collect(self) -> None:
        """Take over what was withdrawn: of what the index had, all that there is.

        The rest is bounded: while a shared tier is away, or one is not listed, it would only grow.
        """
        for name, charged in self._withdrawn().items():
            self.forget(name)
            self._add(name, charged)
            if not charged:
                self._unknown[name] = None
        over = len(self._unknown) - _MOST_UNKNOWN
        if over > 0:
            for name in list(itertools.islice(self._unknown, over)):
                self.forget(name)
            self._gives_up(over)

    async def delete(self, records: Mapping[RecordId, int]) -> None:
        """Delete records, given with what each is charged, and all strays, in batches.

        What is not confirmed is a stray from here on; after a batch of which nothing is, no more
        is tried.
        """
        self.collect()
        names = [*self._charged, *(name for name in records if name not in self._charged)]
        at_once = len(self._charged) if self._tier.packs else 0  # with all of their packs
        for at, (name, charged) in enumerate(records.items(), 1):
            self.note(name, charged)
            if not at % _SLICE:
                await asyncio.sleep(0)  # the loop's other callbacks have their turn
        starts = [*range(0, at_once, _BATCH), *range(at_once, len(names), _BATCH)]
        for start, stop in itertools.pairwise([*starts, len(names)]):
            batch = names[start:stop]
            evicts = self._tier.packs and start >= at_once
            send = self._tier.evict if evicts else self._tier.delete
            gone = [
                name
                for name, status in zip(batch, await send(batch), strict=True)
                if status in (Status.OK, Status.ABSENT)
            ]
            for name in gone:
                self.forget(name)
            if not gone:
                break
