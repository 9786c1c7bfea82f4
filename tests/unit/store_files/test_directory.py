"""A files store among strangers' files, with several writers, and with calls that fail."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier
from kvtier.cli.main import run
from kvtier.errors import Unavailable
from kvtier.storage_backends import files_usage
from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import OVERHEAD, footprint
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.testing.toy import Toy, dram, opened, prompt
from kvtier.tiers.store import Read, Span, Status

SIZE = 10_000
MIB = 1 << 20


def room(records: int) -> int:
    return OVERHEAD + records * footprint(SIZE)


def path_of(folder: Path, record) -> Path:
    name = record.header.id.hex()
    return folder / name[:2] / f"{name[:64]}-{name[64:]}.kv"


def taken(folder: Path) -> int:
    """Return what the disk says that a directory takes."""
    return sum(os.lstat(path).st_blocks * 512 for path in [folder, *folder.rglob("*")])


@pytest.fixture
def at(tmp_path: Path):
    """Open stores that are closed at the end."""
    stores = []

    def open_at(capacity: int | None = 64 * MIB, **how) -> FilesStore:
        stores.append(FilesStore(tmp_path / "kv", capacity, **how))
        return stores[-1]

    yield open_at
    for store in stores:
        store.close()


# ----------------------------------------------------------------------------------- strangers


def test_what_is_not_ours_is_neither_touched_nor_counted(at, tmp_path):
    folder = tmp_path / "kv"
    (folder / "00").mkdir(parents=True)
    strange = [folder / "notes.txt", folder / "00" / "x.kv", folder / "selftest-mine"]
    for path in strange:
        path.write_bytes(b"x" * SIZE)
    store = at(room(2))
    records = [make_record(number, SIZE) for number in range(3)]
    assert store.write_many(records) == [Status.OK, Status.OK, Status.FULL]
    # Both may have been written within one tick of the file system's clock.
    assert sorted(header.depth for header in store.scan()) == [0, 1]
    store.delete_many([record.header.id for record in records])
    assert [path.read_bytes() for path in strange] == [b"x" * SIZE] * 3


@pytest.mark.parametrize("how", ["link", "directory", "queue", "empty"])
def test_what_lies_under_a_records_name_is_never_served(at, tmp_path, how):
    record, other = make_record(1, SIZE), make_record(2, SIZE)
    store = at()
    store.write_many([record, other])
    path = path_of(tmp_path / "kv", record)
    path.unlink()
    if how == "link":
        path.symlink_to(path_of(tmp_path / "kv", other))
    elif how == "directory":
        path.mkdir()
    elif how == "queue":
        os.mkfifo(path)
    else:
        path.touch()
    read, _ = fetch(store, record.header.id, SIZE)
    assert read.status in (Status.FAILED, Status.CORRUPT)
    assert [header.depth for header in store.scan()] == [2]
    assert is_exact(*fetch(store, other.header.id, SIZE))


def test_another_record_under_a_name_is_corrupt(at, tmp_path):
    record, other = make_record(1, SIZE), make_record(2, SIZE)
    store = at()
    store.write_many([record, other])
    shutil.copy(path_of(tmp_path / "kv", other), path_of(tmp_path / "kv", record))
    assert fetch(store, record.header.id, SIZE)[0] == Read(Status.CORRUPT)
    assert store.write_many([record]) == [Status.OK]
    assert is_exact(*fetch(store, record.header.id, SIZE))


def test_files_are_their_users_alone(at, tmp_path):
    record = make_record(1, SIZE)
    at().write_many([record])
    path = path_of(tmp_path / "kv", record)
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "kv", path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


# ------------------------------------------------------------------------------- many writers


def test_two_stores_see_and_replace_each_others_records(at):
    one, other = at(), at()
    record, newer = make_record(1, SIZE), make_record(1, 2 * SIZE, version=1)
    assert one.write_many([record]) == [Status.OK]
    assert is_exact(*fetch(other, record.header.id, SIZE))
    assert other.write_many([newer]) == [Status.OK]
    assert fetch(one, record.header.id, 2 * SIZE)[0].header == newer.header
    assert one.delete_many([record.header.id]) == [Status.OK]
    assert other.contains_many([record.header.id]) == [Status.ABSENT]


def test_all_writers_share_one_capacity_and_a_replaced_record_is_counted_once(at, tmp_path):
    one, other = at(room(3)), at(room(3))
    for _ in range(5):
        for version in range(2):
            assert one.write_many([make_record(1, SIZE, version=version)]) == [Status.OK]
    assert other.write_many([make_record(n, SIZE) for n in (2, 3, 4)]) == [
        Status.OK,
        Status.OK,
        Status.FULL,
    ]
    assert one.write_many([make_record(5, SIZE)]) == [Status.FULL]
    assert taken(tmp_path / "kv") <= room(3)
    assert one.delete_many([make_record(2, SIZE).header.id]) == [Status.OK]
    assert other.write_many([make_record(4, SIZE)]) == [Status.OK]


def between(store: FilesStore, monkeypatch, act: Callable[[], object]) -> list[object]:
    """Let `act` happen once, after `store` has read the count and before it writes it."""
    usage, said = store._usage, []
    read = usage._read

    def reading() -> int:
        used = read()
        monkeypatch.setattr(usage, "_read", read)
        said.append(act())
        return used

    monkeypatch.setattr(usage, "_read", reading)
    return said


def race(at, monkeypatch) -> tuple[list[object], int]:
    """Let two writers see room for one record; return what they were told, and what is there."""
    monkeypatch.setattr(files_usage, "_LOCK_SECONDS", 0.05)
    one, other = at(room(1)), at(room(1))
    second = make_record(2, SIZE)
    said = between(one, monkeypatch, lambda: other.write_many([second]))
    said.append(one.write_many([make_record(1, SIZE)]))
    return said, len(list(one.scan()))


def test_two_writers_never_take_the_same_room(at, monkeypatch):
    assert race(at, monkeypatch) == ([[Status.FAILED], [Status.OK]], 1)


def test_without_the_lock_they_would(at, monkeypatch):
    monkeypatch.setattr(files_usage, "lock", lambda *_: True)
    assert race(at, monkeypatch) == ([[Status.OK], [Status.OK]], 2)


def test_a_count_that_is_damaged_or_too_high_is_made_anew(at, tmp_path):
    now = [0.0]
    store = at(room(2), clock=lambda: now[0])
    usage = tmp_path / "kv" / "usage"
    assert store.write_many([make_record(1, SIZE)]) == [Status.OK]
    usage.write_bytes(b"x" * 24)
    assert store.write_many([make_record(2, SIZE)]) == [Status.OK]
    assert store.write_many([make_record(3, SIZE)]) == [Status.FULL]
    path_of(tmp_path / "kv", make_record(1, SIZE)).unlink()  # behind its back
    assert store.write_many([make_record(3, SIZE)]) == [Status.FULL]
    now[0] = 61.0
    assert store.write_many([make_record(3, SIZE)]) == [Status.OK]
    assert store.write_many([make_record(4, SIZE)]) == [Status.FULL]


def test_a_dead_writers_draft_is_counted_and_removed_after_an_hour(at, tmp_path):
    record = make_record(1, SIZE)

    class Dies(Folder):
        def rename(self, old, new):
            if new.endswith(".kv"):
                raise KeyboardInterrupt
            super().rename(old, new)

        def unlink(self, name):
            if name.endswith(".new"):
                raise OSError(errno.EIO, "gone")
            super().unlink(name)

    with pytest.raises(KeyboardInterrupt):
        at(room(1), folder=Dies)._write(record)
    [draft] = (tmp_path / "kv").glob("*/*.new")
    assert at(room(1)).write_many([record]) == [Status.FULL]
    os.utime(draft, (1, 1))
    assert at(room(1)).write_many([record]) == [Status.OK]
    assert not draft.exists()


# ------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("verb", ["change", "extend", "write", "sync", "rename", "sync_names"])
@pytest.mark.parametrize(
    ("number", "status"), [(errno.EIO, Status.FAILED), (errno.EDQUOT, Status.FULL)]
)
def test_a_failed_write_leaves_nothing_and_counts_nothing(
    at, tmp_path, monkeypatch, verb, number, status
):
    record = make_record(1, SIZE)
    store = at(room(1))
    assert store.write_many([record]) == [Status.OK]  # its shelf is there
    assert store.delete_many([record.header.id]) == [Status.OK]

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store._folder, verb, fails)
    assert store.write_many([record]) == [status]
    monkeypatch.undo()
    assert not list((tmp_path / "kv").glob("*/*.new"))
    assert store.write_many([record]) == [Status.OK]
    assert is_exact(*fetch(store, record.header.id, SIZE))


def test_short_reads_and_writes_are_continued(at, monkeypatch):
    record = make_record(1, SIZE)
    for name in ("preadv", "pwritev"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda number, buffers, at, call=call: call(number, [buffers[0][:999]], at)
        )
    store = at()
    assert store.write_many([record]) == [Status.OK]
    assert is_exact(*fetch(store, record.header.id, SIZE))


def test_what_another_host_removed_meanwhile_is_absent(at, monkeypatch):
    store = at()

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(store._folder, "look", stale)
    assert fetch(store, make_record(1, SIZE).header.id, SIZE)[0] == Read(Status.ABSENT)


def test_a_closed_store_says_so(at):
    store = at()
    store.close()
    with pytest.raises(Unavailable, match="closed"):
        store.contains_many([make_record(1, SIZE).header.id])


# ---------------------------------------------------------------------------- spans, collection


def test_pieces_of_a_record_are_read_and_what_is_shorter_is_corrupt(at):
    store, record = at(), make_record(1, SIZE)
    store.write_many([record])
    first, second = (memoryview(bytearray(count)) for count in (100, 200))
    short = memoryview(bytearray(2))
    spans = [
        Span(record.header.id, 500, [first, second]),
        Span(record.header.id, SIZE - 1, [short]),
        Span(make_record(2, 1).header.id, 0, [short]),
    ]
    assert store.read_spans(spans) == [Status.OK, Status.CORRUPT, Status.ABSENT]
    assert bytes(first) + bytes(second) == record.data[500:800]


def test_a_medium_lists_claims_races_and_removes(at, tmp_path):
    store, other = at(), at()
    records = [make_record(number, SIZE) for number in range(3)]
    store.write_many(records)
    (tmp_path / "kv" / path_of(tmp_path / "kv", records[0]).parent / "x.kv").write_text("x")
    medium, rival = store.medium(), other.medium()
    names = {one.id for one in medium.listed()}
    assert names == {one.header.id for one in records} | {None}
    assert [medium.claim(1), medium.claim(1), rival.claim(1)] == [True, True, False]
    medium.release()
    assert rival.claim(1)
    assert medium.race(8) == 1
    assert medium.remove([records[0].header.id, make_record(9, 1).header.id]) == [True, True]
    assert store.contains_many([records[0].header.id]) == [Status.ABSENT]
    assert not list((tmp_path / "kv").glob("collection-*"))


def test_a_full_directory_is_collected_and_takes_more(tmp_path, capsys):
    url = f"files:{tmp_path}/kv?capacity={OVERHEAD + 200_000}B"
    toy = opened(dram(64), f"{url}&admission=through")
    tokens = [prompt(400, seed) for seed in range(4)]
    for seed in range(4):
        toy.save(f"save {seed}", tokens[seed])
    toy.close()
    assert run(["gc", f"files:{tmp_path}/kv?capacity={OVERHEAD + 60_000}B", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["removed"]["capacity"] > 0
    assert found["strangers"] == found["unreadable"] == 0
    toy = opened(dram(64), f"{url}&admission=through")
    loaded = [toy.load(f"load {seed}", tokens[seed]) for seed in range(4)]
    assert all(exact for _, _, exact in loaded)
    toy.save("more", prompt(400, 9))
    toy.cache.clear("dram")
    assert toy.load("again", prompt(400, 9))[::2] == (384, True)
    toy.close()


@pytest.mark.parametrize("inside", ["typo", "other", "file/kv"])
def test_whoever_collects_makes_no_store(tmp_path, capsys, inside):
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert run(["gc", f"files:{tmp_path}/{inside}?capacity=1GiB"]) == 2
    said = capsys.readouterr().err
    assert said == (
        f"error: there is no files store in {tmp_path}/{inside}; mount it, or correct the path\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_without_that_look_a_mistyped_path_would_become_a_store(tmp_path, monkeypatch):
    monkeypatch.delattr(FilesStore, "check_made")
    assert run(["gc", f"files:{tmp_path}/typo?capacity=1GiB"]) == 0
    assert (tmp_path / "typo" / "format").exists()


def test_nobody_is_told_the_price_of_a_directory(tmp_path, capsys):
    url = f"files:{tmp_path}/kv?capacity=64MiB"
    toy = opened(dram(32), f"{url}&admission=through")
    toy.save("save", prompt(400, 1))
    toy.close()
    assert run(["gc", url]) == 0
    said = capsys.readouterr().out
    assert "are left" in said
    assert "this took" in said
    assert "$" not in said


# ------------------------------------------------------------------------------------- as a tier


def test_what_one_cache_saves_another_one_loads(tmp_path):
    tiers = dram(32), f"files:{tmp_path}/kv?capacity=64MiB&admission=through"
    one, other = opened(*tiers), opened(*tiers)
    tokens = prompt(400)
    one.save("a", tokens)
    try:
        got, loaded, exact = other.load("b", tokens)
    finally:
        one.close()
        other.close()
    assert (got, loaded.tokens, exact) == (384, 384, True)


def test_the_url_is_read_like_any_other(tmp_path):
    with pytest.raises(kvtier.ConfigError, match="did you mean 'durability'"):
        opened("dram:4MiB", f"files:{tmp_path}/kv?capacity=64MiB&durabilty=each")
    with pytest.raises(kvtier.ConfigError, match="below one chunk"):
        opened("dram:4MiB", f"files:{tmp_path}/kv?capacity={OVERHEAD + 1}B")
    toy: Toy = opened("dram:4MiB", f"files:{tmp_path}/kv?capacity=unbounded")
    toy.close()


def test_a_full_directory_goes_on_by_evicting_what_this_host_knows(tmp_path):
    capacity = OVERHEAD + 300_000
    toy = opened(dram(64), f"files:{tmp_path}/kv?capacity={capacity}B&admission=through")
    for seed in range(12):
        toy.save(f"save {seed}", prompt(400, seed))
        assert taken(tmp_path / "kv") <= capacity
        toy.cache.clear("dram")
        assert toy.load(f"load {seed}", prompt(400, seed))[::2] == (384, True)
    assert toy.cache.metrics.get("evicted_parts", tier="files") > 0
    toy.close()
