"""H25: a directory that cannot be used is named with its cause, at once; one that fails later too.

What the file modes are, and O_DIRECT refused, is in `unit/store_lmdb`.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO
from kvtier.testing.small_catalog import Clock
from kvtier.testing.toy import CHUNK, NAMESPACE, prompt

TOKENS = 4 * CHUNK


def a_file(folder):
    folder.write_bytes(b"")
    return folder, "EEXIST|ENOTDIR"


def below_a_file(folder):
    folder.write_bytes(b"")
    return folder / "kv", "ENOTDIR"


def a_loop(folder):
    folder.symlink_to(folder)
    return folder, "ELOOP|EEXIST"


def a_link_to_nowhere(folder):
    folder.symlink_to(folder.parent / "nowhere" / "kv")
    return folder, "ENOENT|EEXIST"


def a_name_too_long(folder):
    return folder / ("x" * 300), "ENAMETOOLONG"


def no_such_device(folder):
    """A file system that takes no files: what a read-only mount looks like to root."""
    return "/proc/sys/kv", "EACCES|EPERM|ENOENT|EROFS"


PLACES = [a_file, below_a_file, a_loop, a_link_to_nowhere, a_name_too_long, no_such_device]


@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
def test_a_place_that_cannot_be_used_is_named_with_its_cause(folder, place):
    path, cause = place(folder)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=rf"({cause}) ") as refused:
        kvtier.open("dram:1MiB", f"lmdb:{path}?capacity=64MiB", namespace=NAMESPACE)
    assert str(path) in str(refused.value)
    assert "; " in str(refused.value), "and what to do"
    assert threading.active_count() == threads


AS_NOBODY = """
import os, sys
import kvtier
from kvtier.testing.toy import NAMESPACE
from kvtier.config import Config, parse_tier
tier = parse_tier(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
kvtier.open(Config(1 << 20, (tier,)), namespace=NAMESPACE)
"""


@pytest.mark.parametrize("mode", [0o555, 0o000] if os.getuid() else [0o555, 0o000, 0o700])
def test_anothers_directory_ends_the_start_with_one_line(folder, lmdb, mode):
    """Root may do anything, so it asks as nobody, for whom its own 0700 is another's."""
    folder.mkdir()
    folder.chmod(mode)
    command = [sys.executable, "-c", AS_NOBODY, lmdb]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    folder.chmod(0o700)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: " in last
    assert "EACCES" in last


class Failing(FileIO):
    """A disk on which one kind of call fails for as long as a code is set."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.code = 0

    def _fail(self, verb: str) -> None:
        if self.code and verb == self.verb:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path, flags):
        self._fail("open")
        return super().open(path, flags)

    def pwrite(self, descriptor, buffers, offset):
        self._fail("pwrite")
        return super().pwrite(descriptor, buffers, offset)

    def fallocate(self, descriptor, length):
        self._fail("fallocate")
        super().fallocate(descriptor, length)

    def fdatasync(self, descriptor):
        self._fail("fdatasync")
        super().fdatasync(descriptor)


CODES = [errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.EIO, errno.EDQUOT]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("verb", ["open", "fallocate", "pwrite", "fdatasync"])
def test_a_disk_that_fails_later_is_told_counted_and_heals(
    engines, folder, verb, code, warnings_of
):
    """The engine goes on from dram meanwhile; the log names cause and path, and not each time."""
    io, clock = Failing(verb), Clock()
    store = LmdbSlabStore(folder, 64 << 20, durability="each", io=io)
    toy = engines(store, clock=clock, chunks=48)
    io.code = code
    for seed in range(8):
        toy.save(f"save-{seed}", prompt(TOKENS, seed))
        assert toy.load(f"load-{seed}", prompt(TOKENS + 1, seed))[::2] == (TOKENS, True)
    assert toy.cache.metrics.get("tier_errors") + toy.cache.metrics.get("dropped_spills") > 0
    told = [text for text in warnings_of(str(folder)) if os.strerror(code) in text]
    assert 1 <= len(told) <= 2
    io.code = 0
    clock.now += 30.0
    toy.save("healed", prompt(TOKENS, 50))
    toy.save("healed too", prompt(TOKENS, 51))
    toy.cache.clear("dram")
    assert toy.load("from the disk", prompt(TOKENS + 1, 51))[::2] == (TOKENS, True)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_a_tier_that_fails_makes_the_cache_degraded_until_it_is_well(engines, folder, code):
    io, clock = Failing("pwrite"), Clock()
    toy = engines(LmdbSlabStore(folder, 64 << 20, durability="each", io=io), clock=clock, chunks=48)
    assert (toy.cache.health().status, toy.cache.health().troubles) == ("ok", {})
    io.code = code
    for seed in range(8):
        toy.save(f"save-{seed}", prompt(TOKENS, seed))
    health = toy.cache.health()
    assert health.status == "degraded"
    [(_, why)] = health.troubles.items()
    assert str(folder) in why
    assert os.strerror(code) in why
    io.code = 0
    clock.now += 30.0
    toy.save("healed", prompt(TOKENS, 50))
    assert toy.cache.health().status == "ok"
