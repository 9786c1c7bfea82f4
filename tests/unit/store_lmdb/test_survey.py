"""What is said of a slab directory from outside, while it is open or closed."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends import slab_directory
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import PAGE, stride_of
from kvtier.storage_backends.slab_survey import survey
from kvtier.testing.records import NAMESPACE, make_record
from kvtier.tiers.store import Status
from kvtier.tiers.survey import Surveyed

MIB = 1 << 20
OK = Status.OK
OTHER = hashlib.sha256(b"another").digest()


def quiet(text: str, done: int, count: int) -> None:
    assert text
    assert 0 <= done <= count


def look(folder: Path) -> Any:
    return survey(folder, quiet)


def image(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Return all that a write would change: contents, and the times of the last changes."""
    found = {}
    for path in [folder, *folder.iterdir()]:
        at = path.stat()
        found[path.name] = (
            b"" if path.is_dir() else path.read_bytes(),
            at.st_mtime_ns,
            stat.S_IMODE(at.st_mode),
        )
    return found


@pytest.fixture
def filled(opened: Any) -> Any:
    """Return an opener with a closed store of 30 records of one namespace and 10 of another."""
    wall = iter(range(1_700_000_000, 1_800_000_000))
    store = opened(64 * MIB, durability="each", wall=lambda: float(next(wall)))
    records = [make_record(n, 50_000) for n in range(30)]
    records += [make_record(n, 3000, namespace=OTHER) for n in range(10)]
    for record in records:  # each at a time of its own
        assert store.write_many([record]) == [OK]
    store.close()
    return opened


def test_the_store_can_be_looked_at() -> None:
    assert issubclass(LmdbSlabStore, Surveyed)


def test_records_are_told_by_namespace(filled: Any) -> None:
    found = look(filled.folder)
    first, second = found.namespaces
    assert (first.namespace, second.namespace) == (NAMESPACE.hex(), OTHER.hex())
    assert (first.records, first.stored_bytes, first.raw_bytes) == (30, 1_500_000, 1_500_000)
    assert astuple(first.depth) == (0, 15, 29)
    assert astuple(second.record_bytes) == (3000, 3000, 3000)
    assert first.codecs == {"raw": 30}
    assert (found.records, found.stored_bytes, found.astray) == (40, 1_530_000, 0)


def test_slots_are_told_by_their_size(filled: Any) -> None:
    small, large = look(filled.folder).classes
    assert (small.slot_bytes, small.used_slots) == (stride_of(3000), 10)
    assert (large.slot_bytes, large.used_slots) == (stride_of(50_000), 30)
    assert small.slots >= 10
    assert small.stored_bytes == 30_000
    assert large.segments == len(list(filled.folder.glob(f"slab-*-{large.slot_bytes}.seg")))


def test_what_is_taken_is_what_the_store_counts(opened: Any) -> None:
    store = opened(64 * MIB, durability="each")
    store.write_many([make_record(n, 50_000) for n in range(30)])
    found = look(opened.folder)
    assert found.charged_bytes == store._ledger._slabs.charged
    assert found.disk_bytes == opened.disk_bytes()
    assert found.disk_bytes <= found.charged_bytes <= found.capacity == 64 * MIB


