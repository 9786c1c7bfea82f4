"""The files store after ``kill -9``: what was acknowledged is there, and nothing else is served."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_usage import OVERHEAD
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

SCRIPT = Path(__file__).with_name("files_writer.py")

_spec = importlib.util.spec_from_file_location("files_writer", SCRIPT)
writer = importlib.util.module_from_spec(_spec)
sys.modules["files_writer"] = writer
_spec.loader.exec_module(writer)


def verify(folder: Path, log: str) -> list[str]:
    """Reopen, read everything, write more; return what was wrong."""
    wrong: list[str] = []
    files = sum(os.lstat(path).st_size for path in folder.glob("*/*"))
    if files > writer.CAPACITY - OVERHEAD:
        wrong.append("above the capacity")
    store = FilesStore(folder, writer.CAPACITY, durability="none")
    try:
        found: dict[int, int] = {}
        for number in range(writer.NAMES):
            read, buffer = fetch(store, writer.record_of(number, 0).header.id, 200_000)
            if read.status is Status.ABSENT:
                continue
            if not is_exact(read, buffer):
                wrong.append(f"name {number}: {read.status.name}, bytes are wrong")
                continue
            found[number] = read.header.depth // writer.NAMES
        for number, versions in writer.promised(log).items():
            if found.get(number, writer.GONE) not in versions:
                wrong.append(f"name {number}: found {found.get(number)}, promised {versions}")
        store.delete_many([writer.record_of(number, 0).header.id for number in found])
        extra = make_record(1000, 50_000)
        if store.write_many([extra]) != [Status.OK]:
            wrong.append("not usable")
    finally:
        store.close()
    return wrong


def killed(folder: Path, guard: str, every: int) -> tuple[int, list[str]]:
    subprocess.run([sys.executable, SCRIPT, folder, guard, str(every)], check=True, timeout=100)
    logs = list(folder.glob("*.log"))
    return len(logs), [
        f"killed at step {log.stem}: {what}"
        for log in logs
        for what in verify(log.with_suffix(""), log.read_text())
    ]


@pytest.mark.timeout(120)
def test_killed_at_every_step(tmp_path):
    steps, wrong = killed(tmp_path, "all", 1)
    assert wrong == []
    assert steps > 50
    assert any("\nD " in log.read_text() for log in tmp_path.glob("*.log")), "it was never full"
    assert any(tmp_path.glob("*/*/*.new")), "none died while it wrote"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("guard", "seen"), [("in-place", "bytes are wrong"), ("late", "above the capacity")]
)
def test_without_a_guard_it_would_be_wrong(tmp_path, guard, seen):
    _, wrong = killed(tmp_path, guard, 5)
    assert any(seen in what for what in wrong)
