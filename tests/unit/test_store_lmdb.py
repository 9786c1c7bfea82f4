"""The NVMe store: the Store contract in each durability, and what is its own."""

from __future__ import annotations

import errno
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, KvtierError, MisuseError, Unavailable
from kvtier.storage_backends import slab_recovery
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import INDEX_FLOOR, SLOT_CHARGE, FileIO, Segment
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.testing.records import aligned, fetch, is_exact, make_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.tiers.store import Status, Store, Write

MIB = 1 << 20
PAGE = 4096
SHM = Path("/dev/shm")  # noqa: S108
OK, FULL, ABSENT, FAILED = Status.OK, Status.FULL, Status.ABSENT, Status.FAILED


@pytest.fixture(params=["none", "batch", "each"])
def durability(request: pytest.FixtureRequest) -> str:
    return request.param


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Opener:
    """Opens stores in one folder, and closes them after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores: list[LmdbSlabStore] = []

    def __call__(self, capacity: int = 16 * MIB, **options: object) -> LmdbSlabStore:
        store = LmdbSlabStore(self.folder, capacity, **options)
        self.stores.append(store)
        return store


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path / "kv")
    yield opener
    for store in opener.stores:
        store.close()


# -------------------------------------------------------------------------------- the contract


class TestContract(StoreSuite):
    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path, durability: str) -> None:
        self.folder = tmp_path / "kv"
        self.durability = durability

    def open_store(self) -> Store:
        location, options = str(self.folder), {"durability": self.durability}
        return LmdbSlabStore.open(location, self.capacity, options)

    reopen = open_store

    def raw_corrupt(self, record: Write, how: str) -> bool:
        path, offset = find_on_disk(self.folder, record)
        if how == "truncate":
            os.truncate(path, offset + PAGE + record.header.stored_bytes // 2)
            return True
        with path.open("r+b") as file:
            file.seek(offset + (20 if how == "header" else PAGE + 777))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        return True


class TestContractThroughPageCache(TestContract):
    """The same where O_DIRECT is refused."""

    def open_store(self) -> Store:
        return LmdbSlabStore(self.folder, self.capacity, durability=self.durability, io=NoDirect())

    reopen = open_store


class NoDirect(FileIO):
    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().open(path, flags)


def find_on_disk(folder: Path, record: Write) -> tuple[Path, int]:
    head = record.header.pack()
    for path in folder.glob("*.seg"):
        at = path.read_bytes().find(head)
        if at >= 0:
            return path, at
    raise AssertionError("the record is not on the disk")


# ------------------------------------------------------------------------------------ capacity


def disk_bytes(folder: Path) -> int:
    total = folder.stat().st_blocks * 512
    for path in list(folder.iterdir()):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def test_capacity_is_never_exceeded(opened: Opener, durability: str) -> None:
    capacity = 24 * MIB
    store = opened(capacity, durability=durability)
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            samples.append(disk_bytes(opened.folder))
            time.sleep(0.002)

    threads = [threading.Thread(target=overfill, args=(store, seed)) for seed in range(8)]
    sampler = threading.Thread(target=sample)
    for thread in (sampler, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    sampler.join()
    assert max(samples) <= capacity
    assert max(samples) > capacity * 0.8
    for header in list(store.scan()):
        assert is_exact(*fetch(store, header.id, header.stored_bytes))
    store.close()
    assert disk_bytes(opened.folder) <= capacity


def overfill(store: LmdbSlabStore, seed: int) -> None:
    choose = random.Random(seed)
    mine: list[bytes] = []
    for number in range(40):
        size = choose.choice((3000, 70_000, 262_144, 262_144, 900_000))
        record = make_record(1000 * seed + number, size)
        while (status := store.write_many([record])[0]) is FULL and mine:
            store.delete_many([mine.pop(0)])
        if status is OK:
            mine.append(record.header.id)


def test_lower_capacity_drops_the_oldest(opened: Opener) -> None:
    store = opened(32 * MIB)
    records = [make_record(number, MIB) for number in range(20)]
    assert store.write_many(records) == [OK] * 20
    store.close()
    store = opened(12 * MIB)
    assert disk_bytes(opened.folder) <= 12 * MIB
    left = [header.depth for header in store.scan()]
    assert left
    assert left == list(range(20 - len(left), 20))
    assert is_exact(*fetch(store, records[-1].header.id, MIB))


def test_index_that_outgrew_the_capacity_is_discarded(opened: Opener) -> None:
    store = opened(64 * MIB)
    assert set(store.write_many([make_record(n, 10) for n in range(3000)])) == {OK}
    store.close()
    store = opened(3 * MIB)
    assert disk_bytes(opened.folder) <= 3 * MIB
    assert store.write_many([make_record(1, 10)]) == [OK]


def test_segments_change_their_class(opened: Opener, durability: str) -> None:
    store = opened(durability=durability)
    for sizes in (100_000, 900_000, 5000, 3_000_000):
        names = []
        for number in range(5000):
            record = make_record(number, sizes)
            (status,) = store.write_many([record])
            if status is FULL:
                break
            assert status is OK
            names.append(record.header.id)
        assert status is FULL
        assert len(names) * store.footprint(sizes) > 16 * MIB * 0.6
        assert store.delete_many(names) == [OK] * len(names)


def test_slot_with_a_reader_is_not_reused(opened: Opener) -> None:
    class Slow(FileIO):
        entered, go = threading.Event(), threading.Event()
        armed = False

        def pread(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if self.armed:
                self.entered.set()
                assert self.go.wait(10)
            return super().pread(descriptor, buffers, offset)

    io = Slow()
    store = opened(4 * MIB, durability="each", io=io)
    old, new = make_record(1, MIB), make_record(2, MIB)
    assert store.write_many([old]) == [OK]
    io.armed = True
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.extend(fetch(store, old.header.id, MIB)))
    thread.start()
    assert io.entered.wait(10)
    assert store.delete_many([old.header.id]) == [OK]
    assert store.write_many([new]) == [FULL]
    io.go.set()
    thread.join()
    assert is_exact(*result)
    assert store.write_many([new]) == [OK]


def test_free_slots_are_waited_for_by_commit_only(opened: Opener) -> None:
    """In batch mode a deleted record's slot is reused, but after the deletion is committed."""
    store = opened(4 * MIB, clock=Clock())
    for number in range(20):
        record = make_record(number, MIB)
        assert store.write_many([record]) == [OK]
        assert store.delete_many([record.header.id]) == [OK]


