"""The arena's memory: private or sealed, pinned where it may be, not inherited, given back."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.memory import arena as module
from kvtier.memory.arena import Arena
from kvtier.memory.sealed import PAGE_BYTES, no_memory, sealed_memory

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


@pytest.fixture
def sealed():
    found = Arena(0, [MIB], fd=sealed_memory(4 * MIB))
    yield found
    found.close()


@pytest.fixture(params=["private", "sealed"])
def either(request: pytest.FixtureRequest):
    found = Arena(4 * MIB, [MIB], None if request.param == "private" else sealed_memory(4 * MIB))
    yield found
    found.close()


def areas(field: str) -> list[str]:
    """Return a field of each area of this process that a fork leaves behind: arenas alone are so.

    Neighbouring areas of one kind are one.
    """
    found, value = [], ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            value = rest
        if name == "VmFlags" and "dc" in rest.split():  # the last of an area
            found.append(value)
    return found


def mapped(field: str = "Size") -> int:
    """Return the bytes of arenas that are mapped into this process; "Rss": that are taken."""
    return sum(int(value.split()[0]) * 1024 for value in areas(field))


# --------------------------------------------------------------------------------------- taking


def test_the_memory_is_there_when_it_opens(either: Arena):
    assert mapped("Rss") == either.nbytes, "nothing can fail for want of memory later"


def test_untouched_it_would_not_be(monkeypatch):
    monkeypatch.setattr(Arena, "_take", lambda _: True)
    arena = Arena(8 * MIB, [MIB])
    try:
        assert mapped("Rss") < arena.nbytes == mapped()
    finally:
        arena.close()


def test_more_than_is_available_is_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr("kvtier.memory.sealed.available_bytes", lambda: 3 * MIB)
    with pytest.raises(ConfigError, match=r"capacity 4 MiB is more than the 3 MiB of memory"):
        Arena(4 * MIB, [MIB])
    assert mapped() == 0


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


# --------------------------------------------------------------------------------------- sealing


def test_nobody_can_change_the_size(sealed: Arena):
    for size in (0, sealed.nbytes - PAGE_BYTES, sealed.nbytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(sealed.fd, size)


def test_unsealed_anybody_could(monkeypatch):
    monkeypatch.setattr("kvtier.memory.sealed._SEALS", 0)
    arena = Arena(0, [MIB], fd=sealed_memory(MIB))
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
        assert mapped("Rss") == 2 * MIB
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


def test_the_descriptor_is_not_inherited_by_programs(sealed: Arena):
    assert not os.get_inheritable(sealed.fd)


def test_private_memory_has_no_descriptor_and_no_name(arena: Arena):
    """Nobody can map it, cut it or remove it."""
    assert arena.fd == -1
    assert "kvtier" not in Path("/proc/self/maps").read_text()
    open_files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert [path for path in open_files if "kvtier" in str(path)] == []


def test_each_arena_has_a_number_of_its_own():
    """Whether private or sealed: a plan names its arena by it."""
    fds = [None, sealed_memory(MIB), None, sealed_memory(MIB)]
    arenas = [Arena(MIB, [MIB], fd) for fd in fds]
    assert len({one.id for one in arenas} | {0}) == len(fds) + 1
    for one in arenas:
        one.close()


# ----------------------------------------------------------------------------------------- close


def test_close_gives_the_memory_back():
    assert mapped() == 0
    arena = Arena(MIB, [MIB])
    assert mapped() == MIB
    arena.close()
    arena.close()
    assert arena.closed
    assert mapped() == 0


def test_a_view_keeps_the_memory_until_it_goes():
    arena = Arena(MIB, [MIB])
    view = arena.view(0, 10)
    array = arena.memory[:10]
    arena.close()
    view[:2] = b"ab"
    assert bytes(array[:2]) == b"ab", "a copy in flight must not hit unmapped memory"
    del array
    assert mapped() == MIB
    view.release()
    assert mapped() == 0, "though the arena object itself is still there"
    assert np.array_equal(arena.memory, np.empty(0, np.uint8))


def test_an_arena_that_held_its_mapping_would_keep_the_memory():
    arena = Arena(MIB, [MIB])
    view, held = arena.view(0, 10), arena._map
    arena.close()
    view.release()
    assert mapped() == MIB
    del held
    assert mapped() == 0


def test_huge_pages_are_asked_for(either: Arena):
    """Of a memfd the kernel gives them where ``shmem_enabled`` is ``advise``."""
    assert either.nbytes
    assert [{"hg", "dc"} <= set(flags.split()) for flags in areas("VmFlags")] == [True]


ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this kernel has no huge pages"
)
def test_private_memory_is_in_huge_pages():
    """What a memfd lacks where ``shmem_enabled`` is as it comes: never."""
    arena = Arena(16 * MIB, [MIB])
    try:
        assert mapped("AnonHugePages") >= 8 * MIB, "one at each end may not fit"
    finally:
        arena.close()


def test_without_asking_it_would_not_be(monkeypatch):
    if ENABLED.exists() and "[always]" in ENABLED.read_text():
        pytest.skip("this kernel gives huge pages unasked")
    monkeypatch.setattr(module.mmap, "MADV_HUGEPAGE", module.mmap.MADV_NORMAL)
    arena = Arena(16 * MIB, [MIB])
    try:
        assert mapped("AnonHugePages") == 0
    finally:
        arena.close()


@pytest.mark.parametrize(
    ("cause", "limit"), [(errno.EFBIG, "ulimit -f, LimitFSIZE="), (errno.ENOMEM, "ulimit -v, Lim")]
)
def test_the_limit_that_is_in_the_way_is_named(cause, limit):
    """Memory that processes share counts as a file."""
    assert limit in str(no_memory(MIB, OSError(cause, os.strerror(cause))))
