"""An NVMe store that the system does not let open: it says so, and what it holds stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20

OPEN = """
import os, resource, sys
from pathlib import Path
import lmdb
from kvtier.errors import ConfigError
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
opened, limit = lmdb.Environment, getattr(resource, sys.argv[2])

def few(*args, **options):
    used = len(os.listdir("/proc/self/fd")) - 1
    if limit == resource.RLIMIT_AS:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(limit, (used, resource.getrlimit(limit)[1]))
    return opened(*args, **options)

lmdb.Environment = few
try:
    print(len(list(LmdbSlabStore(Path(sys.argv[1]), 64 << 20).scan())))
except ConfigError as error:
    print(error)
"""


def opened_with_little(folder: Path, limit: str, before: str = "") -> str:
    command = [sys.executable, "-c", before + OPEN, str(folder), limit]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("RLIMIT_AS", "ENOMEM (Cannot allocate memory); raise this process's limit of memory"),
        ("RLIMIT_NOFILE", "EMFILE (Too many open files); raise the limit on open files"),
    ],
)
def test_an_index_that_the_system_refuses_to_open_is_not_given_up(
    opened: Any, limit: str, said: str
) -> None:
    records = [make_record(number, 5000) for number in range(20)]
    store = opened(64 * MIB)
    assert store.write_many(records) == [Status.OK] * 20
    store.close()
    assert said in opened_with_little(opened.folder, limit)
    store = opened(64 * MIB)
    assert len(list(store.scan())) == 20
    assert is_exact(*fetch(store, records[3].header.id, 64 << 10))


def test_without_telling_the_two_apart_it_would_be(opened: Any) -> None:
    store = opened(64 * MIB)
    store.write_many([make_record(1, 5000)])
    store.close()
    off = (
        "from kvtier.storage_backends import slab_recovery\n"
        "slab_recovery._is_errno = lambda _: False\n"
    )
    opened_with_little(opened.folder, "RLIMIT_AS", off)
    assert list(opened(64 * MIB).scan()) == []
