"""An index is read whole before LMDB may follow its pages."""

from __future__ import annotations

import logging
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, Corrupt
from kvtier.storage_backends import slab_recovery, slab_sound
from kvtier.storage_backends.slab_index import Entry, Index, Page
from kvtier.storage_backends.slab_sound import read_sound
from kvtier.testing.crash.judge import Verdict, in_child
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
PAGE = 4096
ENTRY = Entry(1, 2, 3, bytes(256))
LEAF, BRANCH, OVERFLOW = 2, 1, 4


def pages_of(path: Path, kind: int) -> list[int]:
    """Return the pages of a kind, among them those that are free by now."""
    data = path.read_bytes()
    return [
        page
        for page in range(2, len(data) // PAGE)
        if struct.unpack_from("<QHH", data, page * PAGE)[::2] == (page, kind)
    ]


def patch(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def churned(path: Path, count: int = 3000) -> dict[bytes, Entry]:
    """Make an index in which much was deleted, so that there are long lists of free pages."""
    choose = random.Random(7)
    index = Index(path, 8 * MIB, synced=False)
    names = [choose.randbytes(42) for _ in range(count)]
    index.commit(dict.fromkeys(names, ENTRY))
    holds = dict.fromkeys(names, ENTRY)
    for _ in range(12):
        gone = choose.sample(names, count // 3)
        index.commit(dict.fromkeys(gone))
        back = gone[: count // 4]
        index.commit(dict.fromkeys(back, ENTRY))
        holds = {name: ENTRY for name in holds if name not in gone} | dict.fromkeys(back, ENTRY)
    with index._env.begin(write=True) as txn:  # all at once: a list longer than a page
        for name in list(holds)[:-50]:
            txn.delete(name)
            del holds[name]
    index.close()
    return holds


def test_a_sound_index_is_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert read_sound(path).names == []
    holds = churned(path)
    found = read_sound(path)
    assert found.names == sorted(holds)
    assert found.where.tolist() == [(3, 1, 2)] * len(holds)
    index = Index(path, 8 * MIB, synced=False)
    index.commit(dict.fromkeys(holds))
    index.close()
    assert read_sound(path).names == []


def test_every_state_of_a_busy_index_is_sound(tmp_path: Path) -> None:
    choose = random.Random(3)
    path = tmp_path / "index"
    index = Index(path, 8 * MIB, synced=False)
    holds: dict[bytes, Entry] = {}
    for turn in range(150):
        gone = choose.sample(sorted(holds), choose.randrange(len(holds) + 1))
        new = {choose.randbytes(42): ENTRY for _ in range(choose.randrange(200))}
        index.commit(dict.fromkeys(gone) | new)
        holds = {name: entry for name, entry in holds.items() if name not in set(gone)} | new
        if turn % 3 == 0:
            found = read_sound(path)
            assert found.names == sorted(holds)
            assert found.where.tolist() == [(3, 1, 2)] * len(holds)
    index.close()


# ---- what is found


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("rb") as file:
        file.seek(at)
        (byte,) = file.read(1)
    patch(path, at, bytes([byte ^ 1 << bit]))


def share_a_page(path: Path) -> None:
    """Let two children of a branch be one page."""
    for page in pages_of(path, BRANCH):
        with path.open("rb") as file:
            file.seek(page * PAGE)
            data = file.read(PAGE)
        nodes = struct.unpack_from("<2H", data, 16)
        patch(path, page * PAGE + nodes[1], data[nodes[0] : nodes[0] + 6])


def free_what_is_used(path: Path) -> None:
    """Let the longest list of free pages name the first leaf's page."""
    (page, *_) = pages_of(path, OVERFLOW)
    with path.open("rb") as file:
        file.seek(page * PAGE + 16)
        (count,) = struct.unpack("<Q", file.read(8))
    patch(path, page * PAGE + 16 + 8 * count, struct.pack("<Q", max(0, page)))


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda path, bit=bit: [flip(path, p * PAGE + 12, bit) for p in pages_of(path, LEAF)]
          for bit in range(1, 8)),
        lambda path: [flip(path, p * PAGE + 10, 0) for p in pages_of(path, LEAF)],
        lambda path: [flip(path, p * PAGE, 3) for p in pages_of(path, LEAF)],
        share_a_page,
        free_what_is_used,
    ],
)  # fmt: skip
def test_a_page_that_lies_is_found(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    path = tmp_path / "index"
    churned(path)
    damage(path)
    with pytest.raises(Corrupt) as raised:
        read_sound(path)
    assert raised.value.__cause__ is None or "page" in str(raised.value.__cause__)


# ---- what it is good for


class Damaged:
    """A closed store of which one page of the index lies."""

    def __init__(self, opened: Any, tmp_path: Path) -> None:
        store = opened(16 * MIB, durability="each")
        for number in range(60):
            store.write_many([make_record(number, 3000)])
        store.close()
        self.whole, self.folder, self._opened = opened.folder, tmp_path / "damaged", opened

    def use(self, page: int) -> Verdict:
        """Open it, read and write; in a child."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder)
        flip(self.folder / "index.lmdb", page * PAGE + 12, 3)
        self._opened.folder = self.folder

        def look() -> Verdict:
            store = self._opened(16 * MIB)
            there = [number for number in range(60) if store.write_many([make_record(number, 3000)])
                     == [Status.OK]]  # fmt: skip
            store.delete_many([make_record(number, 3000).header.id for number in there])
            store.close()
            return Verdict(hits=len(there))

        return in_child(look)


def test_an_index_that_would_end_the_process_is_set_aside(opened: Any, tmp_path: Path) -> None:
    damaged = Damaged(opened, tmp_path)
    for page in pages_of(damaged.whole / "index.lmdb", LEAF):
        found = damaged.use(page)
        assert (found.deaths, found.hits) == (0, 60)


def test_twin_followed_without_a_look_it_ends_the_process(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(path: Path) -> Page:
        index = Index(path, path.stat().st_size, synced=False)
        try:
            return index.page(b"", 1000)
        finally:
            index.close()

    damaged = Damaged(opened, tmp_path)
    monkeypatch.setattr(slab_recovery, "read_sound", trusting)
    deaths = [damaged.use(page).deaths for page in pages_of(damaged.whole / "index.lmdb", LEAF)]
    assert sum(deaths) > 0


def test_the_log_names_the_page(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(64 * MIB)
    store.write_many([make_record(number, 3000) for number in range(60)])
    store.close()
    for page in pages_of(opened.folder / "index.lmdb", LEAF):
        flip(opened.folder / "index.lmdb", page * PAGE + 12, 3)
    caplog.set_level(logging.WARNING)
    assert list(opened(64 * MIB).scan()) == []
    assert "starting empty" in caplog.text
    assert "page " in caplog.text
    assert (opened.folder / "index-unreadable.bad").exists()


@pytest.mark.parametrize(("there", "said"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("harm", [Path.unlink, Path.write_bytes], ids=["removed", "cut"])
def test_an_index_that_is_gone_is_said_where_it_had_something(
    opened: Any, caplog: pytest.LogCaptureFixture, harm: Any, *, there: bool, said: int
) -> None:
    """And the twin: where nothing was stored, nothing is lost."""
    store = opened(64 * MIB)
    store.write_many([make_record(1, 3000)] if there else [])
    store.close()
    harm(opened.folder / "index.lmdb", *([b""] if harm is Path.write_bytes else []))
    caplog.set_level(logging.WARNING)
    assert list(opened(64 * MIB).scan()) == []
    assert caplog.text.count("has segments, and no index of them; starting empty") == said


def test_repair_makes_the_list_of_free_pages_anew(filled: Any) -> None:
    """Entries are whole, and still LMDB must not write there."""
    index = Index(filled.index, filled.index.stat().st_size, synced=False)
    with index._env.begin(write=True) as txn:
        assert txn.put(b"x" * 42, bytes(280))
    with index._env.begin(write=True) as txn:
        assert txn.delete(b"x" * 42)
    index.close()
    _, torn = slab_sound.examine(filled.index)
    assert not torn
    data = filled.index.read_bytes()
    damaged = 0
    for page in pages_of(filled.index, LEAF):
        (node,) = struct.unpack_from("<H", data, page * PAGE + 16)
        begin = page * PAGE + node
        if struct.unpack_from("<H", data, begin + 6) == (8,):  # a list of free pages
            patch(filled.index, begin + 8 + 8 + 8, struct.pack("<Q", 1))
            damaged += 1
    assert damaged
    assert slab_sound.examine(filled.index)[1]
    assert not filled.check().whole
    namespace = filled.records[0].header.namespace.hex()
    with pytest.raises(ConfigError, match="repair it first"):
        type(filled.opened.stores[0]).purge(str(filled.folder), namespace, lambda *_: None)
    assert filled.check(repair=True).whole
    assert not slab_sound.examine(filled.index)[1]
    assert filled.served() == 40