def test_age_is_the_time_since_the_write(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.storage_backends.slab_survey.time.time", lambda: 1_700_000_100.0)
    first, second = look(filled.folder).namespaces
    assert astuple(first.age_s) == (71.0, 86.0, 100.0)
    assert astuple(second.age_s) == (61.0, 66.0, 70.0)


def test_a_clock_that_went_back_orders_records_all_the_same(opened: Any) -> None:
    times = iter([2e9, 1.9e9, -5.0, 2e9])
    store = opened(durability="each", wall=lambda: next(times))
    records = [make_record(n, 100) for n in (3, 1, 2, 0)]
    for record in records:
        store.write_many([record])
    assert [header.depth for header in store.scan()] == [3, 1, 2, 0]
    assert astuple(look(opened.folder).namespaces[0].age_s) == (0, 0, 0)  # not negative


def test_records_of_an_older_kvtier_have_no_age(opened: Any) -> None:
    store = opened(durability="each", wall=lambda: 0.0)  # its sequences were counted from 1
    store.write_many([make_record(1, 100)])
    assert look(opened.folder).namespaces[0].age_s is None


@pytest.mark.parametrize("mode", ["none", "batch", "each"])
def test_capacity_and_durability_are_those_of_the_last_opening(opened: Any, mode: str) -> None:
    opened(32 * MIB, durability="batch").close()
    opened(64 * MIB, durability=mode).close()
    found = look(opened.folder)
    assert (found.capacity, found.durability, found.format) == (64 * MIB, mode, 2)
    (opened.folder / "settings").write_bytes(b"capacity much\n")
    found = look(opened.folder)
    assert (found.capacity, found.durability) == (None, None)


def test_a_refused_opening_is_not_written_down(opened: Any) -> None:
    opened(32 * MIB).close()
    with pytest.raises(ConfigError, match="too small"):
        opened(1 * MIB)
    assert look(opened.folder).capacity == 32 * MIB


def test_nothing_is_written(filled: Any) -> None:
    before = image(filled.folder)
    look(filled.folder)
    assert image(filled.folder) == before


def test_looking_from_within_the_owner_keeps_its_lock(filled: Any) -> None:
    store = filled(64 * MIB)
    found = look(filled.folder)
    assert found.holder == str(os.getpid())
    assert slab_directory.holder(filled.folder) == str(os.getpid())
    child = os.fork()
    if child == 0:  # POSIX locks are of the process: only another one can tell
        os._exit(0 if slab_directory.holder(filled.folder) == str(os.getppid()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.close()
    assert look(filled.folder).holder is None


def test_twin_without_the_table_of_open_directories_the_lock_is_lost(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(64 * MIB)
    monkeypatch.setattr(slab_directory, "_open", {})
    look(filled.folder)
    child = os.fork()
    if child == 0:
        os._exit(0 if slab_directory.holder(filled.folder) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_was_only_opened_is_empty(opened: Any) -> None:
    opened(64 * MIB).close()
    found = look(opened.folder)
    assert (found.records, found.namespaces, found.classes) == (0, [], [])
    (opened.folder / "index.lmdb").unlink()
    assert look(opened.folder).records == 0


def test_foreign_files_are_not_counted(filled: Any) -> None:
    before = look(filled.folder)
    for name in ("notes", "slab-1.seg", f"slab-00000001-{PAGE + 1}.seg", "data.mdb"):
        (filled.folder / name).write_bytes(b"mine" * 100_000)
    after = look(filled.folder)
    assert (after.disk_bytes, after.charged_bytes) == (before.disk_bytes, before.charged_bytes)
    assert after.classes == before.classes


def test_entries_that_lead_nowhere_are_counted(filled: Any) -> None:
    path, _ = filled.find(make_record(0, 50_000))
    path.unlink()
    found = look(filled.folder)
    assert found.records == 40
    assert found.astray >= 1


# ------------------------------------------------------------------------------- what is refused


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; name the directory of an lmdb tier"):
        look(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="is no directory; name"):
        look(tmp_path / "file")
    with pytest.raises(ConfigError, match="holds no lmdb tier: it has no file named format"):
        look(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"kvtier slab store, format 3\n",
            "has format 3, and this kvtier knows only 2; use the kv",
        ),
        (b"", "is no lmdb tier, or a damaged one"),
        (b"\xff" * 10_000, "is no lmdb tier, or a damaged one"),
    ],
)
def test_another_format(filled: Any, content: bytes, said: str) -> None:
    (filled.folder / "format").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        look(filled.folder)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("length", [100, PAGE + 100, 3 * PAGE])
def test_an_index_that_is_cut(filled: Any, length: int) -> None:
    os.truncate(filled.folder / "index.lmdb", length)
    with pytest.raises(ConfigError, match=r"the index of .* is damaged \(truncated\); look at it"):
        look(filled.folder)


def test_an_index_with_a_torn_page(filled: Any) -> None:
    with (filled.folder / "index.lmdb").open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(b"\xff" * 20 * PAGE)
    with pytest.raises(ConfigError, match=r"is damaged \(page \d+ .*kvtier verify"):
        look(filled.folder)


def test_an_index_that_is_gone(filled: Any) -> None:
    (filled.folder / "index.lmdb").unlink()
    with pytest.raises(ConfigError, match=r"is damaged \(missing\)"):
        look(filled.folder)


def test_a_folder_of_another_user(filled: Any, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        else:
            filled.folder.chmod(0)
        try:
            look(filled.folder)
        except ConfigError as error:
            os._exit(0 if "run this as the user that owns it" in str(error) else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    filled.folder.chmod(0o700)
    assert status == 0


def test_a_read_only_copy_can_be_looked_at(filled: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(filled.folder, copy)
    for path in [*copy.iterdir(), copy]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert look(copy).records == 40
    copy.chmod(0o700)
