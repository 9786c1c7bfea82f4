"""An NVMe store whose files were damaged: what is whole is kept, nothing dies."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import Unavailable
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
PAGE = 4096
OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(300_000))


def cut_to(length: int) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        os.truncate(path, length)

    return cut


def break_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(b"\xff" * 40 * PAGE)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (garbage, "invalid"),
        (cut_to(100), "truncated"),
        (cut_to(PAGE + 100), "truncated"),
        (cut_to(3 * PAGE), "truncated"),
        (break_pages, "unreadable"),
    ],
)
def test_unreadable_index_is_set_aside(
    opened: Any, damage: Callable[[Path], None], reason: str
) -> None:
    store = opened(64 * MIB)
    store.write_many([make_record(number, 5000) for number in range(200)])
    store.close()
    damage(opened.folder / "index.lmdb")
    store = opened(64 * MIB)
    assert list(store.scan()) == []
    assert (opened.folder / f"index-{reason}.bad").exists()
    assert opened.disk_bytes() <= 64 * MIB
    assert store.write_many([make_record(1, MIB)]) == [OK]
    store.close()
    store = opened(64 * MIB)
    assert [header.depth for header in store.scan()] == [1]


def test_empty_or_missing_index_starts_empty(opened: Any) -> None:
    for damage in (cut_to(0), Path.unlink):
        store = opened()
        store.write_many([make_record(1, 5000)])
        store.close()
        damage(opened.folder / "index.lmdb")
        store = opened()
        assert list(store.scan()) == []
        store.close()


def test_index_cut_while_open_is_unavailable(opened: Any) -> None:
    store = opened()
    record = make_record(1, 5000)
    store.write_many([record])
    os.truncate(opened.folder / "index.lmdb", 2 * PAGE)
    for call in (
        lambda: store.contains_many([record.header.id]),
        lambda: fetch(store, record.header.id, 5000),
        lambda: store.write_many([make_record(2, 5000)]),
        lambda: store.delete_many([record.header.id]),
        lambda: list(store.scan()),
    ):
        with pytest.raises(Unavailable, match="was cut"):
            call()
    store.close()


@pytest.mark.parametrize("damage", [Path.unlink, cut_to(0), cut_to(300_000)])
def test_damaged_segment_loses_its_records_only(
    opened: Any, damage: Callable[[Path], None]
) -> None:
    store = opened(128 * MIB)
    records = [make_record(number, 200_000) for number in range(12)]
    store.write_many(records)
    store.close()
    path, _ = opened.find(records[6])
    damage(path)
    store = opened(128 * MIB)
    statuses = store.contains_many([record.header.id for record in records])
    assert 1 <= statuses.count(ABSENT) <= 5
    for record, status in zip(records, statuses, strict=True):
        if status is OK:
            assert is_exact(*fetch(store, record.header.id, 200_000))
    lost = records[statuses.index(ABSENT)]
    assert store.write_many([lost]) == [OK]
    assert is_exact(*fetch(store, lost.header.id, 200_000))


def test_segment_gone_while_open(opened: Any) -> None:
    store = opened(durability="each")
    record = make_record(1, 5000)
    store.write_many([record])
    with store._files._guard:
        for held in store._files._open.values():
            os.close(held.descriptor)
        store._files._open.clear()
    for path in opened.folder.glob("*.seg"):
        path.unlink()
    read, _ = fetch(store, record.header.id, 5000)
    assert read.status is FAILED
    assert store.delete_many([record.header.id]) == [OK]
