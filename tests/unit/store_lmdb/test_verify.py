"""Real damage to real slots: it is found, and what is right stays when it is removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.identity.record import PartName
from kvtier.storage_backends import slab_audit
from kvtier.storage_backends.slab import PAGE, stride_of
from kvtier.storage_backends.slab_index import Entry
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status, Write

MIB = 1 << 20
OK = Status.OK
SIZES = (3000, 50_000, 200_000, 50_000)


def found(verdict: Any) -> list[tuple[str, str]]:
    return sorted((damage.key, damage.reason) for damage in verdict.damage)


def test_what_is_whole_is_said_to_be(filled: Any) -> None:
    verdict = filled.check()
    assert (verdict.whole, verdict.damage, verdict.torn) == (True, [], [])
    assert (verdict.checked, verdict.changed, verdict.raw_unchecked) == (40, 0, 0)
    assert verdict.checked_bytes == sum(record.header.stored_bytes for record in filled.records)
    assert verdict.holder is None


def test_an_empty_store_is_whole(opened: Any) -> None:
    opened(64 * MIB).close()
    assert opened.check().whole
    (opened.folder / "index.lmdb").unlink()
    assert opened.check(repair=True).whole


def slot_of(size: int) -> list[int]:
    """Return offsets in a slot: its header's begin and end, the payload's first and last byte."""
    return [0, 200, 255, PAGE, PAGE + size - 1]


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_is_found_and_removed(filled: Any, which: int, number: int) -> None:
    record = filled.records[number]
    filled.flip(record, slot_of(record.header.stored_bytes)[which])
    verdict = filled.check()
    assert found(verdict) == [(record.header.key.hex(), "payload")]
    assert (verdict.whole, verdict.checked) == (False, 39)
    (damage,) = verdict.damage
    assert damage.namespace == record.header.namespace.hex()
    assert damage.part == tuple(PartName())
    repaired = filled.check(repair=True)
    assert (repaired.whole, repaired.removed, len(repaired.damage)) == (True, 1, 1)
    assert not repaired.index_replaced
    assert filled.check().damage == []
    assert filled.served() == 39


def test_padding_is_nobodys(filled: Any) -> None:
    filled.flip(filled.records[0], PAGE + 3000)
    filled.flip(filled.records[0], 256)
    assert filled.check().whole


def test_without_the_checksum_a_flip_would_pass(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.flip(filled.records[2], PAGE + 77)
    monkeypatch.setattr(slab_audit, "_summed", lambda header, total: None)
    assert filled.check().whole  # the twin: this is the guard


@pytest.mark.parametrize("part", ["slot", "payload"])
def test_swapped_slots_are_found(filled: Any, part: str) -> None:
    first, second = filled.records[1], filled.records[3]
    (path, at), (other, there) = filled.opened.find(first), filled.opened.find(second)
    skip = 0 if part == "slot" else PAGE
    length = stride_of(50_000) - skip
    data = path.read_bytes()[at + skip :][:length]
    swapped = other.read_bytes()[there + skip :][:length]
    for file_path, offset, content in ((path, at, swapped), (other, there, data)):
        with file_path.open("r+b") as file:
            file.seek(offset + skip)
            file.write(content)
    verdict = filled.check()
    assert found(verdict) == sorted((one.header.key.hex(), "payload") for one in (first, second))
    named = [f"chunk {one.header.key.hex()[:16]}" for one in (first, second)]
    told = " ".join(damage.detail for damage in verdict.damage)
    assert all(name in told for name in named) == (part == "slot")
    filled.check(repair=True)
    assert filled.served() == 38


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 70_000)])
def test_a_segment_that_is_gone_or_cut(filled: Any, damage: Callable[[Path], None]) -> None:
    path, _ = filled.opened.find(filled.records[2])
    damage(path)
    verdict = filled.check()
    assert verdict.damage
    assert {one.reason for one in verdict.damage} == {"place"}
    assert verdict.checked + len(verdict.damage) == 40
    assert filled.check(repair=True).removed == len(verdict.damage)
    assert filled.served() == verdict.checked


def test_places_that_cannot_be(filled: Any) -> None:
    records = filled.records
    filled.change(records[1], slot=4000)
    filled.change(records[3], segment=0)
    filled.change(records[5], segment=filled.entries[records[0].header.id].segment)
    told = {damage.key: damage for damage in filled.check().damage}
    said = [told[records[number].header.key.hex()] for number in (1, 3, 5)]
    assert [one.reason for one in said] == ["place"] * 3
    assert "has only" in said[0].detail
    assert "there is no segment 0" in said[1].detail
    assert "it takes 57344 bytes, the slots have 8192" in said[2].detail
    filled.check(repair=True)
    assert filled.served() == 37


def test_two_entries_of_one_slot(filled: Any) -> None:
    first, second = filled.records[1], filled.records[3]
    there = filled.entries[first.header.id]
    filled.change(second, segment=there.segment, slot=there.slot)
    assert found(filled.check()) == [(second.header.key.hex(), "overlap")]
    filled.check(repair=True)
    assert filled.served() == 39


def test_entries_without_a_header_of_their_own(filled: Any) -> None:
    records = filled.records
    filled.put(b"short", Entry(1, 1, 1, bytes(256)))
    filled.put(records[1].header.id, filled.entries[records[3].header.id])
    filled.change(records[2], head=b"\1" + records[2].header.pack()[1:])
    verdict = filled.check()
    assert [one.reason for one in verdict.damage] == ["header"] * 3
    assert {one.key for one in verdict.damage} == {
        b"short".hex(),
        *(records[number].header.key.hex() for number in (1, 2)),
    }
    assert filled.check(repair=True).removed == 3
    assert filled.check().whole
    assert filled.served() == 38


def rewritten(filled: Any, number: int, **changes: Any) -> Write:
    """Put a header into both the index and the slot, so that they agree on what is wrong."""
    record = filled.records[number]
    path, at = filled.opened.find(record)
    header = msgspec.structs.replace(record.header, **changes)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(header.pack())
    filled.change(record, head=header.pack())
    return record


def test_raw_bytes_have_a_checksum_of_their_own(filled: Any) -> None:
    record = rewritten(filled, 1, raw_sum=bytes(16))
    assert found(filled.check()) == [(record.header.key.hex(), "raw")]


def test_encoded_records_are_counted_not_judged(filled: Any) -> None:
    rewritten(filled, 1, raw_sum=bytes(16), raw_bytes=90_000, codec=7)
    verdict = filled.check()
    assert (verdict.whole, verdict.checked, verdict.raw_unchecked) == (True, 40, 1)


def test_a_disk_error_condemns_one_record(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = filled.records[1]
    path, at = filled.opened.find(record)
    real = os.preadv

    def bad_sector(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        into = Path(f"/proc/self/fd/{descriptor}").readlink().name == path.name
        if into and offset <= at + PAGE < offset + sum(map(len, buffers)):
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(slab_audit.os, "preadv", bad_sector)
    verdict = filled.check()
    assert found(verdict) == [(record.header.key.hex(), "unreadable")]
    assert "EIO" in verdict.damage[0].detail
    assert verdict.checked == 39


def test_records_larger_than_one_read(opened: Any) -> None:
    store = opened(128 * MIB, durability="each")
    sizes = [slab_audit.PIECE - PAGE, slab_audit.PIECE, 9 * MIB + 5, 2 * slab_audit.PIECE]
    records = [make_record(number, size) for number, size in enumerate(sizes)]
    assert store.write_many(records) == [OK] * 4
    store.close()
    assert opened.check().checked == 4
    path, at = opened.find(records[2])
    with path.open("r+b") as file:
        file.seek(at + PAGE + 9 * MIB + 4)
        file.write(b"\0\1")
    assert found(opened.check()) == [(records[2].header.key.hex(), "payload")]


def test_where_o_direct_is_refused_it_goes_through_the_page_cache(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(slab_audit.os, "open", refuse)
    assert filled.check().checked == 40
