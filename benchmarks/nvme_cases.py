"""The longer cases of `benchmarks/nvme.py`: churn, swapped geometries, growth, and small memory."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nvme_peers import PAGE, Bare, Driver, LmdbValues, Missing, Pass, Peer, Records, Slab, header_of

import kvtier
from kvtier.identity.record import CODEC_RAW, Header, PartName, record_id
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import Segment, index_bytes_for, stride_of
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.testing.records import aligned
from kvtier.tiers.store import Status, Write

MIB = 1 << 20
GIB = 1 << 30

# ------------------------------------------------------------------------- larger than the memory


AS_A_CACHE = (8, 8)
"""Records of 2 MiB in a write and in a read: a tier gets writes of 64 MiB, shared by four threads,
and of a fetch as long as a round's reads, 128 MiB, calls of 16 MiB (`kvtier/catalog/spill.py`,
`fetch.py`)."""
SHORT_FETCHES = (8, 2)
"""The same where nobody fetches more than 32 MiB at once: calls of 4 MiB."""


def larger_than_cache(folder: Path, nbytes: int, rounds: int, threads: int) -> dict[str, Any]:
    """Half reads, half replacements of 2 MiB, on a tier four times the memory: the group's.

    cpu_s_per_gb_floor: of the system calls and the checksums alone. short_fetches: of the store,
    where reads are of 4 MiB. one_a_call: where each record comes by itself.
    """
    size, per_round = 2 * MIB, 128
    count = nbytes // size
    records = Records(size, threads * max(AS_A_CACHE))
    driver = Driver(threads)
    slab = Slab(folder / "slab", records, nbytes + nbytes // 8)
    peers: dict[str, Peer] = {
        "slab": slab,
        "floor": Bare(folder / "bare", records, count),
        "lmdb_values": LmdbValues(folder / "lmdb", records, nbytes + nbytes // 4),
    }
    for peer in peers.values():
        driver.write(peer, range(count), 1, size)
    turns = [(name, name, peer, AS_A_CACHE) for name, peer in peers.items()]
    turns.insert(1, ("short_fetches", "slab", slab, SHORT_FETCHES))
    turns.insert(2, ("one_a_call", "slab", slab, (1, 1)))
    found: dict[str, list[float]] = {name: [] for name, *_ in turns}
    used: dict[str, list[float]] = {name: [] for name, *_ in turns}
    alive = {name: list(range(count)) for name in peers}
    choose = random.Random(1)
    fresh = count
    for _ in range(rounds):
        choose.shuffle(turns)  # whoever follows LMDB's values finds none of its pages in memory
        for name, whose, peer, calls in turns:
            here = alive[whose]
            chosen = choose.sample(range(count), per_round)
            places = chosen[: per_round // 2]
            reads = [here[place] for place in chosen[per_round // 2 :]]
            victims = [here[place] for place in places]
            new = list(range(fresh, fresh + len(places)))
            fresh += len(places)
            for place, number in zip(places, new, strict=True):
                here[place] = number
                records.header(number)
            pairs = list(zip(victims, new, strict=True))
            mixed = driver.mixed(peer, records, pairs, reads, calls)
            found[name].append(mixed.bytes_per_s / 1e9)
            used[name].append(mixed.cpu_s_per_gb)
    for peer in peers.values():
        peer.close()
    driver.close()
    ratios = sorted(a / b for a, b in zip(found["slab"], found["lmdb_values"], strict=True))
    cpu = {name: statistics.median(each) for name, each in used.items()}
    return {
        "ratio_lmdb_values": statistics.median(ratios),
        "ratio_spread": [ratios[0], ratios[-1]],
        "cpu_s_per_gb": cpu["slab"],
        "cpu_s_per_gb_spread": [min(used["slab"]), max(used["slab"])],
        "cpu_s_per_gb_floor": cpu["floor"],
        "cpu_s_per_gb_short_fetches": cpu["short_fetches"],
        "cpu_s_per_gb_one_a_call": cpu["one_a_call"],
        "lmdb_values_cpu_s_per_gb": cpu["lmdb_values"],
        "gb_per_s": {name: statistics.median(each) for name, each in found.items()},
    }


@contextlib.contextmanager
def memory_group(nbytes: int) -> Iterator[Path]:
    """Make a memory cgroup of `nbytes`; yield the file that takes the pids that shall be in it.

    Raises Missing where this process may not.
    """
    parent, limit = _memory_hierarchy()
    group = parent / f"kvtier-nvme-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise Missing(f"no memory cgroup can be made: {error}") from error
    try:
        yield group / "cgroup.procs"
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def _memory_hierarchy() -> tuple[Path, str]:
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / "memory" / path.strip("/"), "memory.limit_in_bytes"
        if not controllers and (root / "cgroup.controllers").exists():
            return root / path.strip("/"), "memory.max"
    raise Missing("there is no memory cgroup")


# ------------------------------------------------------------------------------------------ churn


class Churned:
    """A store filled to a share of what it holds, whose records are replaced by new ones.

    Each is replaced by one of its size, at random places: 128 KiB, 512 KiB and 2 MiB, a third of
    the bytes each.
    """

    SIZES = (128 << 10, 512 << 10, 2 << 20)

    def __init__(self, folder: Path, capacity: int, share: float) -> None:
        self._kinds = [Records(size, 0) for size in self.SIZES]
        self._ahead = 0.0
        self.store = LmdbSlabStore(folder, capacity, clock=lambda: time.monotonic() + self._ahead)
        self._choose = random.Random(7)
        self._next = 0
        self.failed = 0
        self.there: list[tuple[int, int]] = []  # kind, number
        self._fill()
        full = len(self.there)
        self._choose.shuffle(self.there)
        for victim in self.there[int(full * share) :]:
            self._drop(victim)
        del self.there[int(full * share) :]
        self._at = 0

    def _fill(self) -> None:
        left = [16, 4, 1]
        while any(left):
            for kind, count in enumerate(left):
                for _ in range(count):
                    if not self._put(kind):
                        left[kind] = 0
                        break

    def _put(self, kind: int) -> bool:
        records = self._kinds[kind]
        self._next += 1
        record = Write(records.header(self._next), records.checked(self._next))
        taken = self.store.write_many([record]) == [Status.OK]
        if taken:
            self.there.append((kind, self._next))
        return taken

    def _drop(self, victim: tuple[int, int]) -> None:
        kind, number = victim
        self.store.delete_many([self._kinds[kind].header(number).id])

    def turn(self, nbytes: int) -> Pass:
        """Replace records until `nbytes` are written."""
        done = 0
        begin, used = time.perf_counter(), time.process_time()
        while done < nbytes:
            at = self._at % len(self.there)
            kind, _ = victim = self.there[at]
            self._drop(victim)
            if self._put(kind):
                self.there[at] = self.there.pop()
                done += self.SIZES[kind]
            else:
                self.failed += 1
                del self.there[at]
            self._at += 1
        self._ahead += 2.0
        self.store.delete_many([])
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        return Pass(done / seconds, used / done * 1e9)


def churn(folder: Path, capacity: int, share: float, rounds: int) -> dict[str, Any]:
    """Compare the fourth turnover of one store with the first of another, turn by turn."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        aged = Churned(Path(place) / "aged", capacity, share)
        young = Churned(Path(place) / "young", capacity, share)
        for _ in range(3):
            aged.turn(capacity)
        step = capacity // rounds
        pairs = []
        for at in range(rounds):
            first, second = (aged, young) if at % 2 else (young, aged)
            rates = {first: first.turn(step)}
            rates[second] = second.turn(step)
            pairs.append((rates[aged], rates[young]))
        aged.store.close()
        young.store.close()
    ratios = sorted(old.bytes_per_s / new.bytes_per_s for old, new in pairs)
    return {
        "last_over_first": statistics.median(ratios),
        "spread": [ratios[0], ratios[-1]],
        "cpu_last_over_first": statistics.median(
            old.cpu_s_per_gb / new.cpu_s_per_gb for old, new in pairs
        ),
        "cpu_s_per_gb": statistics.median(old.cpu_s_per_gb for old, _ in pairs),
        "gb_per_s": statistics.median(old.bytes_per_s for old, _ in pairs) / 1e9,
        "failed_inserts": aged.failed + young.failed,
    }


