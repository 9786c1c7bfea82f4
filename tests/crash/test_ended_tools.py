"""What the campaign finds where purge, repair, or a full index are killed, and a guard is gone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.storage_backends import slab_repair, slab_space
from kvtier.storage_backends.slab import Segment
from kvtier.storage_backends.slab_batch import Batch
from kvtier.storage_backends.slab_index import Index
from kvtier.testing.crash import campaign, kills, tools, workload
from kvtier.testing.crash.judge import Findings
from kvtier.testing.crash.tracing import can_trace

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not can_trace(), reason="this system does not let a process trace its children"
    ),
]


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=campaign.in_memory()) as name:
        folder = Path(name) / "kv"
        workload.prefill(folder, "each")
        yield folder


def only(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """Let that tool be the only one."""
    monkeypatch.setattr(tools, "TOOLS", {name: tools.TOOLS[name]._replace(**changes)})


def is_clean(found: Findings) -> bool:
    return not found.notes and not any(found.counts[what] for what in ("wrong", "lost", "deaths"))


@pytest.mark.parametrize("name", list(tools.TOOLS))
def test_each_tool_is_killed_at_many_calls_and_leaves_what_is_right(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    only(monkeypatch, name)
    found = tools.at_calls(base, "each", 1000, 0, 12)
    assert is_clean(found), found.notes
    assert found.counts["tool_points"] >= 2
    assert found.counts["hits"] > 0 or name == "no index"


def test_twin_a_purge_that_takes_more_than_it_is_asked_for(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "purge")
    remove = slab_repair._remove

    def all_of_them(directory: Any, names: Any, tell: Any) -> None:
        index = Index(directory.index, directory.index.stat().st_size, synced=True)
        found = [name for name, _ in index.lot(b"", 1000)]
        index.close()
        assert len(found) > len(names)
        remove(directory, found, tell)

    monkeypatch.setattr(slab_repair, "_remove", all_of_them)
    assert tools.at_calls(base, "each", 3, 0, 1).counts["lost"] > 0


def test_twin_a_purge_that_is_not_synced_comes_back_with_the_power(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "purge")
    assert is_clean(tools.power_losses(base, "each", 12, 0, 1))
    monkeypatch.setattr(Index, "sync", lambda _: None)
    index = Index.__init__

    def unsynced(self: Index, path: Path, size: int, *, synced: bool) -> None:
        del synced
        index(self, path, size, synced=False)

    monkeypatch.setattr(Index, "__init__", unsynced)
    found = tools.power_losses(base, "each", 12, 0, 1)
    assert any("came back" in note for note in found.notes)


def test_twin_an_old_index_that_goes_before_the_new_one_is_there(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "new index")
    replace = Path.replace

    def late(draft: Path, target: Path) -> Path:
        target.unlink(missing_ok=True)
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", late)
    assert tools.at_calls(base, "each", 99, 0, 1).counts["lost"] > 0


def test_twin_a_new_index_beside_the_old_one_without_room(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "new index, no room")

    def all_kept(_: object, __: object, good: list[Any]) -> list[Any]:
        return sorted(good)

    monkeypatch.setattr(slab_repair, "_within", all_kept)
    found = tools.at_calls(base, "each", 99, 0, 3)
    assert any("above its capacity" in note for note in found.notes)


def test_twin_a_repair_that_does_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "repair")
    monkeypatch.setattr(slab_repair, "_remove", lambda *_: None)
    found = tools.at_calls(base, "each", 2, 0, 1)
    assert any("not whole" in note for note in found.notes)


# ---- a full index


def test_twin_a_full_index_for_which_goes_what_is_being_written(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_clean(kills.at_calls(base, "each", 12, 0, 1, fills=True))
    by_age = slab_space.by_age

    def newest_first(index: Index, full: Batch) -> list[tuple[int, int]]:
        return [*((one.number, 0) for one in full.dirty), *by_age(index, full)]

    monkeypatch.setattr(slab_space, "by_age", newest_first)
    monkeypatch.setattr(Segment, "is_at_rest", lambda *_: True)
    assert kills.at_calls(base, "each", 12, 0, 1, fills=True).counts["lost"] > 0
