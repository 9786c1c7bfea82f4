"""What `benchmarks/nvme.py` measures beside each other: the store, its peers, its floor, and fio.

All but fio keep the same records, checksums included: xxh3_128 of each payload before it is written
and after it was read. They sync what was written every 256 MiB and at the end of a pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import lmdb
import numpy as np

from kvtier.identity.record import Header, PartName, checksum
from kvtier.memory.arena import Arena
from kvtier.memory.sealed import sealed_memory
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.records import NAMESPACE
from kvtier.tiers.store import Status, Write

PAGE = 4096
BATCH_BYTES = 256 << 20
PAYLOADS = 8
ROOMY = 64 << 30
"""A capacity whose segments are as large as a real tier's; only what is written takes room."""


class Missing(Exception):  # noqa: N818  (no error: the report says so and goes on)
    """A peer or a facility that this machine does not have."""


class Records:
    """Records of one size: a few payloads under many names, and a buffer for each call to read.

    All buffers are memory of an arena, as in a cache; shared: of one as a daemon has it.
    """

    def __init__(self, size: int, buffers: int, *, shared: bool = False) -> None:
        self.size = size
        slot = -(-size // PAGE) * PAGE
        total = (PAYLOADS + buffers) * slot
        self._memory = memoryview(Arena(total, fd=sealed_memory(total) if shared else None).memory)
        views = [self._memory[at * slot : at * slot + size] for at in range(PAYLOADS + buffers)]
        self.payloads, self.buffers = views[:PAYLOADS], views[PAYLOADS:]
        for at, view in enumerate(self.payloads):
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(noise(at, size), np.uint8))
        self.sums = [checksum(view) for view in self.payloads]
        self._headers: dict[int, Header] = {}

    def header(self, number: int) -> Header:
        """Return a record's header, once made the same: a cache has it before it calls a store."""
        found = self._headers.get(number)
        if found is None:
            total = self.sums[number % PAYLOADS]
            found = self._headers[number] = header_of(number, self.size, total)
        return found

    def checked(self, number: int) -> memoryview:
        """Return a payload once its checksum was taken, as whoever seals a part takes it."""
        payload = self.payloads[number % PAYLOADS]
        if checksum(payload) != self.sums[number % PAYLOADS]:
            raise SystemExit("a payload changed in memory")
        return payload

    def compare(self, number: int, buffer: memoryview) -> None:
        if checksum(buffer[: self.size]) != self.sums[number % PAYLOADS]:
            raise SystemExit(f"record {number} came back as something else")


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def header_of(number: int, size: int, total: bytes = bytes(16)) -> Header:
    key = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return Header(NAMESPACE, key, None, 0, PartName(), size, size, raw_sum=total, stored_sum=total)


class Peer(Protocol):
    """Keeps records. Calls come from several threads."""

    def put(self, numbers: Sequence[int]) -> None: ...

    def get(self, numbers: Sequence[int], into: Sequence[memoryview]) -> None: ...

    def drop(self, numbers: Sequence[int]) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Slab:
    """The store. Its clock can be put forward, so that what it gathered is due."""

    def __init__(self, folder: Path, records: Records, capacity: int = ROOMY) -> None:
        self.records = records
        self.folder = folder
        self._ahead = 0.0
        self.store = LmdbSlabStore(folder, capacity, clock=lambda: time.monotonic() + self._ahead)

    def put(self, numbers: Sequence[int]) -> None:
        lot = [Write(self.records.header(n), self.records.checked(n)) for n in numbers]
        if set(self.store.write_many(lot)) != {Status.OK}:
            raise SystemExit(f"the store did not take records {numbers}")

    def get(self, numbers: Sequence[int], into: Sequence[memoryview]) -> None:
        names = [self.records.header(n).id for n in numbers]
        for number, read, buffer in zip(
            numbers, self.store.read_many(names, into), into, strict=True
        ):
            if read.status is not Status.OK:
                raise SystemExit(f"the store did not return record {number}")
            self.records.compare(number, buffer)

    def drop(self, numbers: Sequence[int]) -> None:
        self.store.delete_many([self.records.header(n).id for n in numbers])

    def settle(self) -> None:
        self._ahead += 2.0
        self.store.delete_many([])

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


class LmdbValues:
    """LMDB with the payloads as its values, without writemap."""

    def __init__(self, folder: Path, records: Records, size: int) -> None:
        self.records = records
        self.folder = folder
        folder.mkdir()
        self._env = lmdb.Environment(str(folder), map_size=size, sync=False, readahead=False)
        self._unsynced = 0

    def put(self, numbers: Sequence[int]) -> None:
        with self._env.begin(write=True) as txn:
            for number in numbers:
                txn.put(self._name(number), self.records.checked(number))
        self._unsynced += len(numbers) * self.records.size
        if self._unsynced >= BATCH_BYTES:
            self.settle()

    def get(self, numbers: Sequence[int], into: Sequence[memoryview]) -> None:
        with self._env.begin(buffers=True) as txn:
            for number, buffer in zip(numbers, into, strict=True):
                found = txn.get(self._name(number))
                np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(found, np.uint8))
                self.records.compare(number, buffer)

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with self._env.begin(write=True) as txn:
                txn.delete(self._name(number))

    def settle(self) -> None:
        self._unsynced = 0
        self._env.sync(True)  # noqa: FBT003  (the C function has no keywords)

    def close(self) -> None:
        self._env.close()
        shutil.rmtree(self.folder)

    @staticmethod
    def _name(number: int) -> bytes:
        return number.to_bytes(8, "big")


