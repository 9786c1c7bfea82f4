"""H17, H18: memory that outlives its process, or is more than there is."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.memory.arena import Arena
from kvtier.memory.sealed import sealed_memory
from kvtier.testing.mortal import Mortal, serves
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, prompt
from kvtier.testing.waiting import until

SHM = Path("/dev/shm")  # noqa: S108  (looked at, not written to)
MIB = 1 << 20

KILLED = """
import os, signal, sys
import kvtier
from kvtier.testing.toy import NAMESPACE, Toy, prompt
toy = Toy(kvtier.open("dram:64MiB", sys.argv[1], namespace=NAMESPACE))
assert toy.load("load", prompt(257))[2]
toy.save("save", prompt(256))
lease = toy.cache.lease(toy.cache.match(prompt(257)), deadline=600)
assert lease.chunks == 4
os.kill(os.getpid(), signal.SIGKILL)
"""


def mappings(maps: Path) -> list[str]:
    """Return the inodes of the arenas that a process has mapped."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it has ended, or is another user's
        return []
    return [line.split()[4] for line in lines if "/memfd:kvtier-arena" in line]


def private_bytes() -> int:
    """Return the bytes of this process that are in no file."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_a_killed_process_leaves_no_memory_behind(lmdb):
    """H17: engines killed with a lease held; each next one starts. Their memory was their own."""
    for _ in range(5):
        command = [sys.executable, "-c", KILLED, lmdb]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path for path in SHM.iterdir() if "kvtier" in path.name] == []
    toy = Toy(kvtier.open("dram:64MiB", lmdb, namespace=NAMESPACE))
    assert toy.load("load", prompt(257))[2]
    toy.close()


def test_daemons_killed_twenty_times_leave_one_arena(nursery):
    """H17: the supervisor is killed each time, its server goes with it, the client lets go."""
    daemon, gone = Mortal(nursery, "dram:64MiB"), set()
    toy = daemon.open()
    for _ in range(20):
        gone.add(str(toy.cache._desk.arena.id))
        daemon.kill()
        daemon.start()
        until(lambda: toy.cache._desk.arena.id and str(toy.cache._desk.arena.id) not in gone)
        mapped = {inode for maps in Path("/proc").glob("[0-9]*/maps") for inode in mappings(maps)}
        assert not mapped & gone
    assert [path for path in SHM.iterdir() if "kvtier" in path.name] == []
    serves(toy)
    daemon.close()


def test_the_arena_has_no_name_that_another_could_remove(engines):
    """It is memory of this process alone; a daemon's is a file that never had a name."""
    engines()
    assert mappings(Path("/proc/self/maps")) == []
    arena = Arena(0, fd=sealed_memory(MIB))
    target = Path(f"/proc/self/fd/{arena.fd}").readlink()
    arena.close()
    assert str(target) == "/memfd:kvtier-arena (deleted)"


# --------------------------------------------------------------------------------------- H18

LIMITED = """
import resource, sys
import kvtier
from kvtier.testing.toy import NAMESPACE
kind, limit, size, shards = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
resource.setrlimit(getattr(resource, kind), (limit, limit))
cache = kvtier.open(f"dram:{size}", namespace=NAMESPACE, shards=shards)
print(cache._desk.depot.arena.nbytes, cache._desk.depot.arena.pinned)
cache.close()
"""


def limited(kind: str, limit: int, size: str, shards: int = 1) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LIMITED, kind, str(limit), size, str(shards)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize("shards", [1, 2])
def test_too_large_for_the_address_space_is_one_error(shards):
    """It names what was asked and what there is; the status is not zero."""
    done = limited("RLIMIT_AS", 3 << 30, "4GiB", shards)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: " in last
    assert "4 GiB" in last
    assert "available" in last
    assert "ask for less" in last


@pytest.mark.parametrize("shards", [1, 2])
def test_a_budget_is_for_the_host_and_not_for_each_rank(shards):
    done = limited("RLIMIT_AS", 16 << 30, "256MiB", shards)
    assert done.stdout.split()[0] == str(256 * MIB), done.stderr


def test_more_than_the_machine_has_names_both_sizes():
    with pytest.raises(kvtier.ConfigError, match=r"900 TiB.*available.*ask for less"):
        kvtier.open("dram:900TiB", namespace=NAMESPACE)


def test_memory_that_may_not_be_locked_is_used_unpinned_with_one_warning():
    """Root may lock whatever the limit says, so it is asked as nobody."""
    nobody = "import os, importlib.metadata\nos.getuid() or os.setuid(65534)\ncache ="
    script = LIMITED.replace("cache =", nobody)
    command = [sys.executable, "-c", script, "RLIMIT_MEMLOCK", str(8 * MIB), "64MiB", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(64 * MIB), "False"]
    assert done.stderr.count("not pinned") == 1
    assert "ulimit -l" in done.stderr


def test_a_cache_that_could_not_open_leaves_nothing_of_it(engines):
    toy = engines()
    before = private_bytes()
    for _ in range(5):
        with pytest.raises(kvtier.ConfigError):
            kvtier.open("dram:64MiB", "lmdb:/proc/nowhere?capacity=1GiB", namespace=NAMESPACE)
    assert private_bytes() < before + 64 * MIB, "five times as much would be left"
    toy.save("one", prompt(CHUNK))
