"""The NVMe store under failing system calls, one after the other."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import Any, Self

import pytest

from kvtier.errors import ConfigError, KvtierError, Unavailable
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab_index import Index
from kvtier.testing.faulty_io import FaultyIO
from kvtier.testing.records import aligned, fetch, is_exact, make_record
from kvtier.tiers.store import Status, Write

MIB = 1 << 20
OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED


FAULTS = ["EIO", "ENOSPC", "EMFILE", "EACCES", "EROFS", "EINTR", "short"]


def fault(kind: str) -> Any:
    return "short" if kind == "short" else getattr(errno, kind)


@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_while_open(tmp_path: Path, durability: str, kind: str) -> None:
    for at in range(1, 200):
        io = FaultyIO()
        store = LmdbSlabStore(tmp_path / f"{at}", 8 * MIB, durability=durability, io=io)
        io.fail("any", fault(kind), at, 1)
        present, absent = scenario(store)
        hit = bool(io.hits)
        io.heal()
        hold(store, present, absent)
        assert store.write_many([make_record(77, 3000)]) == [OK]
        store.close()
        store = LmdbSlabStore(tmp_path / f"{at}", 8 * MIB, durability=durability)
        hold(store, present if durability != "batch" or not hit else [], absent)
        for header in list(store.scan()):
            assert is_exact(*fetch(store, header.id, header.stored_bytes))
        store.close()
        if not hit:
            break
    else:
        pytest.fail("the scenario never ran without its fault")
    assert at > 5


def scenario(store: LmdbSlabStore) -> tuple[list[Write], list[Write]]:
    """Write, replace, read, delete; return what is there by the store's word, and what is not."""
    records = [make_record(number, size) for number, size in enumerate((5000, 300_000, 5000))]
    newer = make_record(0, 7000, version=1)
    wrote = dict(zip([r.header.id for r in records], store.write_many(records), strict=True))
    for record in records:
        read, buffer = fetch(store, record.header.id, 300_000)
        assert read.status is not OK or is_exact(read, buffer)
    replaced = store.write_many([newer])
    deleted = store.delete_many([records[2].header.id])
    present = [record for record in records[1:2] if wrote[record.header.id] is OK]
    present += [newer] if replaced == [OK] else []
    absent = [r for r in records if wrote[r.header.id] not in (OK, FAILED)]
    absent += [records[2]] if deleted == [OK] else []
    absent = [] if replaced != [OK] else absent
    return present, [r for r in absent if r.header.id != newer.header.id]


def hold(store: LmdbSlabStore, present: list[Write], absent: list[Write]) -> None:
    for record in present:
        read, buffer = fetch(store, record.header.id, record.header.stored_bytes)
        assert read.status is OK
        assert read.header == record.header
        assert is_exact(read, buffer)
    gone = [record.header.id for record in absent]
    assert store.contains_many(gone) == [ABSENT] * len(gone)


@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_at_opening(tmp_path: Path, kind: str) -> None:
    for at in range(1, 20):
        io = FaultyIO()
        io.fail("any", fault(kind), at, 1)
        try:
            LmdbSlabStore(tmp_path / f"{at}", 8 * MIB, io=io).close()
        except KvtierError as error:
            assert isinstance(error, ConfigError)  # noqa: PT017
            LmdbSlabStore(tmp_path / f"{at}", 8 * MIB).close()
        else:
            break
    assert io.armed
    assert at > 1


