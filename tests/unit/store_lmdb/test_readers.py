"""Readers of the index: a foreign one keeps nothing from being used again, an own one is safe."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtier.storage_backends import slab_index
from kvtier.storage_backends.slab import INDEX_FLOOR
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_repair import purge
from kvtier.storage_backends.slab_survey import survey
from kvtier.testing.overrun import stale_reader
from kvtier.testing.records import NAMESPACE, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20


def churn(store: Any, turns: int) -> set[Status]:
    """Replace records again and again, each with a commit of its own."""
    said = set()
    for number in range(40, 40 + turns):
        said |= set(store.write_many([make_record(number, 3000)]))
        said |= set(store.delete_many([make_record(number - 40, 3000).header.id]))
    return said


def test_a_reader_that_never_ends_costs_nothing(opened: Any) -> None:
    store = opened(3 * MIB, durability="none")
    churn(store, 50)
    with stale_reader(opened.folder / "index.lmdb"):
        assert churn(store, 1500) <= {Status.OK, Status.ABSENT}
        assert opened.disk_bytes() <= 3 * MIB


@pytest.mark.parametrize("renewed", [False, True])
def test_twin_with_lmdbs_table_of_readers_the_map_is_full(
    opened: Any, monkeypatch: pytest.MonkeyPatch, *, renewed: bool
) -> None:
    """And one that readers have filled is made anew."""
    environment = lmdb.Environment
    if not renewed:
        monkeypatch.setattr(Ledger, "_renew", lambda *_: False)

    def with_table(*arguments: Any, **options: Any) -> Any:
        return environment(*arguments, **{**options, "lock": True})

    monkeypatch.setattr(slab_index.lmdb, "Environment", with_table)
    store = opened(3 * MIB, durability="none")
    churn(store, 50)
    with stale_reader(opened.folder / "index.lmdb"):
        assert (Status.FAILED in churn(store, 1500)) is not renewed
        assert opened.disk_bytes() <= 3 * MIB


def test_who_only_looks_holds_no_transaction(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for 100 ms, and not at all; who changes something does, as this would tell."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("LMDB was asked")

    monkeypatch.setattr(slab_index.lmdb, "Environment", opened)
    assert survey(filled.folder, lambda *_: None).records == 40
    assert filled.check().whole
    with pytest.raises(AssertionError, match="LMDB was asked"):
        purge(filled.folder, NAMESPACE.hex(), lambda *_: None)


class Slow(Sequence[bytes]):
    """Names whose reader stops between the first half and the second, within its transaction."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = names
        self.inside, self.go = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: Any) -> Any:
        if at == len(self.names) // 2:
            self.inside.set()
            assert self.go.wait(30)
        return self.names[at]


class Watched:
    """A lock that tells when somebody had to wait for it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.waited = threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waited.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def looked_at_meanwhile(path: Path, *, guarded: bool) -> bool:
    """Replace all entries while a reader is half through them; say whether it saw the old ones."""
    index = Index(path, INDEX_FLOOR, synced=False)
    watched = Watched(index._reading)
    index._reading = watched if guarded else contextlib.nullcontext()
    choose = random.Random(3)
    names = [choose.randbytes(42) for _ in range(1500)]
    old, new = Entry(1, 1, 1, bytes(256)), Entry(2, 2, 2, bytes(256))
    index.commit(dict.fromkeys(names, old))
    slow, found = Slow(names), []
    reader = threading.Thread(target=lambda: found.extend(index.find(slow)))
    reader.start()
    assert slow.inside.wait(30)
    writer = threading.Thread(target=lambda: index.commit(dict.fromkeys(names, new)))
    writer.start()
    while writer.is_alive() and not watched.waited.is_set():
        writer.join(0.01)
    slow.go.set()
    reader.join(30)
    writer.join(30)
    assert index.find(names) == [new] * len(names)
    index.close()
    return found == [old] * len(names)


def test_pages_that_an_own_reader_looks_at_are_not_written(tmp_path: Path) -> None:
    assert looked_at_meanwhile(tmp_path / "index", guarded=True)


TWIN = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
import test_readers
seen = test_readers.looked_at_meanwhile(pathlib.Path(sys.argv[2]) / "index", guarded=False)
print("whole" if seen else "mixed")
"""


def test_twin_without_the_wait_they_are(tmp_path: Path) -> None:
    """In a process of its own: LMDB may die of pages that change under it."""
    command = [sys.executable, "-c", TWIN, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.stdout == "mixed\n" or done.returncode < 0
