"""How fast what hosts share moves records, beside the plain client of its medium.

    python benchmarks/shared.py [--dir DIR] [--rounds N] [--json FILE] [--plot FILE.png]

Records of 5,898,240 bytes, 16 a call. In every round each contender has its turn.

valkey  the Store's write_many and read_many, beside SET and GET of the library `valkey`, one
        after the other, on a server of its own
files   the Store's write_many and read_many, beside files written, synced and renamed, and read,
        by 16 threads where the Store has 16; in the page cache
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import valkey
from plot import draw, option

from kvtier.seams import IoPool
from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.valkey import ValkeyStore
from kvtier.testing.records import aligned, make_record
from kvtier.testing.valkey_server import ValkeyServer
from kvtier.tiers.store import Status, Store, Write

RECORD = 5_898_240
COUNT = 16
PAIRS = ("valkey write", "valkey read", "files write", "files read")

Contenders = dict[str, Callable[[], object]]


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


def must(statuses: Sequence[Status]) -> None:
    """Stop the benchmark when a record was not moved."""
    if set(statuses) != {Status.OK}:
        raise SystemExit(f"a record was not moved: {statuses}")


def measure(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Return GB/s of each contender for each round, the rounds interleaved; one is for warming."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            begin = time.perf_counter()
            own = call()
            seconds = own if isinstance(own, float) else time.perf_counter() - begin
            if turn:
                found[name].append(COUNT * RECORD / seconds / 1e9)
    return found


def main() -> None:
    """Measure both, print a line a contender, and the ratio of each pair."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--json", type=Path)
    option(arguments)
    options = arguments.parse_args()
    records = [make_record(number, RECORD) for number in range(COUNT)]
    with on_valkey(records) as contenders:
        found = measure(contenders, options.rounds)
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as folder,
        on_files(Path(folder), records) as contenders,
    ):
        found |= measure(contenders, options.rounds)
    for name, rates in found.items():
        median = statistics.median(rates)
        print(f"{name:17} {median:6.2f} GB/s   ({min(rates):.2f} to {max(rates):.2f})")
    ratios = {}
    for name in PAIRS:
        limit = " raw ".join(name.split())
        each = sorted(a / b for a, b in zip(found[name], found[limit], strict=True))
        ratios[name] = {"median": statistics.median(each), "low": each[0], "high": each[-1]}
        print(
            f"{name} over {limit}: {ratios[name]['median']:.2f} ({each[0]:.2f} to {each[-1]:.2f})"
        )
    if options.json:
        options.json.write_text(json.dumps({"gb_per_s": found, "ratios": ratios}, indent=1) + "\n")
    panels = {"GB/s": "got.*", "of the client library, or plain files": "of.*@1"}
    draw({"got": found, "of": ratios}, options.plot, panels)


if __name__ == "__main__":
    main()