@pytest.mark.parametrize("durability", ["batch", "each"])
def test_failed_commit_withdraws_its_writes(
    opened: Any, monkeypatch: pytest.MonkeyPatch, durability: str, caplog: object
) -> None:
    clock = opened.clock
    store = opened(8 * MIB, durability=durability, clock=clock)
    kept, old, new = make_record(1, 5000), make_record(2, 5000), make_record(2, 5000, version=1)
    assert store.write_many([kept, old]) == [OK, OK]
    clock.now = 2.0
    store.delete_many([])
    store._ledger.commit(store._ledger.pending)

    def fail(self: Index, operations: object) -> None:
        raise Unavailable("the index cannot be written: injected")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", fail)
        clock.now = 4.0
        wrote = store.write_many([new, make_record(3, 5000)])
        if durability == "batch":
            store._ledger.commit(store._ledger.pending)
        else:
            assert wrote == [FAILED, FAILED]
        names = [new.header.id, make_record(3, 5000).header.id]
        assert store.contains_many(names) == [ABSENT, ABSENT]
        assert fetch(store, kept.header.id, 5000)[1] == kept.data
    assert store.write_many([new]) == [OK]
    assert is_exact(*fetch(store, new.header.id, 5000))
    store.close()
    store = opened(8 * MIB)
    assert {header.depth for header in store.scan()} == {1, 2}
    assert fetch(store, new.header.id, 5000)[1] == new.data
    # No slot leaked: as much fits as into a new store.
    for number in (1, 2):
        store.delete_many([make_record(number, 5000).header.id])
    count = 0
    while store.write_many([make_record(100 + count, MIB)]) == [OK]:
        count += 1
    assert count == 5


def test_read_tells_why_in_the_log(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    io = FaultyIO()
    store = opened(io=io, clock=opened.clock)
    record = make_record(1, 5000)
    store.write_many([record])
    for _ in range(5):
        io.fail("read", errno.EIO, times=1)
        assert store.read_many([record.header.id], [aligned(8192)])[0].status is FAILED
    assert caplog.text.count("Input/output error") == 1


def test_a_file_that_could_not_be_removed_goes_before_the_next_is_made(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are no longer charged, and its name would be taken again."""
    io = FaultyIO()
    store = opened(16 * MIB, durability="each", io=io)
    assert store.write_many([make_record(1, 5000)]) == [OK]
    unlink = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path.suffix == ".seg":
            raise OSError(errno.EROFS, "injected", str(path))
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        io.fail("allocate", errno.EIO)
        assert store.write_many([make_record(2, 60_000)]) == [FAILED]
        io.heal()
        assert store.write_many([make_record(2, 60_000)]) == [FAILED]
        assert len(list(opened.folder.glob("*.seg"))) == 2
    for number, size in ((3, 90_000), (2, 60_000)):
        assert store.write_many([make_record(number, size)]) == [OK]
    assert len(list(opened.folder.glob("*.seg"))) == 3
    store.close()
    store = opened(16 * MIB)
    assert sorted(header.depth for header in store.scan()) == [1, 2, 3]
    assert opened.disk_bytes() <= 16 * MIB


class Opening:
    """A store of two records, each in a file of its own, and a thread that hangs opening one."""

    def __init__(self, folder: Path) -> None:
        self.records = [make_record(number, 600_000) for number in range(2)]
        store = LmdbSlabStore(folder, 64 * MIB)
        assert store.write_many(self.records) == [OK] * 2
        store.close()
        self.io = FaultyIO()
        self.store = LmdbSlabStore(folder, 64 * MIB, io=self.io)
        assert self.is_read(0)
        self.said: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.said.append(self.is_read(1)))

    def is_read(self, number: int) -> bool:
        return is_exact(*fetch(self.store, self.records[number].header.id, 600_000))

    def __enter__(self) -> Self:
        self.io.fail("open", "hang", times=1)
        self._thread.start()
        while not self.io.hits:
            pass
        return self

    def end(self) -> bool:
        """Let the thread go on; say whether it read its record."""
        self.io.heal()
        self._thread.join()
        return self.said[0]

    def __exit__(self, *_: object) -> None:
        self.io.heal()
        self._thread.join()
        self.store.close()


def test_while_a_file_hangs_that_is_being_opened_others_are_read(tmp_path: Path) -> None:
    with Opening(tmp_path) as opening:
        said: list[bool] = []
        other = threading.Thread(target=lambda: said.append(opening.is_read(0)))
        other.start()
        other.join(10)
        meanwhile = list(said)
        opening.end()
        other.join()
    assert meanwhile == [True]


def test_a_file_that_two_have_opened_is_kept_once(tmp_path: Path) -> None:
    with Opening(tmp_path) as opening:
        assert opening.is_read(1)
        assert opening.end()
        assert [file.users for file in opening.store._files._open.values()] == [0, 0]


def test_a_file_that_opens_after_the_store_has_closed_is_closed(tmp_path: Path) -> None:
    with Opening(tmp_path) as opening:
        opening.store.close()
        assert not opening.end()
        assert not opening.store._files._open
