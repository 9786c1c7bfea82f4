"""The arena: exact, sealed, pinned where it may be, not inherited, given back."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def script(text: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, which a signal may end."""
    head = "import os, resource, sys\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    command = [sys.executable, "-c", head + text]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def mappings() -> int:
    """Count the arenas that are mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:kvtier-arena")


# ------------------------------------------------------------------------------------------ size


@pytest.mark.parametrize(("part", "slot"), [(1, 4096), (4096, 4096), (4097, 8192), (1000, 4096)])
def test_slots_are_whole_pages(part: int, slot: int):
    assert slot_bytes_for(part) == slot


@pytest.mark.parametrize("capacity", [MIB, MIB + 1, 5 * MIB - 1, 3 * MIB + 4096])
def test_the_capacity_is_never_exceeded(capacity: int):
    arena = Arena(capacity, [MIB])
    try:
        assert capacity - PAGE_BYTES < arena.nbytes <= capacity
        assert os.fstat(arena.fd).st_size == arena.memory.size == arena.nbytes
        taken = []
        while (slot := arena.allocate(MIB)) is not None:
            taken.append(slot)
            assert arena.used_bytes == len(taken) * MIB <= capacity
        assert len(taken) == capacity // MIB
    finally:
        arena.close()


def test_the_memory_is_there_when_it_opens():
    arena = Arena(8 * MIB, [MIB])
    try:
        pages = os.fstat(arena.fd).st_blocks * 512
        assert pages == arena.nbytes, "nothing can fail for want of memory later"
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


def test_more_than_is_available_is_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr("kvtier.memory.sealed.available_bytes", lambda: 3 * MIB)
    with pytest.raises(ConfigError, match=r"capacity 4 MiB is more than the 3 MiB of memory"):
        Arena(4 * MIB, [MIB])
    assert mappings() == 0


def test_memory_that_the_system_refuses_is_one_error():
    done = script(
        "from kvtier.memory.arena import Arena\n"
        "from kvtier.errors import ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        "try: Arena(1 << 30, [1 << 20])\n"
        "except ConfigError as error: print(error)\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
    )
    assert re.search(r"cannot take 1 GiB .*Cannot allocate memory; .* available", done.stdout)
    assert done.returncode == 0, done.stderr


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


# --------------------------------------------------------------------------------------- sealing


def test_nobody_can_change_the_size(arena: Arena):
    for size in (0, arena.nbytes - PAGE_BYTES, arena.nbytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_unsealed_anybody_could(monkeypatch):
    monkeypatch.setattr("kvtier.memory.sealed._SEALS", 0)
    arena = Arena(MIB, [MIB])
    try:
        os.ftruncate(arena.fd, MIB + PAGE_BYTES)
    finally:
        arena.close()


# --------------------------------------------------------------------------------------- pinning

LOCKED = re.compile(r"VmLck:\s+(\d+) kB")
UNPINNED = (
    "import logging\n"
    "from kvtier.memory.arena import Arena\n"
    "logging.basicConfig(stream=sys.stdout, format='%(levelname)s %(message)s')\n"
    "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
    "if os.getuid() == 0: os.setresuid(65534, 65534, 65534)\n"  # root may lock without limit
    "arena = Arena(16 << 20, [1 << 20])\n"
    "assert not arena.pinned\n"
    "assert os.fstat(arena.fd).st_blocks * 512 == 16 << 20\n"
    "arena.memory[:] = 1\n"
    "arena.close()\n"
)


def test_without_the_right_to_lock_it_works_unpinned_and_says_so_once():
    done = script(UNPINNED)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("WARNING dram is not pinned (mlock of 16 MiB: ")
    assert "ulimit -l" in line


def test_pinned_memory_is_locked_until_close():
    def locked() -> int:
        return int(LOCKED.search(Path("/proc/self/status").read_text())[1]) * 1024

    before = locked()
    arena = Arena(2 * MIB, [MIB])
    pinned, during = arena.pinned, locked()
    arena.close()
    assert during - before == (2 * MIB if pinned else 0)
    assert locked() == before


class NoLock:
    """A C library whose mlock always fails."""

    @staticmethod
    def mlock2(address: object, size: object, flags: object) -> int:
        return -1


def test_an_old_kernel_gets_its_pages_by_touching_them(monkeypatch, caplog):
    monkeypatch.setattr(module.ctypes, "CDLL", lambda *_, **__: NoLock)
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 250)  # no kernel knows this one
    with caplog.at_level(logging.WARNING, "kvtier"):
        arena = Arena(2 * MIB, [MIB])
    try:
        assert not arena.pinned
        assert os.fstat(arena.fd).st_blocks * 512 == 2 * MIB
    finally:
        arena.close()
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------------------------ fork

TOUCH = (
    "from kvtier.memory import arena\n"
    "{patch}"
    "one = arena.Arena(1 << 20, [1 << 20])\n"
    "one.memory[:] = 7\n"
    "child = os.fork()\n"
    "if child == 0: os._exit(int(one.memory[5]))\n"
    "print(os.waitpid(child, 0)[1], flush=True)\n"
    "assert one.memory[5] == 7\n"
)


def test_a_forked_child_has_no_mapping():
    done = script(TOUCH.format(patch=""))
    assert done.returncode == 0, done.stderr
    assert os.WIFSIGNALED(int(done.stdout)), "the child read its parent's arena"


def test_inherited_it_would_have_one():
    done = script(TOUCH.format(patch="arena.mmap.MADV_DONTFORK = arena.mmap.MADV_NORMAL\n"))
    assert os.waitstatus_to_exitcode(int(done.stdout)) == 7, done.stderr


def test_the_descriptor_is_not_inherited_by_programs(arena: Arena):
    assert not os.get_inheritable(arena.fd)


# ----------------------------------------------------------------------------------------- close


def test_close_gives_the_memory_back():
    assert mappings() == 0
    arena = Arena(MIB, [MIB])
    assert mappings() == 1
    arena.close()
    arena.close()
    assert mappings() == 0


def test_a_view_keeps_the_memory_until_it_goes():
    arena = Arena(MIB, [MIB])
    view = arena.view(0, 10)
    array = arena.memory[:10]
    arena.close()
    view[:2] = b"ab"
    assert bytes(array[:2]) == b"ab", "a copy in flight must not hit unmapped memory"
    del array
    assert mappings() == 1
    view.release()
    assert mappings() == 0, "though the arena object itself is still there"
    assert np.array_equal(arena.memory, np.empty(0, np.uint8))


def test_an_arena_that_held_its_mapping_would_keep_the_memory():
    arena = Arena(MIB, [MIB])
    view, held = arena.view(0, 10), arena._map
    arena.close()
    view.release()
    assert mappings() == 1
    del held
    assert mappings() == 0


def test_huge_pages_are_asked_for():
    """The kernel gives them where ``shmem_enabled`` is ``advise``; a fork leaves all behind."""
    arena = Arena(4 * MIB, [MIB])
    try:
        flags = ""
        with Path("/proc/self/smaps").open() as smaps:
            inside = False
            for line in smaps:
                if "-" in line.split()[0]:
                    inside = "memfd:kvtier-arena" in line
                elif inside and line.startswith("VmFlags:"):
                    flags = line
        assert {"hg", "dc"} <= set(flags.split())
    finally:
        arena.close()
