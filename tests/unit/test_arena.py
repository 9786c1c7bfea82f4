"""The arena: never more than its capacity, and slots that are nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import ConfigError, MisuseError
from kvtier.memory import arena as module
from kvtier.memory.arena import Arena, Slot, slot_bytes_for
from kvtier.memory.sealed import PAGE_BYTES, available_bytes

MIB = 1 << 20


@pytest.fixture
def arena():
    found = Arena(4 * MIB, [MIB])
    yield found
    found.close()


# ------------------------------------------------------------------------------------------ size


@pytest.mark.parametrize(("part", "slot"), [(1, 4096), (4096, 4096), (4097, 8192), (1000, 4096)])
def test_slots_are_whole_pages(part: int, slot: int):
    assert slot_bytes_for(part) == slot


@pytest.mark.parametrize("capacity", [MIB, MIB + 1, 5 * MIB - 1, 3 * MIB + 4096])
def test_the_capacity_is_never_exceeded(capacity: int):
    arena = Arena(capacity, [MIB])
    try:
        assert capacity - PAGE_BYTES < arena.nbytes <= capacity
        assert arena.memory.size == arena.nbytes
        taken = []
        while (slot := arena.allocate(MIB)) is not None:
            taken.append(slot)
            assert arena.used_bytes == len(taken) * MIB <= capacity
        assert len(taken) == capacity // MIB
    finally:
        arena.close()


def test_less_than_one_chunk_is_refused_with_its_size():
    with pytest.raises(ConfigError, match=r"capacity 1 MiB is below one chunk of 1.004 MiB"):
        Arena(MIB, [4096, MIB])


@pytest.mark.parametrize("spare", [0, 12_288])
def test_a_small_arena_holds_a_whole_chunk_of_mixed_parts(spare: int):
    arena = Arena(16_384 + spare, [12_000, 4096])
    try:
        assert arena.allocate(12_000)
        assert arena.allocate(4096)
    finally:
        arena.close()


def test_a_slot_is_found_without_walking_the_extents():
    """There are thousands in an arena of a terabyte, and a full one is asked for each save."""

    class Unwalked(list):
        def __iter__(self):
            raise AssertionError("walked")

    arena = Arena(64 * PAGE_BYTES, [PAGE_BYTES])
    arena._extents = Unwalked(arena._extents)
    slots = [arena.allocate(PAGE_BYTES) for _ in range(64)]
    assert arena.allocate(PAGE_BYTES) is None
    arena.free(slots[17])
    assert arena.allocate(PAGE_BYTES).offset == slots[17].offset
    arena.close()


def test_in_one_extent_they_would_not_mix(monkeypatch):
    monkeypatch.setattr(module, "_EXTENTS", 1)
    arena = Arena(36_864, [12_000, 4096])
    try:
        assert arena.allocate(12_000)
        assert arena.allocate(4096) is None, "although two thirds are free"
    finally:
        arena.close()


def limits(root: Path, *, folder: str = "", limit: str, current: int, files: int) -> None:
    place = root / "cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(limit + "\n")
    (place / "memory.current").write_text(f"{current}\n")
    (place / "memory.stat").write_text(
        f"anon {current - files}\ninactive_file {files // 4}\nactive_file {files - files // 4}\n"
    )


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(
        "4:memory:/v1\n0::/system.slice/kv.service\n"
    )
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def room(host: Path) -> int:
    return available_bytes(host / "proc", host / "cgroup")


def test_available_is_what_the_host_has(host: Path):
    assert room(host) == 8000 * 1024


def test_available_is_what_the_own_cgroup_leaves(host: Path):
    service = "system.slice/kv.service"
    limits(host, folder=service, limit="4096000", current=1_000_000, files=0)
    limits(host, folder="system.slice", limit="max", current=7_000_000, files=0)
    assert room(host) == 3_096_000


def test_available_is_what_a_cgroup_above_leaves(host: Path):
    limits(host, folder="system.slice", limit="2000000", current=500_000, files=0)
    assert room(host) == 1_500_000


def test_page_cache_does_not_count_as_taken(host: Path):
    """A container that has just read the weights is full of pages that can be taken back."""
    limits(host, limit="5000000", current=4_999_999, files=4_000_000)
    assert room(host) == 4_000_001


def test_available_is_never_negative(host: Path):
    limits(host, limit="1000", current=500_000, files=0)
    assert room(host) == 0


# ----------------------------------------------------------------------------------------- slots


def test_every_hand_out_has_a_serial_of_its_own(arena: Arena):
    first = arena.allocate(MIB)
    arena.free(first)
    second = arena.allocate(MIB)
    assert (second.offset, second.nbytes) == (first.offset, first.nbytes)
    assert second.serial != first.serial
    assert arena.holds(second)
    assert not arena.holds(first)


def test_freeing_what_is_not_in_use_is_misuse(arena: Arena):
    slot = arena.allocate(MIB)
    arena.free(slot)
    for wrong in (slot, slot._replace(serial=99), Slot(123, MIB, 1)):
        with pytest.raises(MisuseError, match="not in use"):
            arena.free(wrong)
    again = arena.allocate(MIB)
    with pytest.raises(MisuseError):
        arena.free(slot)  # the same place, handed out anew
    assert arena.holds(again)
    assert arena.used_bytes == MIB


def test_a_view_is_the_slot_itself(arena: Arena):
    one, other = arena.allocate(MIB), arena.allocate(MIB)
    arena.view(one.offset, one.nbytes)[:4] = b"abcd"
    assert bytes(arena.memory[one.offset : one.offset + 4]) == b"abcd"
    assert not arena.memory[other.offset : other.offset + MIB].any()
