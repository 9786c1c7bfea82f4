"""How fast `kvtier verify` and `kvtier inspect` are, beside what bounds them.

    python benchmarks/verify.py [--json FILE] [--plot FILE.png] [--dir DIR] [--megabytes N]

verify: beside reads of the same segments by as many threads, past the page cache, with nothing
done to the bytes. inspect: CPU seconds for an index of 100,000 records, put into LMDB alone.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plot import kept, option

from kvtier.identity.record import Header, PartName
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import index_bytes_for
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.testing.records import NAMESPACE, make_record

SIZES = (128 << 10, 2 << 20)
ROUNDS = 9
PIECE = 4 << 20
THREADS = 4
RECORDS = 100_000
_mine = threading.local()


def quiet(text: str, done: int, count: int) -> None:
    """Show no progress."""


def read(path: Path, offset: int) -> int:
    """Read a piece of a file past the page cache into this thread's buffer."""
    if not hasattr(_mine, "buffer"):
        _mine.buffer = memoryview(mmap.mmap(-1, PIECE))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.preadv(descriptor, [_mine.buffer], offset)
    finally:
        os.close(descriptor)


def plain(folder: Path) -> float:
    """Read all segments; return bytes a second."""
    paths = sorted(folder.glob("*.seg"))
    pieces = [(path, at) for path in paths for at in range(0, path.stat().st_size, PIECE)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(lambda piece: read(*piece), pieces))
    return total / (time.perf_counter() - begin)


def verified(folder: Path, size: int, total: int) -> dict[str, float]:
    """Fill a directory and verify it; return the ratio to plain reads, and bytes a second."""
    store = LmdbSlabStore(folder, total + total // 4 + (16 << 20))
    count = total // size
    for number in range(count):
        store.write_many([make_record(number, size)])
    store.close()
    ratios, speeds = [], []
    for _ in range(ROUNDS):
        bound = plain(folder)
        verdict = LmdbSlabStore.verify(str(folder), quiet)
        assert verdict.whole  # noqa: S101
        assert verdict.checked == count  # noqa: S101
        speeds.append(verdict.checked_bytes / verdict.seconds)
        ratios.append(speeds[-1] / bound)
    return {
        "ratio_plain_reads": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "bytes_per_s": statistics.median(speeds),
    }


def inspected(folder: Path) -> float:
    """Return the CPU seconds of an inspection, the median of a few."""
    LmdbSlabStore(folder, 64 << 20).close()
    index = Index(folder / "index.lmdb", index_bytes_for(RECORDS), synced=False)
    entries = {}
    for number in range(RECORDS):
        key = hashlib.sha256(number.to_bytes(8, "little")).digest()
        sums = {"raw_sum": bytes(16), "stored_sum": bytes(16)}
        header = Header(NAMESPACE, key, None, 0, PartName(), 100, 100, **sums)
        entries[header.id] = Entry(1, number, 10**15 + number, header.pack())
    index.commit(entries)
    index.close()
    took = []
    for _ in range(3):
        begin = time.process_time()
        assert LmdbSlabStore.survey(str(folder), quiet).records == RECORDS  # noqa: S101
        took.append(time.process_time() - begin)
    return statistics.median(took)


def main() -> None:
    """Measure, interleaved, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option(arguments)
    arguments.add_argument("--dir", type=Path, help="on the device to measure")
    arguments.add_argument("--megabytes", type=int, default=512, help="of records of each size")
    options = arguments.parse_args()
    report: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for size in SIZES:
            name = f"verify.{size >> 10}KiB"
            row = verified(Path(folder) / name, size, options.megabytes << 20)
            report[name] = row
            print(
                f"{name:15} {row['ratio_plain_reads']:.2f} ({row['least']:.2f} to "
                f"{row['most']:.2f}) of plain reads, {row['bytes_per_s'] / 1e9:.2f} GB/s"
            )
        report["inspect.cpu_s_per_100000"] = seconds = inspected(Path(folder) / "index")
        print(f"inspect         {seconds:.2f} CPU s for {RECORDS:,} records")
    panels = {"of plain reads": "verify.*.ratio_plain_reads@1", "bytes/s": "verify.*.bytes_per_s"}
    kept(report, options, panels)


if __name__ == "__main__":
    main()
