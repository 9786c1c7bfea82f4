"""Opening a Cache over a tier that lies, fails, or raises where it should not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec import structs

import kvtier
from kvtier.config import Config, TierConfig
from kvtier.errors import ConfigError
from kvtier.identity.record import Header, checksum
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.toy import CHUNK_BYTES, NAMESPACE, Toy, prompt
from kvtier.tiers.store import Capabilities, Status, Write

DRAM = 8 * CHUNK_BYTES


class Disk(MemoryStore):
    """Outlives the cache that uses it, as a disk does."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=True)

    def close(self) -> None:
        pass


def opened(store: MemoryStore) -> Toy:
    config = Config(DRAM, (TierConfig("disk", "", None, store=store),))
    return Toy(kvtier.open(config, namespace=NAMESPACE))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def rewritten(store: Disk, *, size: int) -> Disk:
    """Return a disk whose records claim another size, all their checksums right."""
    other = Disk()
    for header, data in store._records.values():
        payload = bytes(data[:size]).ljust(size, b"x")
        total = checksum(payload)
        claims = structs.replace(
            header, raw_bytes=size, stored_bytes=size, raw_sum=total, stored_sum=total
        )
        other.write_many([Write(claims, memoryview(payload))])
    return other


@pytest.mark.parametrize("size", [CHUNK_BYTES - 100, CHUNK_BYTES + 100, 100, 3 * CHUNK_BYTES])
def test_a_record_of_another_size_is_a_miss(size):
    """P1: a short one would leave the rest of the slot as it happens to be."""
    disk, tokens = Disk(), prompt(257)
    one = opened(disk)
    one.save("a", tokens[:256])
    one.close()
    two = opened(rewritten(disk, size=size))
    assert two.load("b", tokens)[0] == 0
    assert two.cache.figures()["kvtier_leased_parts"] == 0
    two.close()


def test_what_an_earlier_cache_wrote_is_found_again():
    disk, tokens = Disk(), prompt(257)
    one = opened(disk)
    one.save("a", tokens[:256])
    one.close()
    two = opened(disk)
    assert two.load("b", tokens)[1].tokens == 256
    two.close()


def test_a_tier_that_cannot_be_listed_is_refused_and_nothing_stays_open():
    class Unlistable(Disk):
        def scan(self):
            yield from super().scan()
            raise OSError("input/output error")

    threads, files = threading.active_count(), open_files()
    with pytest.raises(ConfigError, match=r"'disk' cannot be listed \(OSError: input/output"):
        opened(Unlistable())
    assert threading.active_count() == threads
    assert open_files() == files


def test_a_footprint_that_raises_costs_no_slot():
    class Broken(MemoryStore):
        def footprint(self, stored_bytes: int) -> int:
            raise ValueError(stored_bytes)

        def write_many(self, records):
            return [self._keep(record.header, record.data) for record in records]

        def _keep(self, header: Header, data: memoryview):
            self._records[header.id] = header, memoryview(bytes(data[: header.stored_bytes]))
            return Status.OK

    toy, tokens = opened(Broken()), prompt(257)
    toy.save("a", tokens[:256])
    assert toy.cache.figures()["kvtier_leased_parts"] == 0
    toy.cache.clear("dram")
    assert toy.load("b", tokens)[1].tokens == 256
    toy.close()


def test_a_defect_while_writing_down_or_reading_keeps_no_slot(monkeypatch, caplog):
    caplog.set_level("CRITICAL", logger="kvtier")  # a logged traceback would keep the arena
    toy, tokens = opened(Disk()), prompt(257)
    monkeypatch.setattr("kvtier.catalog.spill.Spiller._make_room", None)
    toy.save("a", tokens[:256])
    assert toy.cache.figures()["kvtier_leased_parts"] == 0
    assert toy.cache.metrics.get("dropped_spills", reason="failed") == 4
    monkeypatch.undo()
    assert toy.load("b", tokens)[1].tokens == 256  # offered again, since it was used
    toy.save("c", prompt(257, 1)[:256])
    toy.cache.flush(timeout=5)
    toy.cache.clear("dram")
    monkeypatch.setattr("kvtier.tiers.tier.Tier.read", None)
    assert toy.load("d", prompt(257, 1))[0] == 0
    assert toy.cache._desk.depot.arena.slots_in_use == 0
    monkeypatch.undo()
    assert toy.load("e", prompt(257, 1))[2]
    toy.close()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_part_whose_write_fails_takes_its_children_along(bad):
    """Else the tier had tails without a head, and DRAM would keep the heads in favour of all."""
    tokens = prompt(257)
    failed = []

    class Flaky(Disk):
        def _write(self, header, data):
            if header.depth == bad and not failed:
                failed.append(header.id)
                return Status.FAILED
            return super()._write(header, data)

    disk = Flaky()
    toy = opened(disk)
    toy.save("a", tokens[:256])
    assert len(failed) == 1
    assert toy.cache.figures()['kvtier_tier_parts{tier="disk"}'] == bad
    for seed in range(1, 4):
        toy.save(f"other-{seed}", prompt(257, seed)[:256])
    assert toy.cache.match(tokens).chunks == bad
    assert toy.cache.figures()["kvtier_orphan_parts"] == 0
    assert sorted(header.depth for header in disk.scan()) == sorted(
        [*range(bad), *(3 * [0, 1, 2, 3])]
    )
    toy.close()
