"""A durable medium in memory, for simulated crashes: what it has synced survives them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Self

from kvtier.errors import MisuseError
from kvtier.identity.record import Header, RecordId
from kvtier.storage_backends.memory import MemoryStore
from kvtier.tiers.store import Capabilities, Status, Write

_Record = tuple[Header, memoryview]
_Change = tuple[RecordId, _Record | None]
_NOISE: Final = 0xEE
_NEVER: Final = 1 << 30


class SimDisk(MemoryStore):
    """A MemoryStore with a journal of what is not synced yet; a crash cuts it at some place.

    sync_every: changes that are synced at a time, when the call that made the last of them ends;
    1 is a store that syncs before it acknowledges. ordered: of what was not synced a beginning
    survives a crash, otherwise any of the writes.
    """

    def __init__(
        self, name: str, capacity: int | None, sync_every: int, *, ordered: bool = True
    ) -> None:
        super().__init__(name, capacity)
        self.sync_every = sync_every
        self.ordered = ordered
        self._torn: dict[RecordId, _Record] = {}
        self._synced: dict[RecordId, _Record] = {}
        self._journal: list[_Change] = []
        self._sync_every = sync_every
        self._acknowledged = 0
        self._dead = False

    @property
    def capabilities(self) -> Capabilities:
        """Durable, whatever else."""
        return replace(super().capabilities, durable=True)

    @property
    def torn(self) -> dict[RecordId, None]:
        """The names of records whose bytes a crash left in part; their headers are whole.

        One that was deleted or written anew is torn again where a crash takes that back.
        """
        return {name: None for name, one in self._torn.items() if self._records.get(name) is one}

    def unsynced(self) -> dict[RecordId, None]:
        """Return the names of the records that a crash may take back to what they were."""
        return dict.fromkeys(name for name, _ in self._journal)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See MemoryStore; synced when it is time."""
        self._check()
        statuses = super().write_many(records)
        self._sync_if_due()
        return statuses

    def _write(self, header: Header, data: memoryview) -> Status:
        before = self._records.get(header.id)
        status = super()._write(header, data)
        after = self._records.get(header.id)
        if after is not before:
            self._journal.append((header.id, after))
        return status

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See MemoryStore; synced when it is time."""
        self._check()
        before = [name for name in ids if name in self._records]
        statuses = super().delete_many(ids)
        self._journal += [(name, None) for name in before]
        self._sync_if_due()
        return statuses

    def close(self) -> None:
        """Sync; unlike memory, it keeps what it has."""
        if not self._dead:
            self._sync()

    def lose_power(self) -> None:
        """Sync no more: calls that were under way may still have their effect, unacknowledged."""
        self._acknowledged = len(self._journal)
        self.sync_every, self._sync_every = _NEVER, self.sync_every

    def left(self, rng: random.Random) -> Self:
        """Return what is there after a crash; this one changes no more.

        A record may be torn that was the last to survive, and was not acknowledged; where the
        order is not kept, any that was not synced. No delete is undone there: what was written
        in its place would not fit.
        """
        self._dead = True
        left = type(self)(self.name, self._capacity, self._sync_every, ordered=self.ordered)
        left._records, left._torn = dict(self._synced), dict(self._torn)
        for number, (name, record) in enumerate(self._kept(rng), 1):
            left._records.pop(name, None)
            if record is not None:
                left._records[name] = record
                if self._may_tear(number) and rng.random() < 0.7:
                    left._tear(*record)
        left._used = sum(left.footprint(h.stored_bytes) for h, _ in left._records.values())
        left._sync()
        return left

    def _kept(self, rng: random.Random) -> list[_Change]:
        """Return the changes that survive."""
        count = len(self._journal)
        if self.ordered:
            return self._journal[: count if rng.random() < 0.5 else rng.randint(0, count)]
        return [one for one in self._journal if one[1] is None or rng.random() < 0.5]

    def _may_tear(self, number: int) -> bool:
        return not self.ordered or self._acknowledged < number == len(self._journal)

    def _tear(self, header: Header, data: memoryview) -> None:
        whole = bytearray(data)
        half = len(whole) // 2
        whole[half:] = bytes([_NOISE]) * (len(whole) - half)
        self._records[header.id] = self._torn[header.id] = header, memoryview(whole)

    def _sync_if_due(self) -> None:
        if len(self._journal) >= self.sync_every:
            self._sync()

    def _sync(self) -> None:
        self._synced = dict(self._records)
        self._journal.clear()

    def _check(self) -> None:
        if self._dead:
            raise MisuseError("a process that has crashed changes a medium")