def test_footprint_is_what_a_record_takes(opened: Opener) -> None:
    store = opened(64 * MIB)
    count = 0
    while store.write_many([make_record(count, 500_000)]) == [OK]:
        count += 1
    assert 0.93 * 64 * MIB <= count * store.footprint(500_000) <= 64 * MIB


# ------------------------------------------------------------------------------------- opening


def test_modes_are_private(opened: Opener) -> None:
    store = opened(durability="none")
    store.write_many([make_record(1, 100)])
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    for path in opened.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_foreign_files_are_left_alone(opened: Opener) -> None:
    opened.folder.mkdir()
    foreign = [opened.folder / name for name in ("data.mdb", "slab-1.seg", "notes")]
    for path in foreign:
        path.write_bytes(b"mine" * 5 * MIB)
    store = opened(4 * MIB)
    assert store.write_many([make_record(1, MIB)]) == [OK]
    store.close()
    (opened.folder / "index.lmdb").write_bytes(b"garbage" * 10_000)
    opened(4 * MIB)
    assert all(path.read_bytes() == b"mine" * 5 * MIB for path in foreign)


def test_o_direct_refused_is_said_once(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(io=NoDirect())
    for number in range(3):
        assert store.write_many([make_record(number, 1000)]) == [OK]
    assert [r.message for r in caplog.records].count(
        f"{opened.folder} refuses O_DIRECT; going through the page cache"
    ) == 1


def test_tmpfs() -> None:
    if not os.path.ismount(SHM):
        pytest.skip("no tmpfs at /dev/shm")
    folder = SHM / f"kvtier-test-{os.getpid()}"
    try:
        store = LmdbSlabStore(folder, 8 * MIB)
        record = make_record(1, 100_000)
        assert store.write_many([record]) == [OK]
        assert is_exact(*fetch(store, record.header.id, 100_000))
        store.close()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


OPEN_AS_NOBODY = """
import os, sys
from pathlib import Path
from kvtier.errors import ConfigError
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
if os.getuid() == 0:
    os.setuid(65534)
try:
    LmdbSlabStore(Path(sys.argv[1]), 1 << 24)
except ConfigError as error:
    print(error)
"""


def in_python(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_folder_without_permission(opened: Opener) -> None:
    opened.folder.mkdir(mode=0o555)
    said = in_python(OPEN_AS_NOBODY, opened.folder)
    assert str(opened.folder) in said
    assert "EACCES" in said
    assert "write" in said


def test_folder_that_is_a_file(opened: Opener) -> None:
    opened.folder.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"kv: (EEXIST|ENOTDIR) .*choose another"):
        opened()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
def test_self_test_names_the_error(opened: Opener, code: int) -> None:
    class Broken(FileIO):
        def pwrite(self, *_: object) -> int:
            raise OSError(code, "no")

    with pytest.raises(ConfigError, match=rf"kv: {errno.errorcode[code]} .*; \w+"):
        opened(io=Broken())
    opened()  # the lock was released


def test_capacity_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        LmdbSlabStore.open(str(tmp_path), None, {})
    with pytest.raises(ConfigError, match="directory"):
        LmdbSlabStore.open("", 1 << 30, {})
    with pytest.raises(ConfigError, match="too small"):
        LmdbSlabStore.open(str(tmp_path / "kv"), 1 << 20, {})
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        LmdbSlabStore.OPTIONS["durability"].parse("bach")


def test_unknown_version_is_refused(opened: Opener) -> None:
    opened().close()
    (opened.folder / "format").write_bytes(b"kvtier slab store, format 2\n")
    with pytest.raises(ConfigError, match=r"format 2.*knows only.*format 1"):
        opened()
    (opened.folder / "format").unlink()
    with pytest.raises(ConfigError, match="no file named format"):
        opened()


# --------------------------------------------------------------------------------- one process


def test_one_process_at_a_time(opened: Opener) -> None:
    opened()
    with pytest.raises(ConfigError, match=f"already open in this process .{os.getpid()}"):
        opened()
    script = OPEN_AS_NOBODY.replace("os.setuid(65534)", "pass")
    assert f"in use by process {os.getpid()};" in in_python(script, opened.folder)
    opened.stores[0].close()
    assert in_python(script, opened.folder) == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_refused_and_the_parent_goes_on(opened: Opener) -> None:
    store = opened()
    record = make_record(1, 10_000)
    store.write_many([record])
    child = os.fork()
    if child == 0:
        os._exit(refused_in_child(store, opened.folder))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_exact(*fetch(store, record.header.id, 10_000))
    assert store.write_many([make_record(2, 10_000)]) == [OK]
    assert f"in use by process {os.getpid()};" in in_python(OPEN_AS_NOBODY, opened.folder) or (
        os.getuid() == 0
    )


def refused_in_child(store: LmdbSlabStore, folder: Path) -> int:
    calls: list[Callable[[], object]] = [
        lambda: store.contains_many([]),
        lambda: store.read_many([], []),
        lambda: store.write_many([]),
        lambda: store.delete_many([]),
        lambda: list(store.scan()),
        store.close,
    ]
    for call in calls:
        try:
            call()
        except MisuseError:
            continue
        return 1
    try:
        LmdbSlabStore(folder, 16 * MIB)
    except ConfigError as error:
        return 0 if str(os.getppid()) in str(error) else 2
    return 3


def test_use_after_close(opened: Opener) -> None:
    store = opened()
    store.close()
    with pytest.raises(MisuseError, match="closed"):
        store.contains_many([])


# ------------------------------------------------------------------------------ damaged on disk


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
    opened: Opener, damage: Callable[[Path], None], reason: str
) -> None:
    store = opened(64 * MIB)
    store.write_many([make_record(number, 5000) for number in range(200)])
    store.close()
    damage(opened.folder / "index.lmdb")
    store = opened(64 * MIB)
    assert list(store.scan()) == []
    assert (opened.folder / f"index-{reason}.bad").exists()
    assert disk_bytes(opened.folder) <= 64 * MIB
    assert store.write_many([make_record(1, MIB)]) == [OK]
    store.close()
    store = opened(64 * MIB)
    assert [header.depth for header in store.scan()] == [1]


