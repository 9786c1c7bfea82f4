"""A files store where it is refused, and on disks that are full or read-only."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends import files_usage
from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import OVERHEAD
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore

MIB = 1 << 20


# ------------------------------------------------------------------------------ what is refused


def cause(location: str, capacity: int | None = 64 * MIB) -> str:
    with pytest.raises(ConfigError) as refused:
        FilesStore.open(location, capacity, {})
    return str(refused.value)


@pytest.mark.parametrize("location", ["", "//host/export", "a\0b", "~nobody-of-this-name/kv"])
def test_a_wrong_place_is_refused(location):
    assert "files:/mnt/kv" in cause(location)


def test_what_is_not_mounted_is_not_made(tmp_path):
    assert "mount it" in cause(str(tmp_path / "absent" / "kv"))
    assert not (tmp_path / "absent").exists()


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "kv").write_text("notes")
    assert "not a directory" in cause(str(tmp_path / "kv"))
    assert (tmp_path / "kv").read_text() == "notes"


def test_a_directory_of_another_store_or_version_is_refused(tmp_path):
    LmdbSlabStore(tmp_path / "slab", 64 * MIB).close()
    assert "use what wrote it" in cause(str(tmp_path / "slab"))
    FilesStore.open(str(tmp_path / "kv"), None, {}).close()
    (tmp_path / "kv" / "format").write_bytes(b"kvtier files store, format 2\n")
    assert "format 2" in cause(str(tmp_path / "kv"))


def test_a_capacity_below_its_own_files_is_refused(tmp_path):
    assert "give it more" in cause(str(tmp_path / "kv"), OVERHEAD)


def test_an_unknown_durability_is_refused():
    with pytest.raises(ConfigError, match="choose none or each"):
        FilesStore.OPTIONS["durability"].parse("batch")


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EROFS, "mount it for writing"), (errno.EACCES, "let the user"), (errno.ENOSPC, "free")],
)
def test_what_cannot_be_written_is_refused_with_a_remedy(tmp_path, number, said):
    class Refusing(Folder):
        def write(self, descriptor, buffers):
            raise OSError(number, os.strerror(number))

    with pytest.raises(ConfigError, match=said):
        FilesStore(tmp_path / "kv", 64 * MIB, folder=Refusing)


def test_a_filesystem_without_locks_is_refused(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files_usage.fcntl, "fcntl", no_locks)
    assert "-o flock" in cause(str(tmp_path / "kv"))


# ------------------------------------------------------------------------------ a real filesystem


SMALL_DISK = """
import errno, os, subprocess, sys
from pathlib import Path
from kvtier.errors import ConfigError
from kvtier.storage_backends.files import FilesStore
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

mount = sys.argv[1]
def say(*options):
    subprocess.run(["mount", *options, mount], check=True)

say("-t", "tmpfs", "-o", "size=1m", "tmpfs")
store = FilesStore(Path(mount), 64 << 20)
kept = []
for number in range(40):
    record = make_record(number, 100_000)
    (status,) = store.write_many([record])
    if status is Status.FULL:
        break
    kept.append(record)
assert 5 < len(kept) < 12, len(kept)
assert all(is_exact(*fetch(store, one.header.id, 100_000)) for one in kept)
assert store.delete_many([kept.pop(0).header.id]) == [Status.OK]
assert store.write_many([record]) == [Status.OK]
assert is_exact(*fetch(store, record.header.id, 100_000))
store.close()
say("-o", "remount,ro")
try:
    FilesStore(Path(mount), 64 << 20)
except ConfigError as error:
    assert "EROFS" in str(error), error
print("all of it")
"""


def test_a_full_disk_and_a_read_only_one(tmp_path, root):
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("user namespaces are not permitted here")
    (tmp_path / "mount").mkdir()
    command = ["unshare", "-Urm", sys.executable, "-c", SMALL_DISK, str(tmp_path / "mount")]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert ran.stdout == "all of it\n", ran.stderr
