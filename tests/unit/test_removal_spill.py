"""A part that is withdrawn while it waits to be written, and saved anew before that has ended."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.testing.small_catalog import LMDB, chain


@pytest.mark.parametrize("when", ["queued", "written"])
def test_a_part_that_is_saved_anew_is_written_for_itself(new_spill, when):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    def withdraw():
        bench.catalog.withdraw([part.name for part in parts], "invalidated")

    async def scene():
        bench.disk.gate.clear()
        async with bench.strays.changing:
            await bench.offer(parts)
            await asyncio.sleep(0)
            if when == "queued":
                withdraw()
                bench.small.save(parts)
                await bench.offer(parts)
        if when == "written":
            await bench.until(lambda: bool(bench.disk.calls))
            withdraw()
            bench.small.save(parts)
            await bench.offer(parts)
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.dropped("withdrawn") == 2
    assert list(bench.disk.kept) == [part.name for part in parts]
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[LMDB], [LMDB]]
    assert len(bench.strays) == 0
    assert bench.small.arena.slots_in_use == 2
