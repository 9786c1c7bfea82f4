"""How fast and how small the Catalog is, and how both grow with the parts that it indexes.

    python benchmarks/catalog.py [--json FILE] [--plot FILE.png]

match     512 chunks with their names given, beside 512 bare dict look-ups among as many entries;
          each turn has names of its own, made anew, so that neither has their hashes or warms
          the other's cache. touch is the marking as used that a match puts off
lease     lease and release of 512 parts in DRAM
evict     reserve of one chunk in a full DRAM, which takes out one part: the mean while one part in
          a hundred is replaced, what the first has to do included. In the ordinary order, with a
          thousand chains whose parents are all older than their children, with the oldest quarter
          of the parts leased, and with half of them outside of every window
memory    Python's bytes for a part, with DRAM and two slower tiers: by tracemalloc, and beside it
          by the resident memory of a fresh process, which has the holes that growing arrays leave
          in malloc's heap; once for parts in a slower tier, once in DRAM

Times are of the CPU, so that what else the machine does counts by the caches that it empties
alone. The arena's memory is mapped and never touched, so that a million slots cost nothing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from plot import kept, option

from kvtier.catalog.catalog import Catalog, Part, Shelf
from kvtier.catalog.lease import Lease
from kvtier.clock import monotonic
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import PartName, record_id
from kvtier.identity.shape import chunk_shape
from kvtier.memory.arena import Arena
from kvtier.memory.sealed import PAGE_BYTES
from kvtier.metrics import Metrics
from kvtier.policies.lru import Lru

SIZES = (10_000, 100_000, 1_000_000)
CHAIN = 1_000
CHUNKS = 512
ROUNDS = 101
REPLACED = 100
LOWER = 1
SHAPE = chunk_shape(Geometry((Component(layers=1, heads=1, head_size=8),), chunk_tokens=256))
LIMITS = "limits: match 3 times the dict, 300 bytes, lease and release 1 ms, evict not linear"


class UntouchedArena(Arena):
    """An arena whose memory is not faulted in: only its slots are of interest here."""

    def _take(self) -> bool:
        return True


class Bench:
    """A catalog with DRAM and two slower tiers."""

    def __init__(self, slots: int) -> None:
        self.arena = UntouchedArena(slots * PAGE_BYTES, [PAGE_BYTES])
        shelves = [Shelf(name, Lru.together(), None) for name in ("dram", "lmdb", "s3")]
        self.catalog = Catalog(self.arena, shelves, monotonic, Metrics())

    def save(self, parts: list[Part]) -> None:
        """Save parts as an engine would."""
        taken, refused = self.catalog.reserve([[part] for part in parts])
        for part, slot in taken:
            self.catalog.commit(part.name, slot, part.name[:16])  # in place of a checksum
        if refused or len(taken) < len(parts):
            raise SystemExit("the parts do not fit DRAM")

    def match(self, names: list[list[bytes]]) -> int:
        """Return how many chunks are there."""
        limit = len(names) * SHAPE.chunk_tokens
        return self.catalog.match(names, SHAPE, limit).chunks

    def lease(self, names: list[list[bytes]]) -> Lease:
        """Lease chunks that must be there."""
        tokens = len(names) * SHAPE.chunk_tokens
        lease = self.catalog.lease(names, SHAPE, 0, tokens, 3600, whole=True)
        if lease is None:
            raise SystemExit("the chunks are not in DRAM")
        return lease


def key(chain: int, depth: int) -> bytes:
    """Return the name of a part, as random as a real one."""
    return record_id(hashlib.sha256(b"%d %d" % (chain, depth)).digest(), PartName())


def part(chain: int, depth: int) -> Part:
    """Return one part of a chain."""
    above = key(chain, depth - 1) if depth else None
    return Part(key(chain, depth), above, depth, PAGE_BYTES)


def chains(count: int) -> Iterator[list[Part]]:
    """Yield `count` parts as whole chains."""
    for chain in range(count // CHAIN):
        yield [part(chain, depth) for depth in range(CHAIN)]


def asked(chain: int) -> list[list[bytes]]:
    """Return the names of a prompt's first chunks; their hashes are not known yet."""
    return [[key(chain, depth)] for depth in range(CHUNKS)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the CPU that a call takes, and what it returns."""
    begin = time.thread_time()
    result = call()
    return time.thread_time() - begin, result


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Summarise: median, least, most."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: value * scale for name, value in found.items()}


def look_up(size: int) -> dict[str, dict[str, float]]:
    """Measure match beside the dict, and lease with release, all in turn."""
    bench = Bench(size)
    bare: dict[bytes, int] = {}
    for parts in chains(size):
        bench.save(parts)
        bare |= {bytes(memoryview(one.name)): len(bare) + at for at, one in enumerate(parts)}
    get = bare.get
    seconds: dict[str, list[float]] = {
        name: [] for name in ("match", "dict", "ratio", "touch", "lease")
    }
    for turn in range(ROUNDS):
        names = asked(7 * turn % (size // CHAIN))
        match, found = timed(lambda names=names: bench.match(names))
        flat = [name for (name,) in asked((7 * turn + 3) % (size // CHAIN))]
        plain, rows = timed(lambda flat=flat: [get(name) for name in flat])
        if found < CHUNKS or None in rows:
            raise SystemExit("the chunks are not indexed")
        touch, _ = timed(bench.catalog.expire)
        lease, _ = timed(lambda names=names: bench.lease(names).release())
        for name, value in zip(seconds, (match, plain, match / plain, touch, lease), strict=True):
            seconds[name].append(value)
    bench.arena.close()
    return {
        "match_us": spread(seconds["match"], 1e6),
        "dict_us": spread(seconds["dict"], 1e6),
        "match_over_dict": spread(seconds["ratio"]),
        "touch_us": spread(seconds["touch"], 1e6),
        "lease_release_512_ms": spread(seconds["lease"], 1e3),
    }


def ordinary(bench: Bench, size: int) -> None:
    """Fill DRAM prompt by prompt, each used once more since."""
    for parts in chains(size):
        bench.save(parts)
        bench.match([[one.name] for one in parts])


def parents_older(bench: Bench, size: int) -> None:
    """Fill DRAM with a thousand chains, all parts of one depth before those of the next."""
    for depth in range(size // CHAIN):
        bench.save([part(chain, depth) for chain in range(CHAIN)])


def quarter_leased(bench: Bench, size: int) -> None:
    """Fill DRAM prompt by prompt, and lease the oldest quarter."""
    for parts in chains(size):
        bench.save(parts)
    for parts in chains(size // 4):
        bench.lease([[one.name] for one in parts])


def half_outgrown(bench: Bench, size: int) -> None:
    """Fill DRAM prompt by prompt, and say of half that it lies outside of every window now."""
    for parts in chains(size):
        bench.save(parts)
    for parts in chains(size // 2):
        bench.catalog.outgrown([one.name for one in parts])


ORDERS = {
    "ordinary": ordinary,
    "parents_older": parents_older,
    "quarter_leased": quarter_leased,
    "half_outgrown": half_outgrown,
}


def evict(size: int, order: str) -> dict[str, float]:
    """Return microseconds for one part to leave a full DRAM, while one in a hundred does."""
    bench = Bench(size)
    ORDERS[order](bench, size)
    each = []
    for number in range(size // REPLACED):
        fresh = part(size + number, 0)
        seconds, (taken, _) = timed(lambda fresh=fresh: bench.catalog.reserve([[fresh]]))
        bench.catalog.commit(fresh.name, taken[0][1], fresh.name[:16])
        each.append(seconds * 1e6)
    bench.arena.close()
    return {"mean": statistics.fmean(each), "median": statistics.median(each), "max": max(each)}


def resident() -> int:
    """Return the bytes of private memory that are resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def traced() -> int:
    """Return the bytes that Python's allocator has handed out."""
    return tracemalloc.get_traced_memory()[0]


def memory(size: int, where: str, meter: str) -> tuple[float, float]:
    """Return bytes for a part, and the seconds that indexing all took."""
    bench = Bench(size if where == "dram" else 1)
    if meter == "traced":
        tracemalloc.start()
    gc.collect()
    before, begin = (resident, traced)[meter == "traced"](), time.thread_time()
    for parts in chains(size):
        if where == "dram":
            bench.save(parts)
        else:
            for one in parts:
                bench.catalog.stored(one, LOWER, one.nbytes)
    parts = []
    seconds = time.thread_time() - begin
    gc.collect()
    return ((resident, traced)[meter == "traced"]() - before) / size, seconds


def apart(call: Callable[..., Any], *given: object) -> Any:
    """Call in a fresh process, so that memory that was freed before does not count."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, given)


def measure(size: int) -> dict[str, Any]:
    """Measure all with so many parts."""
    found: dict[str, Any] = apart(look_up, size)
    found["evict_us"] = {order: apart(evict, size, order) for order in ORDERS}
    found["bytes_per_part"] = {}
    for where in ("slower_tier", "dram"):
        own = {meter: apart(memory, size, where, meter) for meter in ("traced", "resident")}
        found["bytes_per_part"][where] = {meter: value for meter, (value, _) in own.items()}
        found[f"index_{where}_s"] = own["resident"][1]
    return found


def show(size: int, found: dict[str, Any]) -> None:
    """Print the figures of one size."""
    print(f"{size:,} parts")
    for name in ("match_us", "dict_us", "match_over_dict", "touch_us", "lease_release_512_ms"):
        row = found[name]
        print(f"  {name:24} {row['median']:9.2f}   ({row['min']:.2f} to {row['max']:.2f})")
    for order, row in found["evict_us"].items():
        print(f"  evict_us {order:15} {row['mean']:9.2f}   (at most {row['max']:.0f})")
    for where, row in found["bytes_per_part"].items():
        print(
            f"  bytes_per_part {where:11} {row['traced']:7.0f}   resident {row['resident']:.0f};"
            f" indexed in {found[f'index_{where}_s']:.1f} s"
        )


def main() -> None:
    """Measure each size, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    option(arguments)
    options = arguments.parse_args()
    growth = {}
    for size in options.sizes:
        growth[size] = measure(size)
        show(size, growth[size])
    print(LIMITS)
    largest = growth[max(growth)]
    report = {
        "match_over_dict": largest["match_over_dict"]["median"],
        "bytes_per_part": max(row["traced"] for row in largest["bytes_per_part"].values()),
        "lease_release_512_ms": largest["lease_release_512_ms"]["median"],
        "evict_us": {order: row["mean"] for order, row in largest["evict_us"].items()},
        "growth": growth,
    }
    panels = {
        "of a prompt, us": "growth.*.{match_us,dict_us,touch_us}",
        "lease and release of 512 chunks, ms": "growth.*.lease_release_512_ms",
        "evicting a part, us, in the mean": "evict_us.*",
        "bytes of a part": "growth.*.bytes_per_part.*.traced",
    }
    kept(report, options, panels)


if __name__ == "__main__":
    main()