def test_empty_or_missing_index_starts_empty(opened: Opener) -> None:
    for damage in (cut_to(0), Path.unlink):
        store = opened()
        store.write_many([make_record(1, 5000)])
        store.close()
        damage(opened.folder / "index.lmdb")
        store = opened()
        assert list(store.scan()) == []
        store.close()


def test_index_cut_while_open_is_unavailable(opened: Opener) -> None:
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
    opened: Opener, damage: Callable[[Path], None]
) -> None:
    store = opened(128 * MIB)
    records = [make_record(number, 200_000) for number in range(12)]
    store.write_many(records)
    store.close()
    path, _ = find_on_disk(opened.folder, records[6])
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


def test_segment_gone_while_open(opened: Opener) -> None:
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


# ---------------------------------------------------------------------------------- durability


def test_batch_is_committed_by_age_and_by_size(opened: Opener) -> None:
    clock = Clock()
    store = opened(256 * MIB, clock=clock)

    def committed() -> int:
        return len(store._ledger.page(b"", 100))

    store.write_many([make_record(1, 5000)])
    assert committed() == 0
    clock.now = 1.1
    store.write_many([make_record(2, 5000)])
    assert committed() == 2
    for number in range(3, 12):
        store.write_many([make_record(number, 8 * MIB)])
    assert committed() == 10


