"""H25: a directory that cannot be used is named with its cause, at once; one that fails later too.

What the file modes are, and O_DIRECT refused, is in `unit/store_lmdb`.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.faulty_io import FaultyIO
from kvtier.testing.hands import Hands
from kvtier.testing.records import aligned, make_record
from kvtier.testing.toy import CHUNK, NAMESPACE, prompt
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Fetched, Tier, Wanted

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


FAULTS = [
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.EIO, errno.EDQUOT),
    *(errno.EMFILE, errno.EINTR, errno.ENOSPC, "short"),
]


def named(fault: int | str) -> str:
    return errno.errorcode[fault] if isinstance(fault, int) else fault


def cause_of(fault: int | str) -> str:
    return os.strerror(fault) if isinstance(fault, int) else " of "


@pytest.mark.parametrize("fault", FAULTS, ids=named)
@pytest.mark.parametrize("kind", ["open", "allocate", "write", "sync"])
def test_a_disk_that_fails_later_is_told_counted_and_heals(
    engines, folder, kind, fault, warnings_of
):
    """The engine goes on from dram meanwhile; the log names cause and path, and not each time."""
    if fault == "short" and kind != "write":
        return  # only what moves bytes can move fewer
    io, clock = FaultyIO(), Hands()
    store = LmdbSlabStore(folder, 64 << 20, durability="each", io=io)
    toy = engines(store, clock=clock, chunks=48)
    io.fail(kind, fault)
    for seed in range(8):
        toy.save(f"save-{seed}", prompt(TOKENS, seed))
        assert toy.load(f"load-{seed}", prompt(TOKENS + 1, seed))[::2] == (TOKENS, True)
    assert io.hits
    assert toy.cache.metrics.get("tier_errors") + toy.cache.metrics.get("dropped_spills") > 0
    told = [text for text in warnings_of(str(folder)) if cause_of(fault) in text]
    assert 1 <= len(told) <= 2
    health = toy.cache.health()
    [(_, why)] = health.troubles.items()
    assert health.status == "degraded"
    assert str(folder) in why
    assert cause_of(fault) in why
    io.heal()
    clock.now += 30.0
    toy.save("healed", prompt(TOKENS, 50))
    toy.save("healed too", prompt(TOKENS, 51))
    assert toy.cache.health().status == "ok"
    toy.cache.clear("dram")
    assert toy.load("from the disk", prompt(TOKENS + 1, 51))[::2] == (TOKENS, True)


@pytest.mark.parametrize("fault", [errno.EIO, errno.EACCES, errno.EINTR, "short"], ids=named)
def test_a_disk_that_cannot_be_read_is_a_miss_until_it_can(engines, folder, fault):
    """What was acknowledged as durable is there when it is well again."""
    io, clock = FaultyIO(), Hands()
    store = LmdbSlabStore(folder, 64 << 20, durability="each", io=io)
    toy = engines(store, clock=clock, chunks=48)
    for seed in range(6):
        toy.save(f"save-{seed}", prompt(TOKENS, seed))
    toy.cache.clear("dram")
    io.fail("read", fault)
    for seed in range(5):
        clock.now += 1.0
        _, _, exact = toy.load(f"load-{seed}", prompt(TOKENS + 1, seed))
        assert exact
    health = toy.cache.health()
    [(_, why)] = health.troubles.items()
    assert str(folder) in why
    assert cause_of(fault) in why
    io.heal()
    clock.now += 30.0
    assert toy.load("again", prompt(TOKENS + 1, 5))[::2] == (TOKENS, True)
    assert toy.cache.health().status == "ok"


@pytest.mark.parametrize("kind", ["read", "write", "sync"])
def test_a_disk_that_hangs_is_left_alone_and_heals(folder, kind):
    """Calls own their buffers until they return; nothing else waits for them."""
    io, clock = FaultyIO(), Hands()
    store = LmdbSlabStore(folder, 64 << 20, durability="each", io=io)
    flow = ThreadFlow()
    tier = Tier("lmdb", store, flow, Metrics(), clock)
    records = [make_record(number, 60_000) for number in range(store.THREADS + 1)]
    buffers = [aligned(61_440) for _ in records]
    wanted = [
        Wanted(record.header.id, record.header.namespace, 60_000, buffer)
        for record, buffer in zip(records, buffers, strict=True)
    ]

    def start(number):
        if kind == "read":
            return flow.spawn(tier.read([wanted[number]]))
        return flow.spawn(tier.write([records[number]]))

    try:
        if kind == "read":
            assert flow.spawn(tier.write(records)).result(20) == [Status.OK] * len(records)
        io.fail(kind, "hang")
        hung = [start(number) for number in range(store.THREADS)]
        deadline = time.monotonic() + 20
        while len(tier._running) < store.THREADS or not io.hits:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        clock.now += 31.0
        assert not tier.available
        assert "hangs" in tier.trouble
        (late,) = start(store.THREADS).result(20)
        assert late in (Status.FAILED, Fetched(Status.FAILED))
        io.heal()
        for one in hung:
            (said,) = one.result(20)
            assert (said.status if kind == "read" else said) is Status.OK
        assert tier.available
        assert not tier.trouble
        for fetched, record, buffer in zip(
            flow.spawn(tier.read(wanted)).result(20)[:-1], records, buffers, strict=False
        ):
            assert fetched.status is Status.OK
            assert buffer[:60_000] == record.data
    finally:
        io.heal()
        tier.close()
        flow.close()


def test_a_disk_that_others_have_filled_is_named(engines, folder):
    """No segment can be made, and there is no record that could make room for another."""
    io, clock = FaultyIO(), Hands()
    store = LmdbSlabStore(folder, 64 << 20, durability="batch", io=io)
    toy = engines(store, clock=clock, chunks=48)
    io.fail("allocate", errno.ENOSPC)
    for seed in range(6):
        toy.save(f"save-{seed}", prompt(TOKENS, seed))
    [(_, why)] = toy.cache.health().troubles.items()
    assert str(folder) in why
    assert os.strerror(errno.ENOSPC) in why
