"""A slab directory whose index is damaged as a whole, or that somebody has open, is verified."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends import slab_renewal, slab_verify
from kvtier.storage_backends.slab import PAGE
from kvtier.storage_backends.slab_index import Index
from kvtier.storage_backends.slab_pages import IndexPages
from kvtier.storage_backends.slab_survey import survey
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
OK = Status.OK
SIZES = (3000, 50_000, 200_000, 50_000)


def tear(filled: Any) -> None:
    """Overwrite one leaf of the index."""
    with IndexPages(filled.index) as pages:
        meta = pages.latest()
    data = filled.index.read_bytes()
    for page in range(2, meta.last + 1):
        kind = int.from_bytes(data[page * PAGE + 10 : page * PAGE + 12], "little")
        inside = data[page * PAGE : (page + 1) * PAGE]
        if kind == 2 and sum(record.header.id in inside for record in filled.records) > 5:
            with IndexPages(filled.index) as pages:
                whole = sum(map(len, pages.pages()))
            with filled.index.open("r+b") as file:
                file.seek(page * PAGE)
                file.write(b"\0" * 64)
            torn: set[Any] = set()
            with IndexPages(filled.index) as pages:
                left = sum(map(len, pages.pages(torn=torn)))
            if left < whole:
                return
            filled.index.write_bytes(data)
    raise AssertionError("no leaf is in use")


def test_a_torn_index_keeps_what_can_be_read(filled: Any) -> None:
    tear(filled)
    verdict = filled.check()
    assert not verdict.whole
    assert len(verdict.torn) == 1
    assert "of the index is not what its parent says" in verdict.torn[0]
    assert 10 <= verdict.checked < 40
    repaired = filled.check(repair=True)
    assert (repaired.whole, repaired.index_replaced) == (True, True)
    assert filled.check().checked == verdict.checked
    assert filled.served() == verdict.checked
    assert not list(filled.folder.glob("*.tmp*"))


def test_a_torn_index_is_written_anew_within_the_capacity(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = survey(filled.folder, lambda *_: None).charged_bytes  # there is room for nothing
    (filled.folder / "settings").write_bytes(b"capacity %d\ndurability each\n" % capacity)
    tear(filled)
    before = filled.check().checked
    most = 0

    class Measured(Index):
        def close(self) -> None:
            nonlocal most
            most = max(most, filled.opened.disk_bytes())
            super().close()

    monkeypatch.setattr(slab_renewal, "Index", Measured)
    assert filled.check(repair=True).whole
    assert 0 < most <= capacity
    after = filled.check()
    assert after.whole
    assert 0 < after.checked < before
    assert filled.served() == after.checked


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: os.truncate(path, 3 * PAGE), "truncated"),
        (lambda path: path.write_bytes(random.Random(1).randbytes(300_000)), "invalid"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: os.truncate(path, 0), "truncated"),
    ],
)
def test_an_index_that_is_none(filled: Any, damage: Callable[[Path], None], said: str) -> None:
    damage(filled.index)
    verdict = filled.check()
    assert (verdict.whole, verdict.torn) == (False, [f"the index is {said}"])
    repaired = filled.check(repair=True)
    assert (repaired.whole, repaired.index_replaced) == (True, True)
    assert filled.check().whole
    assert filled.served() == 0


def test_an_older_copy_of_the_index_is_put_back(filled: Any) -> None:
    copy = filled.folder.parent / "copy"
    shutil.copy(filled.index, copy)
    store = filled.opened(64 * MIB, durability="each")
    gone = [record.header.id for record in filled.records[:20]]
    assert set(store.delete_many(gone)) == {OK}
    fresh = [make_record(100 + n, SIZES[n % 4]) for n in range(20)]
    assert set(store.write_many(fresh)) == {OK}
    store.close()
    shutil.copy(copy, filled.index)
    verdict = filled.check()
    assert 5 < len(verdict.damage) <= 20  # of the others, the slots were not written again
    assert {one.reason for one in verdict.damage} == {"payload"}
    filled.check(repair=True)
    assert filled.served() == 40 - len(verdict.damage)


def test_any_flip_in_any_file_leaves_exact_records(filled: Any) -> None:
    choose = random.Random(11)
    files = sorted(filled.folder.glob("*.seg")) + [filled.index] * 6
    images = {path: path.read_bytes() for path in set(files)}
    noticed = 0
    for _ in range(60):
        path = choose.choice(files)
        last = len(images[path]) if path != filled.index else 20 * PAGE
        with path.open("r+b") as file:
            for _ in range(choose.choice((1, 1, 30))):
                at = choose.randrange(last)
                file.seek(at)
                file.write(bytes([images[path][at] ^ 1 << choose.randrange(8)]))
        verdict = filled.check(repair=True)
        noticed += bool(verdict.damage or verdict.torn)
        assert filled.check().whole
        assert filled.served() <= 40
        for again, content in images.items():
            again.write_bytes(content)
        for extra in set(filled.folder.glob("*.seg")) - set(images):
            extra.unlink()
    assert noticed > 20


# ---------------------------------------------------------------------------- whose directory it is


def test_verifying_writes_nothing(filled: Any) -> None:
    before = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in filled.folder.iterdir()
    }
    filled.check()
    after = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in filled.folder.iterdir()
    }
    assert after == before


def test_a_repair_of_an_open_directory_is_refused(filled: Any) -> None:
    filled.opened(64 * MIB)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}, and cannot be chang"):
        filled.check(repair=True)
    assert filled.check().whole


class Meanwhile:
    """An owner that replaces a record just before its slot is read."""

    def __init__(self, filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = filled.opened(64 * MIB, durability="each")
        self.filled, self.done = filled, False
        self.real = slab_verify.Audit.all
        monkeypatch.setattr(slab_verify.Audit, "all", lambda *args: self.all(*args))  # noqa: PLW0108  (a bound method takes no audit)

    def all(self, audit: Any, runs: Any) -> Any:
        gone = [record.header.id for record in self.filled.records[:8]]
        assert set(self.store.delete_many(gone)) == {OK}
        fresh = [make_record(200 + n, SIZES[n % 4]) for n in range(8)]
        assert set(self.store.write_many(fresh)) == {OK}
        return self.real(audit, runs)


def test_what_an_owner_replaces_meanwhile_is_not_judged(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Meanwhile(filled, monkeypatch)
    verdict = filled.check()
    assert (verdict.whole, verdict.changed, verdict.checked) == (True, 8, 32)
    assert verdict.holder == str(os.getpid())


def test_twin_without_the_second_look_it_would_be_called_damaged(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Meanwhile(filled, monkeypatch)
    entries = filled.entries
    monkeypatch.setattr(slab_verify.IndexPages, "find", lambda pages, name: entries[name])
    assert len(filled.check().damage) == 8


def test_an_index_that_is_replaced_meanwhile_is_said(
    filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = slab_verify.Audit.all

    def emptied(audit: Any, runs: Any) -> Any:
        for path in [filled.index, *filled.folder.glob("*.seg")]:
            path.unlink()
        return real(audit, runs)

    monkeypatch.setattr(slab_verify.Audit, "all", emptied)
    with pytest.raises(
        ConfigError, match="has a new index from its owner since then; run this again"
    ):
        filled.check()