class Bare:
    """The floor: the same system calls on one preallocated file, the checksums, and nothing else.

    No header, no index, nothing that a crash would leave in order.
    """

    def __init__(self, path: Path, records: Records, count: int) -> None:
        self.records = records
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._descriptor, 0, count * records.size)
        self._free = list(range(count - 1, -1, -1))
        self._places: dict[int, int] = {}

    def put(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            at = self._places[number] = self._free.pop()
            os.pwritev(self._descriptor, [self.records.checked(number)], at * self.records.size)

    def get(self, numbers: Sequence[int], into: Sequence[memoryview]) -> None:
        for number, buffer in zip(numbers, into, strict=True):
            os.preadv(self._descriptor, [buffer], self._places[number] * self.records.size)
            self.records.compare(number, buffer)

    def drop(self, numbers: Sequence[int]) -> None:
        self._free += [self._places.pop(number) for number in reversed(numbers)]

    def settle(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()


class FilePerChunk:
    """A file for each record, written by O_DIRECT under another name and renamed."""

    def __init__(self, folder: Path, records: Records) -> None:
        self.records = records
        self.folder = folder
        folder.mkdir()
        self._unsynced: list[int] = []

    def put(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            draft = self.folder / f"{number}.tmp"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            os.pwrite(descriptor, self.records.checked(number), 0)
            self._unsynced.append(descriptor)
            draft.rename(self.folder / str(number))
        if len(self._unsynced) * self.records.size >= BATCH_BYTES:
            self.settle()

    def get(self, numbers: Sequence[int], into: Sequence[memoryview]) -> None:
        for number, buffer in zip(numbers, into, strict=True):
            descriptor = os.open(self.folder / str(number), os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [buffer], 0)
            os.close(descriptor)
            self.records.compare(number, buffer)

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            (self.folder / str(number)).unlink()

    def settle(self) -> None:
        written, self._unsynced = self._unsynced, []
        for descriptor in written:
            os.fdatasync(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        shutil.rmtree(self.folder)


class Fio:
    """fio on one preallocated file: direct, one psync job a thread, synced at the end."""

    def __init__(self, path: Path, total: int, threads: int) -> None:
        if shutil.which("fio") is None:
            raise Missing("fio is not installed; on Debian: apt-get install fio")
        self._path = path
        self._total = total
        self._threads = threads
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.posix_fallocate(descriptor, 0, total)
        os.close(descriptor)

    def run(self, verb: str, size: int) -> float:
        """Write or read the whole file in pieces of `size`; return bytes a second."""
        share = self._total // self._threads
        command = [
            *("fio", "--name=job", "--thread", f"--numjobs={self._threads}"),
            *(f"--filename={self._path}", f"--size={share}", f"--offset_increment={share}"),
            *("--direct=1", "--ioengine=psync", f"--bs={size}", f"--rw={verb}"),
            *("--invalidate=0", "--allow_file_create=0", "--fallocate=none", "--end_fsync=1"),
            *("--group_reporting", "--output-format=json"),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: float = json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"]
        return found

    def close(self) -> None:
        self._path.unlink()


@dataclass
class Pass:
    """One pass over records: bytes a second, CPU seconds, and how long each call took."""

    bytes_per_s: float
    cpu_s_per_gb: float
    calls_s: list[float] = field(default_factory=list)


class Driver:
    """Threads that go through records together, `batch` of them a call."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def write(self, peer: Peer, numbers: Sequence[int], batch: int, size: int) -> Pass:
        """Write records, and sync them."""
        return self._timed(lambda lot, _: peer.put(lot), peer.settle, numbers, batch, size)

    def read(self, peer: Peer, records: Records, numbers: Sequence[int], batch: int) -> Pass:
        """Read records into buffers, `batch` of them for each thread."""

        def get(lot: Sequence[int], thread: int) -> None:
            peer.get(lot, records.buffers[thread * batch : thread * batch + len(lot)])

        return self._timed(get, lambda: None, numbers, batch, records.size)

    def mixed(
        self,
        peer: Peer,
        records: Records,
        replaced: Sequence[tuple[int, int]],
        read: Sequence[int],
        calls: tuple[int, int],
    ) -> Pass:
        """Replace records, each by a new one, and read as many others. calls: records of each."""
        writes, reads = calls

        def both(lot: Sequence[int], thread: int) -> None:
            peer.drop([replaced[at][0] for at in lot])
            peer.put([replaced[at][1] for at in lot])
            for start in range(0, len(lot), reads):
                wanted = [read[at] for at in lot[start : start + reads]]
                peer.get(wanted, records.buffers[thread * reads : thread * reads + len(wanted)])

        return self._timed(both, peer.settle, range(len(replaced)), writes, 2 * records.size)

    def _timed(
        self,
        call: Callable[[Sequence[int], int], None],
        end: Callable[[], None],
        numbers: Sequence[int],
        batch: int,
        size: int,
    ) -> Pass:
        calls: list[float] = []

        def work(thread: int) -> None:
            for start in range(thread * batch, len(numbers), self._threads * batch):
                begin = time.perf_counter()
                call(numbers[start : start + batch], thread)
                calls.append(time.perf_counter() - begin)

        begin, used = time.perf_counter(), time.process_time()
        list(self._pool.map(work, range(self._threads)))
        end()
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        total = len(numbers) * size
        return Pass(total / seconds, used / total * 1e9, calls)

    def close(self) -> None:
        self._pool.shutdown()


@contextlib.contextmanager
def opened(*peers: Peer | Fio | Driver) -> Iterator[None]:
    """Close them all afterwards, and remove what they wrote."""
    with contextlib.ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.close)
        yield
