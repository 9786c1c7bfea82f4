"""Removal with one guard less: what is withdrawn, what is kept for a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtier.asking import Asking
from kvtier.catalog.catalog import Catalog, Part
from kvtier.catalog.index import DRAM
from kvtier.catalog.shelf import Room
from kvtier.deadline import Deadline
from kvtier.identity.record import RecordId
from kvtier.testing.mutation import Mutation, Patch, collector
from kvtier.tiers.store import Status

__all__ = ["REMOVAL"]

REMOVAL: Final[list[Mutation]] = []
_takes_away = collector(REMOVAL)
_BACK: Final = "withdrawn, and is in|invalidated, and is in|written twice"


@_takes_away("what is withdrawn while it is saved or read is not published", "order|withdrawn|row")
def publish_what_was_withdrawn() -> list[Patch]:
    def broken(self: Room, row: int, raw_sum: bytes) -> bool:
        self.withdrawn.pop(self.index.serial[row], None)
        self.index.set_sum(row, raw_sum)
        self.enter(row, DRAM)
        self.unhold(self._with_parent(row))
        return True

    return [(Room, "publish", broken)]


@_takes_away("a slot that is withdrawn stays its holder's", "slot|bytes|holds|not in use")
def free_a_withdrawn_slot_at_once() -> list[Patch]:
    withdraw = Room.withdraw

    def broken(self: Room, row: int, why: str) -> None:
        held = self.index.serial[row] and self.in_dram(row) and self.index.holds[row]
        withdraw(self, row, why)
        if held:
            del self.withdrawn[self.index.serial[row]]
            self._free(row)

    return [(Room, "withdraw", broken)]


@_takes_away("a write does not bring back what was withdrawn meanwhile", _BACK)
def bring_it_back_by_a_spill() -> list[Patch]:
    written = Catalog.written

    def broken(self: Catalog, row: int, tier: int, charged: int) -> str:
        why = written(self, row, tier, charged)
        if why == "withdrawn":
            self.stored(self.describe(row).part, tier, charged)
        return ""

    return [(Catalog, "written", broken)]


@_takes_away("an answer from before a removal does not count after it", _BACK)
def take_in_a_late_answer() -> list[Patch]:
    stored = Catalog.stored

    def broken(self: Catalog, part: Part, tier: int, charged: int, *_: Any) -> None:
        stored(self, part, tier, charged)

    return [(Catalog, "stored", broken)]


@_takes_away("a shared tier is not asked for what it has to delete", _BACK)
def ask_for_what_is_to_be_deleted() -> list[Patch]:
    async def broken(
        self: Asking, number: int, parts: Sequence[Part], deadline: Deadline
    ) -> list[bool]:
        answers = await self._shared[number].contains([part.name for part in parts], deadline)
        return [answer is Status.OK for answer in answers]

    def all_of_it(_self: Asking, _prefix: object, _known: int, stop: int, _number: int) -> int:
        return stop

    return [(Asking, "_there", broken), (Asking, "_before_doomed", all_of_it)]


@_takes_away("the Stores delete what was withdrawn", "is in a tier|written twice|nobody")
def leave_the_records_of_what_was_withdrawn() -> list[Patch]:
    take = Catalog.take_withdrawn

    def broken(self: Catalog, tier: int) -> dict[RecordId, int]:
        take(self, tier)
        return {}

    return [(Catalog, "take_withdrawn", broken)]


@_takes_away("what was saved for a time goes when it is over", "was due at")
def never_expire_a_part() -> list[Patch]:
    return [(Catalog, "withdraw_due", lambda _self: (0, False))]
