"""Strays: records that a tier's Store may have although the index does not say so.

A write or a delete that was reported as failed may have taken effect all the same, and a
spoilt record stays where it is. Such a record counts against the tier's budget until its
deletion is confirmed, or it would be there for good and nobody would know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Tier

__all__ = ["Strays"]

_MOST: Final = 1 << 16


class Strays:
    """Those of one tier, by name. Used on the flow loop.

    A shared tier has none: what is in it may be another host's, and its budget is a target.
    changing: held by whoever writes to the Store or deletes from it, so that no delete meets a
    write of the same record.
    """

    def __init__(self, tier: Tier) -> None:
        self.changing = asyncio.Lock()
        self.nbytes = 0
        self._tier = tier
        self._none = tier.store.capabilities.shared
        self._charged: dict[RecordId, int] = {}

    def __len__(self) -> int:
        """How many there may be."""
        return len(self._charged)

    def note(self, name: RecordId, charged: int) -> None:
        """Take it that the Store has a record of `charged` bytes."""
        self.forget(name)
        if self._none:
            return
        if len(self._charged) >= _MOST:
            self.forget(next(iter(self._charged)))
        self._charged[name] = charged
        self.nbytes += charged

    def forget(self, name: RecordId) -> None:
        """Take it that the Store has not got it, or that the index knows."""
        self.nbytes -= self._charged.pop(name, 0)

    async def delete(self, records: Mapping[RecordId, int]) -> None:
        """Delete records, given with what each is charged, and all strays.

        What is not confirmed is a stray from here on.
        """
        names = list({**self._charged, **records})
        for name, charged in records.items():
            self.note(name, charged)
        if names:
            for name, status in zip(names, await self._tier.delete(names), strict=True):
                if status in (Status.OK, Status.ABSENT):
                    self.forget(name)
