"""A files store of which somebody removes the directory, or what is in it, while it is used."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, Unavailable
from kvtier.events import noted
from kvtier.storage_backends import files_door, files_usage
from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import OVERHEAD, footprint
from kvtier.testing.records import make_record
from kvtier.testing.toy import CHUNK, dram, opened, prompt
from kvtier.tiers.store import Status

SIZE = 10_000
ROOM = OVERHEAD + 3 * footprint(SIZE)


@pytest.fixture
def at(tmp_path: Path):
    """Open stores that are closed at the end."""
    stores = []

    def open_at() -> FilesStore:
        stores.append(FilesStore(tmp_path / "kv", ROOM))
        return stores[-1]

    yield open_at
    for store in stores:
        store.close()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def failing(number: int) -> Callable[..., Any]:
    def fails(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fails


def written(one: FilesStore, other: FilesStore) -> list[Status]:
    """Let two stores write in turn three times more than there is room for."""
    records = [make_record(number, SIZE) for number in range(9)]
    found = []
    for number, record in enumerate(records):
        found += (one, other)[number % 2].write_many([record])
    return found


def test_two_hosts_whose_directory_was_emptied_hold_one_capacity(at, tmp_path):
    one, other = at(), at()
    assert one.write_many([make_record(20, SIZE)]) == [Status.OK]
    empty(tmp_path / "kv")
    assert written(one, other) == [Status.OK] * 3 + [Status.FULL] * 6
    assert at().write_many([make_record(30, SIZE)]) == [Status.FULL]


def test_twin_with_a_lock_on_a_file_without_a_name_they_would_not(at, tmp_path, monkeypatch):
    monkeypatch.setattr(Folder, "is_at", lambda *_: True)
    one = at()
    empty(tmp_path / "kv")
    assert written(one, at()).count(Status.OK) > 3


def test_a_directory_that_was_removed_is_said_and_not_made_anew(at, tmp_path):
    store, record = at(), make_record(1, SIZE)
    shutil.rmtree(tmp_path / "kv")
    assert store.write_many([record]) == [Status.FAILED]
    assert store.causes.counts() == {"ENOENT": 1}
    with pytest.raises(Unavailable, match="removed while it is in use"):
        store.delete_many([record.header.id])
    assert store.contains_many([record.header.id]) == [Status.ABSENT]
    assert not (tmp_path / "kv").exists()


def test_a_lock_is_not_kept_where_it_cannot_be_told_whether_it_is_the_right_one(at, monkeypatch):
    """Others would wait for it until this store writes again, or for ever."""
    one, other, record = at(), at(), make_record(1, SIZE)
    monkeypatch.setattr(files_usage, "_LOCK_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "is_at", failing(errno.EIO))
        assert one.write_many([record]) == [Status.FAILED]
    assert other.write_many([record]) == [Status.OK]
    assert (one.causes.counts(), other.causes.counts()) == ({"EIO": 1}, {})


def told_of_a_removed_directory(stores: list[FilesStore], folder: Path) -> list[dict[str, int]]:
    """Let each write once after its directory was removed; return what each says is the cause."""
    shutil.rmtree(folder)
    for store in stores:
        assert store.write_many([make_record(1, SIZE)]) == [Status.FAILED]
    return [store.causes.counts() for store in stores]


def test_each_store_of_a_removed_directory_is_told_so(at, tmp_path):
    assert told_of_a_removed_directory([at(), at()], tmp_path / "kv") == [{"ENOENT": 1}] * 2


def test_twin_with_the_lock_of_a_file_without_a_name_kept_others_would_wait(
    at, tmp_path, monkeypatch
):
    monkeypatch.setattr(files_usage, "_LOCK_SECONDS", 0.05)
    monkeypatch.setattr(files_usage.Usage, "_unlock", lambda self: None)
    _, other = told_of_a_removed_directory([at(), at()], tmp_path / "kv")
    assert other != {"ENOENT": 1}


def test_a_count_that_cannot_be_opened_anew_is_not_told_as_a_directory_that_is_gone(
    at, tmp_path, monkeypatch
):
    store = at()
    empty(tmp_path / "kv")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "keep", failing(errno.EMFILE))
        assert store.write_many([make_record(1, SIZE)]) == [Status.FAILED]
    assert store.causes.counts() == {"EMFILE": 1}
    assert "removed" not in noted()
    assert store.write_many([make_record(1, SIZE)]) == [Status.OK]


def test_a_tier_of_a_directory_that_was_removed_is_degraded(tmp_path):
    """Nothing is written there any more, so it must not pass for one that is well."""
    toy = opened(dram(64), f"files:{tmp_path}/kv?capacity=64MiB&admission=through")
    shutil.rmtree(tmp_path / "kv")
    for seed in range(6):
        toy.save(f"{seed}", prompt(CHUNK + 1, seed))
    assert "it was removed while it is in use" in toy.cache.health().troubles["files"]
    toy.close()


# ------------------------------------------------------------------------ what is a stranger's


@pytest.mark.parametrize("content", [b"hello", b"1" * 24, b"x" * 25, b"9" * 10_000])
def test_a_strangers_file_that_has_the_name_of_the_count_is_not_written_over(tmp_path, content):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "usage").write_bytes(content)
    with pytest.raises(ConfigError, match="no files store, and has a file of the name usage"):
        FilesStore(tmp_path / "kv", ROOM)
    assert (tmp_path / "kv" / "usage").read_bytes() == content
    assert len(list((tmp_path / "kv").iterdir())) == 1


def test_twin_without_that_look_it_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr(files_door, "is_count", lambda _: True)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "usage").write_bytes(b"hello")
    FilesStore(tmp_path / "kv", ROOM).close()
    assert (tmp_path / "kv" / "usage").read_bytes() != b"hello"


@pytest.mark.parametrize("content", [b"", bytes(24)])
def test_a_count_of_a_store_that_is_being_made_is_none(tmp_path, content):
    """Another host may make it at the same time, or have died while it counted."""
    FilesStore(tmp_path / "kv", ROOM).close()
    (tmp_path / "kv" / "format").unlink()
    FilesStore(tmp_path / "kv", ROOM).close()
    (tmp_path / "kv" / "format").unlink()
    (tmp_path / "kv" / "usage").write_bytes(content)
    FilesStore(tmp_path / "kv", ROOM).close()
