"""H25 on real filesystems: full at the start, read-only, and full while the tier is open."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOUNTED = """
import logging, os, subprocess, sys
from pathlib import Path
import kvtier
from kvtier.errors import ConfigError
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.testing.toy import NAMESPACE, Toy, prompt
from kvtier.tiers.store import Status

place, MIB = Path(sys.argv[1]), 1 << 20
folder, weight = place / "kv", place / "weight"

def mount(*options):
    subprocess.run(["mount", *options, str(place)], check=True)

def fill():
    with weight.open("ab") as file:
        for size in (MIB, 4096):
            try:
                while True:
                    os.write(file.fileno(), bytes(size))
            except OSError:
                continue

def refused():
    try:
        LmdbSlabStore(folder, 64 * MIB).close()
    except ConfigError as error:
        return str(error)
    return "taken"
"""

AT_THE_START = """
mount("-t", "tmpfs", "-o", "size=24m", "tmpfs")
fill()
print(refused())
weight.unlink()
print(refused())
mount("-o", "remount,ro")
print(refused())
"""


@pytest.fixture
def mounted(tmp_path):
    """Return a function that runs a script in a process that may mount something in a folder."""
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("user namespaces are not permitted here")
    (tmp_path / "mount").mkdir()

    def run(script: str) -> list[str]:
        command = ["unshare", "-Urm", sys.executable, "-c", MOUNTED + script]
        command.append(str(tmp_path / "mount"))
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_a_full_disk_and_a_read_only_one_are_named_at_the_start(mounted):
    full, free, read_only = mounted(AT_THE_START)
    assert "kv: ENOSPC (No space left on device); free some space, or lower the capacity" in full
    assert free == "taken"
    assert "kv: EROFS (Read-only file system); mount it for writing" in read_only


FULL_LATER = """
mount("-t", "tmpfs", "-o", "size=24m", "tmpfs")
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
store = LmdbSlabStore(folder, 256 * MIB, durability="each")
kept, number = [], 0
while len(kept) < 60:  # a tier that is promised more than the disk has
    record = make_record(number, 500_000)
    (status,) = store.write_many([record])
    if status is Status.FULL:
        assert kept, "nothing fits"
        store.delete_many([kept.pop(0).header.id])
        if number > 80:
            break
        continue
    assert status is Status.OK, status
    kept.append(record)
    number += 1
assert number > 80, number
for one in kept:
    assert is_exact(*fetch(store, one.header.id, 500_000))
store.delete_many([one.header.id for one in kept[:2]])
print(len(kept))
store.close()
"""


def test_a_disk_smaller_than_the_capacity_is_used_as_far_as_it_goes(mounted):
    *told, count = mounted(FULL_LATER)
    assert int(count) > 15
    assert len(told) == 1  # once a minute
    assert "kv: the disk is full below the capacity" in told[0]
    assert "No space left on device" in told[0]


HEALS = """
mount("-t", "tmpfs", "-o", "size=24m", "tmpfs")
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
url = f"lmdb:{folder}?capacity=256MiB&admission=through&write_budget=unlimited&durability=each"
toy = Toy(kvtier.open("dram:1MiB", url, namespace=NAMESPACE))
fill()  # by somebody else
for seed in range(6):
    toy.save(f"save-{seed}", prompt(256, seed))
    assert toy.load(f"load-{seed}", prompt(257, seed))[::2] == (256, True)
weight.unlink()
import time
deadline = time.monotonic() + 30
seed = 100
while True:
    seed += 1
    toy.save(f"save-{seed}", prompt(256, seed))
    toy.cache.clear("dram")
    if toy.load(f"load-{seed}", prompt(257, seed))[::2] == (256, True):
        break
    assert time.monotonic() < deadline
    time.sleep(0.1)
print("healed")
toy.close()
"""


def test_a_disk_that_others_filled_degrades_the_tier_until_there_is_room(mounted):
    *told, last = mounted(HEALS)
    assert last == "healed"
    assert any("No space left on device" in text and "kv" in text for text in told)
