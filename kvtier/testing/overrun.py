"""A bounded tier that is written to without end, and a watch on what its directory takes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import kvtier
from kvtier.testing.toy import BLOCK, CHUNK, prompt
from kvtier.transfer import CopyResult, CopyStatus

_ST_BLOCK: Final = 512  # stat(2)
_CHUNKS: Final = 64  # of a prompt
_READER: Final = """
import sys, lmdb
index = lmdb.Environment(sys.argv[1], subdir=False, readonly=True)
transaction = index.begin()
print(sum(1 for _ in transaction.cursor()), flush=True)
sys.stdin.read()
"""


class Overrun(NamedTuple):
    """What came of it: bytes written, and the most bytes that the directory took."""

    written: int
    most: int
    samples: int


def disk_bytes(folder: Path) -> int:
    """Return the bytes of disk that a directory and all in it take, as `du` counts them."""
    total = folder.stat().st_blocks
    for path in list(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks
    return total * _ST_BLOCK


@contextlib.contextmanager
def watched(folder: Path, every: float) -> Iterator[list[int]]:
    """Sample what a directory takes, every so many seconds; the list grows meanwhile."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every):
            samples.append(disk_bytes(folder))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
        samples.append(disk_bytes(folder))


@contextlib.contextmanager
def stale_reader(index: Path) -> Iterator[None]:
    """Have a process read an index by LMDB, in a transaction that does not end."""
    command = [sys.executable, "-c", _READER, str(index)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as reader:  # noqa: S603
        if reader.stdout is None or not reader.stdout.readline():
            raise RuntimeError("the reader did not begin")
        try:
            yield
        finally:
            reader.kill()


def overrun(folder: Path, capacity: int, until: int, *, every: float = 0.05) -> Overrun:
    """Write through a Cache by eight threads, until `until` bytes count as written.

    capacity: bytes of the tier, whole MiB. A reader of its index stays open all the while. Blocks.
    """
    geometry = kvtier.Geometry(
        (kvtier.Component(layers=8, heads=4, head_size=64),), block_tokens=(BLOCK,)
    )
    url = f"lmdb:{folder}?capacity={capacity >> 20}MiB&admission=through&write_budget=unlimited"
    namespace = kvtier.Namespace("overrun", geometry)
    with kvtier.open("dram:64MiB", url, namespace=namespace) as cache:

        def save(seed: int) -> None:
            turn = 0
            while cache.metrics.get("spilled_bytes", tier="lmdb") < until:
                turn += 1
                prefix = cache.prefix(prompt(_CHUNKS * CHUNK, 100_000 * seed + turn))
                plan = cache.plan_save(prefix, list(range(_CHUNKS * CHUNK // BLOCK)))
                if plan is not None:
                    cache.settle(plan, CopyResult(CopyStatus.OK))
                cache.flush(timeout=40)

        with stale_reader(folder / "index.lmdb"), watched(folder, every) as samples:
            threads = [threading.Thread(target=save, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        written = int(cache.metrics.get("spilled_bytes", tier="lmdb"))
    return Overrun(written, max([*samples, disk_bytes(folder)]), len(samples))
