"""What is written to a slower tier, and when, with one guard less: budgets, deadlines, heads."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.spill import Spiller
from kvtier.testing.mutation import Mutation, Patch, collector
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Written

__all__ = ["ADMISSION"]

ADMISSION: Final[list[Mutation]] = []
_takes_away = collector(ADMISSION)


@_takes_away("what the write budget does not pay for is not written", "of a write budget of")
def write_what_is_not_paid_for() -> list[Patch]:
    return [(Spiller, "_paid", lambda _self, jobs: jobs)]


@_takes_away("what is sent to a Store is paid for, also when it fails", "of a write budget of")
def pay_only_for_what_is_kept() -> list[Patch]:
    settled, spend = Spiller._settled, WriteBudget.spend

    def broken(self: Spiller, job: Any, written: Written) -> None:
        settled(self, job, written)
        if written.status is Status.OK:
            spend(self._tier.writes, self._tier.footprint(job.part.nbytes))

    return [(Spiller, "_settled", broken), (WriteBudget, "spend", lambda _self, _nbytes: None)]


@_takes_away("what waits too long to be written is dropped", "past its deadline")
def wait_for_a_hung_tier() -> list[Patch]:
    async def broken(self: Spiller) -> None:
        del self

    return [(Spiller, "expire", broken)]


@_takes_away("a tier has no part without its parent", "and not its parent")
def store_a_tail_without_its_head() -> list[Patch]:
    def broken(self: Catalog, row: int, tier: int, fit: Container[int]) -> str:
        del tier, fit
        return "" if self._room.in_dram(row) else "withdrawn"

    return [(Catalog, "_unfit", broken)]
