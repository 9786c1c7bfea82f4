"""How fast what hosts share moves records, beside the plain client of its medium.

    python benchmarks/shared.py [--dir DIR] [--rounds N] [--json FILE] [--plot FILE.png]

Records of 5,898,240 bytes, 16 a call. In every round each contender has its turn.

valkey  the Store's write_many and read_many, beside SET and GET of the library `valkey`, one
        after the other, on a server of its own
files   the Store's write_many and read_many, beside files written, synced and renamed, and read,
        by 16 threads where the Store has 16; in the page cache
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import valkey
from rounds import COUNT, RECORD, Contenders, measure, must, options, report

from kvtier.seams import IoPool
from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.valkey import ValkeyStore
from kvtier.testing.records import aligned, make_record
from kvtier.testing.valkey_server import ValkeyServer
from kvtier.tiers.store import Store, Write

PAIRS = ("valkey write", "valkey read", "files write", "files read")


def verbs(name: str, store: Store, records: Sequence[Write]) -> Contenders:
    """Return the verbs of a store; what was written is deleted before it is written again."""
    names = [record.header.id for record in records]
    buffers = [aligned(RECORD) for _ in records]

    def write() -> float:
        store.delete_many(names)
        begin = time.perf_counter()
        must(store.write_many(records))
        return time.perf_counter() - begin

    def read() -> None:
        must([one.status for one in store.read_many(names, buffers)])

    return {f"{name} write": write, f"{name} read": read}


@contextlib.contextmanager
def on_valkey(records: Sequence[Write]) -> Iterator[Contenders]:
    """Yield the Valkey store's verbs and the library's."""
    with ValkeyServer(maxmemory="1gb", maxmemory_policy="noeviction") as server:
        store = ValkeyStore.open(server.location, None, {})
        client = valkey.Valkey(port=server.port)

        def raw_write() -> None:
            for number, record in enumerate(records):
                client.set(f"raw{number}", record.data)

        def raw_read() -> None:
            for number in range(COUNT):
                client.get(f"raw{number}")

        try:
            raw = {"valkey raw write": raw_write, "valkey raw read": raw_read}
            yield {**verbs("valkey", store, records), **raw}
        finally:
            store.close()
            client.close()


@contextlib.contextmanager
def on_files(folder: Path, records: Sequence[Write]) -> Iterator[Contenders]:
    """Yield the files store's verbs and the plain calls."""
    store = FilesStore.open(str(folder / "kv"), None, {})
    buffers = [aligned(RECORD) for _ in records]
    pool = IoPool("bench", COUNT)
    (folder / "raw").mkdir()

    def raw_write() -> None:
        for number, record in enumerate(records):
            draft = os.open(folder / "raw" / "draft", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.write(draft, record.data)
            os.fsync(draft)
            os.close(draft)
            (folder / "raw" / "draft").rename(folder / "raw" / str(number))

    def raw_read_one(number: int) -> None:
        with (folder / "raw" / str(number)).open("rb", buffering=0) as file:
            file.readinto(buffers[number])

    try:
        raw = {
            "files raw write": raw_write,
            "files raw read": lambda: pool.map(raw_read_one, range(COUNT)),
        }
        yield {**verbs("files", store, records), **raw}
    finally:
        pool.close()
        store.close()


def main() -> None:
    """Measure both, and report."""
    asked = options(__doc__)
    records = [make_record(number, RECORD) for number in range(COUNT)]
    with on_valkey(records) as contenders:
        found = measure(contenders, asked.rounds, warming=1)
    with (
        tempfile.TemporaryDirectory(dir=asked.dir) as folder,
        on_files(Path(folder), records) as contenders,
    ):
        found |= measure(contenders, asked.rounds, warming=1)
    report(found, asked, {name: " raw ".join(name.split()) for name in PAIRS})


if __name__ == "__main__":
    main()