# -------------------------------------------------------------------------- geometries that change


def waste(folder: Path, capacity: int) -> dict[str, Any]:
    """Turn a store over three times: one geometry, another, both and what a codec leaves of one.

    As a Tier does, the oldest record goes when a new one finds no room. Waste is what of the
    capacity holds no payload when the store is full; starved is how many records never got in.
    """
    large, small = 2_359_296, 917_504
    choose = random.Random(3)
    phases = [
        lambda _: (large, large),
        lambda _: (small, small),
        lambda at: [(large, large), (small, small), (large, encoded(large))][at % 3],
    ]

    def encoded(raw: int) -> int:
        return int(raw * choose.uniform(0.62, 0.75))

    store = LmdbSlabStore(folder, capacity, durability="none")
    data = aligned(large)
    there: deque[tuple[bytes, int]] = deque()
    number, starved, after = 0, 0, []
    for phase in phases:
        written = 0
        while written < capacity:
            number += 1
            raw, stored = phase(number)
            header = _coded(number, raw, stored)
            while (status := store.write_many([Write(header, data)])[0]) is Status.FULL and there:
                store.delete_many([there.popleft()[0]])
            starved += status is not Status.OK
            if status is Status.OK:
                there.append((header.id, stored))
            written += stored
        after.append(1 - sum(stored for _, stored in there) / capacity)
    store.close()
    return {"waste": max(after), "after_each_turnover": after, "starved": starved}


