"""Opening an NVMe store: what an operator is told, and who may use a directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, MisuseError
from kvtier.storage_backends import slab_directory
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO
from kvtier.storage_backends.slab_survey import survey
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
SHM = Path("/dev/shm")  # noqa: S108
OK = Status.OK


def test_modes_are_private(opened: Any) -> None:
    store = opened(durability="none")
    store.write_many([make_record(1, 100)])
    assert opened.folder.stat().st_mode & 0o777 == 0o700
    for path in opened.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_foreign_files_are_left_alone(opened: Any) -> None:
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
from kvtier.storage_backends import slab_directory
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


def test_folder_without_permission(opened: Any) -> None:
    opened.folder.mkdir(mode=0o555)
    said = in_python(OPEN_AS_NOBODY, opened.folder)
    assert str(opened.folder) in said
    assert "EACCES" in said
    assert "write" in said


def test_folder_that_is_a_file(opened: Any) -> None:
    opened.folder.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"kv: (EEXIST|ENOTDIR) .*choose another"):
        opened()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
def test_self_test_names_the_error(opened: Any, code: int) -> None:
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


def test_unknown_version_is_refused(opened: Any) -> None:
    opened().close()
    (opened.folder / "format").write_bytes(b"kvtier slab store, format 3\n")
    with pytest.raises(ConfigError, match=r"format 3.*knows only.*format 2"):
        opened()
    (opened.folder / "format").unlink()
    with pytest.raises(ConfigError, match="no file named format"):
        opened()


def test_one_process_at_a_time(opened: Any) -> None:
    opened()
    with pytest.raises(ConfigError, match=f"already open in this process .{os.getpid()}"):
        opened()
    script = OPEN_AS_NOBODY.replace("os.setuid(65534)", "pass")
    assert f"in use by process {os.getpid()};" in in_python(script, opened.folder)
    opened.stores[0].close()
    assert in_python(script, opened.folder) == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_refused_and_the_parent_goes_on(opened: Any) -> None:
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


def test_use_after_close(opened: Any) -> None:
    store = opened()
    store.close()
    with pytest.raises(MisuseError, match="closed"):
        store.contains_many([])


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "foreign")


ODD = [
    *("format", "lock", "settings", "unsynced", "selftest", "index.lmdb", "index.lmdb.tmp"),
    "slab-00000001-8192.seg",
]


@pytest.mark.parametrize("make", [a_pipe, a_link, Path.mkdir], ids=["pipe", "link", "directory"])
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_regular_file_is_neither_opened_nor_followed(
    opened: Any, name: str, make: Callable[[Path], None]
) -> None:
    opened().close()
    foreign = opened.folder.parent / "foreign"
    foreign.write_bytes(b"mine" * 5000)
    (opened.folder / name).unlink(missing_ok=True)
    make(opened.folder / name)
    asked: list[Callable[[], object]] = [opened, opened.check, lambda: survey(opened.folder, quiet)]
    for ask in asked:
        with pytest.raises(ConfigError, match=f"{name} is no regular file; remove it, or choose"):
            ask()
    assert foreign.read_bytes() == b"mine" * 5000


def test_twin_a_link_would_be_followed(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened().close()
    foreign = opened.folder.parent / "foreign"
    foreign.write_bytes(b"mine" * 5000)
    (opened.folder / "selftest").symlink_to(foreign)
    monkeypatch.setattr(slab_directory, "refuse_odd_files", lambda _: None)
    opened()
    assert foreign.read_bytes() != b"mine" * 5000


def quiet(*_: object) -> None:
    pass


def test_a_short_write_leaves_no_format_that_nobody_knows(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes a part of it only says so by a count."""
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
        with pytest.raises(ConfigError, match=r"ENOSPC .*free some space"):
            opened()
    assert opened().write_many([make_record(1, 100)]) == [OK]
