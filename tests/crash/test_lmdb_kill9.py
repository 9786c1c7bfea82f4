"""The NVMe store after ``kill -9`` and after a power loss: what was promised, and nothing wrong."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.storage_backends import slab_recovery
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.testing.crash.campaign import in_memory
from kvtier.testing.dying import GONE, promised, write_and_delete
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

SCRIPT = Path(__file__).with_name("lmdb_writer.py")
PAGE = 4096

_spec = importlib.util.spec_from_file_location("lmdb_writer", SCRIPT)
writer = importlib.util.module_from_spec(_spec)
sys.modules["lmdb_writer"] = writer
_spec.loader.exec_module(writer)


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder, in memory where there is any: a kill loses no page of a file."""
    with tempfile.TemporaryDirectory(dir=in_memory()) as name:
        yield Path(name)


def verify(folder: Path, log: str, *, durable: bool) -> list[str]:
    """Reopen, read everything, write more; return what was wrong."""
    wrong: list[str] = []
    allowed = promised(log, writer.NAMES)
    store = LmdbSlabStore(folder, writer.CAPACITY, durability="none")
    try:
        found: dict[int, int] = {}
        for header in list(store.scan()):
            read, buffer = fetch(store, header.id, header.stored_bytes)
            version, number = divmod(header.depth, writer.NAMES)
            record = writer.record_of(number, version)
            if read.header != record.header or not is_exact(read, buffer):
                wrong.append(f"name {number}: {read.status.name}, bytes are wrong")
            else:
                found[number] = version
        for number, versions in allowed.items():
            if durable and found.get(number, GONE) not in versions:
                wrong.append(f"name {number}: found {found.get(number)}, promised {versions}")
        if sum(path.stat().st_blocks * 512 for path in folder.iterdir()) > writer.CAPACITY:
            wrong.append("above the capacity")
        extra = make_record(1000, 50_000)
        names = [writer.record_of(number, 0).header.id for number in range(writer.NAMES)]
        store.delete_many(names)
        if store.write_many([extra]) != [Status.OK] or not is_exact(
            *fetch(store, extra.header.id, 50_000)
        ):
            wrong.append("not usable")
    finally:
        store.close()
    return wrong


def run_all(folder: Path, durability: str, guard: str, every: int) -> list[str]:
    command = [sys.executable, SCRIPT, folder, durability, guard, str(every)]
    subprocess.run(command, check=True, timeout=150)
    wrong: list[str] = []
    logs = sorted(folder.glob("*.log"))
    assert len(logs) > 20
    for log in logs:
        found = verify(log.with_suffix(""), log.read_text(), durable=durability != "batch")
        wrong += [f"killed at step {log.stem}: {what}" for what in found]
    return wrong


@pytest.mark.timeout(180)
@pytest.mark.parametrize("durability", ["none", "batch", "each"])
def test_killed_at_every_step(memory: Path, durability: str) -> None:
    """What was acknowledged is there, with ``none`` too while the machine is up."""
    assert run_all(memory, durability, "all", 1) == []
    assert any("\nD " in log.read_text() for log in memory.glob("*.log")), "it was never full"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("guard", ["publish-first", "overwrite-live", "free-first"])
def test_without_a_guard_it_would_be_wrong(memory: Path, guard: str) -> None:
    wrong = run_all(memory, "none", guard, 3)
    assert any("bytes are wrong" in what for what in wrong)


@pytest.mark.parametrize("durability", ["none", "batch", "each"])
def test_killed_at_any_time(tmp_path: Path, durability: str) -> None:
    choose = random.Random(11)
    folder = tmp_path / "kv"
    for turn in range(6):
        command = [sys.executable, SCRIPT, folder, durability, "all", "0"]
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        process = subprocess.Popen(command)
        while not log.exists() or log.stat().st_size < 200:
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(choose.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert verify(folder, log.read_text(), durable=durability != "batch") == [], turn
        shutil.rmtree(folder)


# ---------------------------------------------------------------------------------- power loss


class Volatile(FileIO):
    """A disk that forgets, at a power loss, any of the pages written since the last sync."""

    syncs = 1  # a snapshot is of one moment

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[int, Path] = {}
        self.unsynced: dict[Path, dict[int, bytes]] = {}
        self.at_each_step = lambda: None

    def open(self, path: Path, flags: int) -> int:
        descriptor = super().open(path, flags)
        self.paths[descriptor] = path
        return descriptor

    def fdatasync(self, descriptor: int) -> None:
        super().fdatasync(descriptor)
        self.unsynced.pop(self.paths[descriptor], None)
        self.at_each_step()

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self.paths[descriptor]
        length = sum(map(len, buffers))
        with path.open("rb") as file:
            file.seek(offset)
            before = file.read(length)
        old = self.unsynced.setdefault(path, {})
        for at in range(0, length, PAGE):
            old.setdefault(offset + at, before[at : at + PAGE])
        written = super().pwrite(descriptor, buffers, offset)
        self.at_each_step()
        return written

    def lose_power(self, target: Path, choose: random.Random) -> None:
        """Copy what the disk would hold; the index syncs by itself and has no commit under way."""
        shutil.copytree(self.folder, target)
        for path, pages in self.unsynced.items():
            if not (target / path.name).exists():
                continue
            keep = choose.choice((0.0, 0.5, 0.9))
            with (target / path.name).open("r+b") as file:
                for offset, old in pages.items():
                    if choose.random() >= keep:
                        file.seek(offset)
                        file.write(old)


def lose_power_often(memory: Path, durability: str) -> list[str]:
    folder, log = memory / "kv", memory / "log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    io = Volatile(folder)
    store = LmdbSlabStore(folder, writer.CAPACITY, durability=durability, io=io)
    images: list[tuple[Path, str]] = []
    choose = random.Random(7)

    def snapshot() -> None:
        target = memory / f"image-{len(images)}"
        io.lose_power(target, choose)
        images.append((target, log.read_text()))

    io.at_each_step = snapshot
    write_and_delete(store, descriptor, writer.turns(writer.WRITES), writer.record_of)
    io.at_each_step = lambda: None
    store.close()
    os.close(descriptor)
    assert len(images) > 15
    return [
        what for image, told in images for what in verify(image, told, durable=durability == "each")
    ]


@pytest.mark.parametrize("durability", ["batch", "each"])
def test_power_loss(memory: Path, durability: str) -> None:
    """Synced records are whole; with ``each``, so is everything that was acknowledged."""
    assert lose_power_often(memory, durability) == []


def test_power_loss_without_sync_would_be_wrong(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentFiles, "sync", lambda *_: None)
    assert any("bytes are wrong" in what for what in lose_power_often(memory, "each"))


def test_power_loss_with_none_starts_empty(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = memory / "kv"
    store = LmdbSlabStore(folder, writer.CAPACITY, durability="none")
    store.write_many([make_record(1, 5000)])
    shutil.copytree(folder, memory / "image")
    store.close()
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    store = LmdbSlabStore(memory / "image", writer.CAPACITY, durability="none")
    assert list(store.scan()) == []
    store.close()
