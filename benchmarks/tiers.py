"""How fast each tier moves the records of a real chunk, beside the limit of its medium.

    python benchmarks/tiers.py [--dir DIR] [--rounds N] [--json FILE] [--plot FILE.png]

Records of 5,898,240 bytes: 256 tokens of SmolLM2-135M in bfloat16. In every round each contender
has its turn, so that whatever else the machine does meets all alike.

dram   a connector's scatter into an engine's blocks, beside one memcpy of the same bytes
lmdb   the Store's write_many and read_many on four threads, durability batch (synced every 256
       MiB), beside pwritev and preadv with O_DIRECT on a preallocated file, synced once
s3     the Store's read_many on eight threads, beside boto3's get_object, same server
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rounds import COUNT, RECORD, Contenders, measure, must, options, report

from kvtier.device.base import Copy
from kvtier.device.cpu import CpuDevice
from kvtier.seams import IoPool
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.layouts import by_planes
from kvtier.testing.records import aligned, make_record
from kvtier.testing.seaweed import SeaweedServer
from kvtier.tiers.store import Status, Write

PLANES, BLOCKS, BLOCK_BYTES = 60, 16, 6144


def dram() -> Contenders:
    """Return a scatter of chunks through the device, and the copy of the same bytes."""
    device = CpuDevice()
    pages = np.ones((PLANES, COUNT * BLOCKS, BLOCK_BYTES), np.uint8)
    slots = np.ones((COUNT, PLANES, BLOCKS, BLOCK_BYTES), np.uint8)
    other = np.ones_like(slots)
    copies = [
        Copy(pages, range(at * BLOCKS, (at + 1) * BLOCKS), slot) for at, slot in enumerate(slots)
    ]
    stream = device.stream("load")

    def scatter() -> None:
        for fence in device.scatter(stream, by_planes(copies, 4), [device.host_fence()]):
            fence.wait(60)

    return {"dram scatter": scatter, "dram memcpy": lambda: np.copyto(other, slots)}


@contextlib.contextmanager
def lmdb(folder: Path) -> Iterator[Contenders]:
    """Yield the NVMe store's verbs, and the same I/O without a store."""
    capacity = 64 * RECORD * 2
    store = LmdbSlabStore.open(str(folder / "kv"), capacity, {"durability": "batch"})
    records = [make_record(number, RECORD) for number in range(COUNT)]
    buffers = [aligned(RECORD) for _ in records]
    names = [record.header.id for record in records]
    pool = IoPool("bench", store.THREADS)
    raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(raw, 0, COUNT * RECORD)

    def write() -> None:
        must(pool.map(lambda record: store.write_many([record])[0], records))

    def read() -> None:
        into = zip(names, buffers, strict=True)
        must(pool.map(lambda one: store.read_many([one[0]], [one[1]])[0].status, into))

    def raw_write() -> None:
        pool.map(lambda at: os.pwritev(raw, [records[at].data], at * RECORD), range(COUNT))
        os.fdatasync(raw)

    def raw_read() -> None:
        pool.map(lambda at: os.preadv(raw, [buffers[at]], at * RECORD), range(COUNT))

    def forget() -> None:
        store.delete_many(names)

    try:
        write()
        raw_write()
        yield {
            "lmdb write": timed_after(forget, write),
            "lmdb raw write": raw_write,
            "lmdb read": read,
            "lmdb raw read": raw_read,
        }
    finally:
        pool.close()
        store.close()
        os.close(raw)


@contextlib.contextmanager
def s3() -> Iterator[Contenders]:
    """Yield the S3 store's read, and the plain client's, on a server of its own."""
    with SeaweedServer() as server:
        os.environ.update(server.env())
        bucket = server.create_bucket("bench")
        options = {name: option.default for name, option in S3Store.OPTIONS.items()}
        options["endpoint"] = server.endpoint
        store = S3Store.open(f"//{bucket}/records", None, options)
        records = [make_record(number, RECORD) for number in range(COUNT)]
        buffers = [aligned(RECORD) for _ in records]
        pool = IoPool("bench", store.THREADS)
        must(store.write_many(records))
        client = server.client()
        keys = [one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]]

        def read() -> None:
            into = zip(records, buffers, strict=True)
            must(pool.map(lambda one: read_one(store, *one), into))

        def raw_read() -> None:
            pool.map(lambda key: client.get_object(Bucket=bucket, Key=key)["Body"].read(), keys)

        try:
            yield {"s3 read": read, "s3 raw read": raw_read}
        finally:
            pool.close()
            store.close()


def read_one(store: S3Store, record: Write, buffer: memoryview) -> Status:
    """Read one record."""
    return store.read_many([record.header.id], [buffer])[0].status


def timed_after(prepare: Callable[[], object], call: Callable[[], object]) -> Callable[[], float]:
    """Return a call that prepares, and then times itself."""

    def run() -> float:
        prepare()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return run


def main() -> None:
    """Measure all tiers, and report."""
    asked = options(__doc__)
    found = measure(dram(), asked.rounds)
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder, lmdb(Path(folder)) as contenders:
        found |= measure(contenders, asked.rounds)
    with s3() as contenders:
        found |= measure(contenders, asked.rounds)
    limits = {
        "dram scatter": "dram memcpy",
        "lmdb write": "lmdb raw write",
        "lmdb read": "lmdb raw read",
        "s3 read": "s3 raw read",
    }
    report(found, asked, limits)


if __name__ == "__main__":
    main()