def _coded(number: int, raw: int, stored: int) -> Header:
    plain = header_of(number, stored)
    codec = CODEC_RAW if stored == raw else 1
    sums = {"raw_sum": bytes(16), "stored_sum": bytes(16)}
    return Header(plain.namespace, plain.key, None, 0, plain.part, raw, stored, codec=codec, **sums)


# ----------------------------------------------------------------------------------------- growth

GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=1, heads=1, head_size=4),), block_tokens=(16,), chunk_tokens=256
)
CHAIN = 1000


def grown(folder: Path, count: int) -> dict[str, float]:
    """Return seconds to open a cache on so many records, and what the store's verbs take then.

    The records are put into the index as a writer would; their segments are sparse files, which
    no opening reads.
    """
    namespace = kvtier.Namespace("grown", GEOMETRY)
    capacity = 4 * count * stride_of(PAGE) + GIB
    _populate(folder, namespace.digest, count, capacity)
    url = f"lmdb:{folder}?capacity={capacity // MIB}MiB"
    begin, used = time.perf_counter(), time.process_time()
    cache = kvtier.open("dram:16MiB", url, namespace=namespace)
    opened, used = time.perf_counter() - begin, time.process_time() - used
    cache.close()
    begin = time.perf_counter()
    store = LmdbSlabStore(folder, capacity)
    store_alone = time.perf_counter() - begin
    choose = random.Random(9)
    lookups, writes = [], []
    for turn in range(25):
        numbers = [choose.randrange(count) for _ in range(256)]
        names = [_name(number) for number in numbers]
        begin = time.perf_counter()
        there = store.contains_many(names)
        lookups.append((time.perf_counter() - begin) / len(names) * 1e6)
        if set(there) != {Status.OK}:
            raise SystemExit("a record was not found again")
        lot = _lot(count + 1000 * turn)
        begin = time.perf_counter()
        if set(store.write_many(lot)) != {Status.OK}:
            raise SystemExit("a record was not written")
        writes.append((time.perf_counter() - begin) / len(lot) * 1e6)
    store.close()
    return {
        "open_cache_s": opened,
        "open_cache_cpu_s": used,
        "open_store_s": store_alone,
        "lookup_us": statistics.median(lookups),
        "write_us": statistics.median(writes),
    }


def _lot(first: int) -> Sequence[Write]:
    data = aligned(PAGE)
    return [Write(header_of(number, PAGE), data) for number in range(first, first + 64)]


def _name(number: int) -> bytes:
    return record_id(header_of(number, PAGE).key, PartName())


def _populate(folder: Path, namespace: bytes, count: int, capacity: int) -> None:
    LmdbSlabStore(folder, capacity).close()
    stride = stride_of(PAGE)
    per_segment = min(256 * MIB, capacity // 128) // stride
    index = Index(folder / "index.lmdb", index_bytes_for(count + per_segment), synced=False)
    entries: dict[bytes, Entry] = {}
    sums = {"raw_sum": bytes(16), "stored_sum": bytes(16)}
    parent = None
    for number in range(count):
        key = header_of(number, PAGE).key
        depth = number % CHAIN
        above = parent if depth else None
        header = Header(namespace, key, above, depth, PartName(), PAGE, PAGE, **sums)
        segment, slot = divmod(number, per_segment)
        parent = header.id
        entries[parent] = Entry(segment + 1, slot, 10**15 + number, header.pack())
        if len(entries) == 50_000 or number == count - 1:
            index.commit(dict(sorted(entries.items())))
            entries.clear()
    index.close()
    for number in range(-(-count // per_segment)):
        segment_of = Segment(number + 1, stride, per_segment)
        path = folder / segment_of.name
        path.touch(0o600)
        os.truncate(path, segment_of.length)