def test_none_is_discarded_after_a_restart(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = make_record(1, 5000)
    store = opened(durability="none")
    store.write_many([record])
    pretend_killed(store)
    store = opened(durability="none")
    assert store.contains_many([record.header.id]) == [OK]
    pretend_killed(store)
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    store = opened()
    assert store.contains_many([record.header.id]) == [ABSENT]
    assert "before the machine restarted" in caplog.text


def test_none_closed_cleanly_survives_a_restart(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record(1, 5000)
    store = opened(durability="none")
    store.write_many([record])
    store.close()
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    assert opened().contains_many([record.header.id]) == [OK]


def test_none_can_become_each(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(1, 5000)
    store = opened(durability="none")
    store.write_many([record])
    pretend_killed(store)
    store = opened(durability="each")
    pretend_killed(store)
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    assert opened().contains_many([record.header.id]) == [OK]


def pretend_killed(store: LmdbSlabStore) -> None:
    """Release what the kernel would, and nothing more."""
    store._closed = True
    store._files.close()
    store._ledger._index.close()
    store._directory.release()


def test_each_groups_concurrent_writers(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(64 * MIB, durability="each")
    commits: list[int] = []
    whole = Index.commit

    def slow(self: Index, operations: dict[bytes, Entry | None]) -> None:
        commits.append(len(operations))
        time.sleep(0.02)
        whole(self, operations)

    monkeypatch.setattr(Index, "commit", slow)
    statuses: list[Status] = []
    threads = [
        threading.Thread(target=lambda n=n: statuses.extend(store.write_many([make_record(n, 99)])))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [OK] * 8
    assert sum(commits) == 8
    assert len(commits) < 8


def test_scan_is_in_order_of_writing(opened: Opener) -> None:
    store = opened(64 * MIB)
    order = list(range(700))
    random.Random(3).shuffle(order)
    for number in order:
        store.write_many([make_record(number, 10)])
    store.write_many([make_record(order[5], 10, version=1)])
    expected = [number for number in order if number != order[5]] + [order[5]]
    assert [header.depth for header in store.scan()] == expected
    store.close()
    store = opened(64 * MIB)
    assert [header.depth for header in store.scan()] == expected
    store.write_many([make_record(9999, 10)])
    assert [header.depth for header in store.scan()] == [*expected, 9999]


def test_writing_again_writes_nothing(opened: Opener) -> None:
    class Counting(FileIO):
        writes = 0

        def pwrite(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            self.writes += 1
            return super().pwrite(descriptor, buffers, offset)

    records = [make_record(number, 1000) for number in range(50)]
    store = opened()
    store.write_many(records)
    store.close()
    io = Counting()
    store = opened(io=io)
    before = io.writes
    assert store.write_many(records) == [OK] * 50
    assert io.writes == before


# -------------------------------------------------------------------------------------- faults


class Faulty(FileIO):
    """Fails the Nth call after it was armed."""

    def __init__(self, kind: str, at: int = 0) -> None:
        self.kind = kind
        self.left = at

    def _due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def _fail(self) -> None:
        if self._due():
            raise OSError(getattr(errno, self.kind), "injected")

    def open(self, path: Path, flags: int) -> int:
        if self.kind != "short":
            self._fail()
        return super().open(path, flags)

    def fallocate(self, descriptor: int, length: int) -> None:
        if self.kind != "short":
            self._fail()
        super().fallocate(descriptor, length)

    def fdatasync(self, descriptor: int) -> None:
        if self.kind != "short":
            self._fail()
        super().fdatasync(descriptor)

    def pread(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return self._maybe_short(super().pread, descriptor, buffers, offset)

    def pwrite(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return self._maybe_short(super().pwrite, descriptor, buffers, offset)

    def _maybe_short(
        self,
        call: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        buffers: list[memoryview],
        offset: int,
    ) -> int:
        if self.kind != "short":
            self._fail()
            return call(descriptor, buffers, offset)
        return call(descriptor, buffers, offset) - (512 if self._due() else 0)


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EMFILE", "short"])
def test_every_fault_while_open(tmp_path: Path, durability: str, kind: str) -> None:
    for at in range(1, 200):
        io = Faulty(kind)
        store = LmdbSlabStore(tmp_path / f"{at}", 8 * MIB, durability=durability, io=io)
        io.left = at
        present, absent = scenario(store)
        hit = io.left <= 0
        io.left = 0
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


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EMFILE", "short"])
def test_every_fault_at_opening(tmp_path: Path, kind: str) -> None:
    for at in range(1, 20):
        io = Faulty(kind, at)
        try:
            LmdbSlabStore(tmp_path / f"{at}", 8 * MIB, io=io).close()
        except KvtierError as error:
            assert isinstance(error, ConfigError)  # noqa: PT017
            LmdbSlabStore(tmp_path / f"{at}", 8 * MIB).close()
        else:
            break
    assert io.left > 0
    assert at > 1


@pytest.mark.parametrize("durability", ["batch", "each"])
def test_failed_commit_withdraws_its_writes(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, durability: str, caplog: object
) -> None:
    clock = Clock()
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


def test_full_index_is_unavailable_and_keeps_its_entries(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", 40 * PAGE, synced=False)
    names = [number.to_bytes(38, "big") for number in range(500)]
    entry = Entry(1, 2, 3, bytes(256))
    with pytest.raises(Unavailable, match="full"):
        index.commit(dict.fromkeys(names, entry))
    kept = [found for found in index.find(names) if found]
    assert len(kept) > 100
    assert set(kept) == {entry}
    index.grow(400 * PAGE)
    index.commit(dict.fromkeys(names, entry))
    assert index.find(names) == [entry] * 500
    index.close()


def test_index_has_room_for_its_slots(tmp_path: Path) -> None:
    """With every slot in use, large batches of replacements leave the map far from full."""
    slots = 6000
    size = INDEX_FLOOR + slots * SLOT_CHARGE
    index = Index(tmp_path / "index", size, synced=False)
    choose = random.Random(5)
    names = [choose.randbytes(38) for _ in range(slots)]
    entry = Entry(1, 2, 3, bytes(256))
    index.commit(dict.fromkeys(names, entry))
    for _ in range(60):
        operations: dict[bytes, Entry | None] = {}
        for _ in range(600):
            at = choose.randrange(slots)
            operations[names[at]] = None
            names[at] = choose.randbytes(38)
            operations[names[at]] = entry
        index.commit(operations)
    assert (index._env.info()["last_pgno"] + 1) * PAGE < 0.9 * size
    index.close()


def test_more_segments_than_open_files(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.storage_backends.slab_files._MAX_OPEN", 3)
    store = opened(64 * MIB)
    records = [make_record(number, 600_000) for number in range(20)]
    assert store.write_many(records) == [OK] * 20
    assert len(store._files._open) <= 3
    for record in records:
        assert is_exact(*fetch(store, record.header.id, 600_000))
    assert len(list(opened.folder.glob("*.seg"))) == 20


def test_segment_names() -> None:
    segment = Segment(7, 8192, 3)
    again = Segment.named(segment.name, 3 * 8192 + 100)
    assert again is not None
    assert (again.number, again.stride, again.slots) == (7, 8192, 3)
    for foreign in ("slab-00000007-8191.seg", "slab-7-8192.seg", "slab-00000007-8192.seg.bak"):
        assert Segment.named(foreign, 8192) is None


def test_read_tells_why_in_the_log(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    io = Faulty("EIO")
    store = opened(io=io, clock=Clock())
    record = make_record(1, 5000)
    store.write_many([record])
    for _ in range(5):
        io.left = 1
        assert store.read_many([record.header.id], [aligned(8192)])[0].status is FAILED
    assert caplog.text.count("injected") == 1
