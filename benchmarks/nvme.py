"""How fast the NVMe tier's store is, beside fio, LMDB with payloads as values, and a file a chunk.

    python benchmarks/nvme.py [--json FILE] [--plot FILE.png] [--dir DIR] [--full] [--only CASE]

Each round gives every contender its turn, so that whatever else the machine does meets all alike;
figures are medians of nine rounds or more, ratios are of the turns of one round. Four threads. The
store takes each payload's checksum, commits its index and syncs, all in the time measured. Whole it
takes three minutes on two quiet cores. CPU seconds tell more than speed where the machine is busy:
`floor` is what the same system calls and checksums take without a store.

sizes              write and read of 128 KiB, 2 MiB and 16 MiB into space that was written before,
                   beside fio (direct, psync, the same sizes and threads, synced at its end); the
                   store is called with up to 2 MiB of records at a time, between two runs of fio,
                   and compared with their mean. The second beside the first is the control: how
                   far two runs of one thing differ here
fresh              2 MiB into space that is only preallocated, beside fio in such a file
huge_pages         2 MiB from the arena of a cache, beside one that a daemon shares
larger_than_cache  half reads, half replacements of 2 MiB on a tier four times as large as the
                   memory group that holds the process, page cache included, beside LMDB's values
                   and the floor; so many records a call as a cache sends
churn90, churn97   a store filled so far, all its records replaced: the fourth turnover beside the
                   first of another store
waste              one geometry, then another, then both and what a codec leaves
growth             opening, look-up and write with 10,000 to 1,000,000 records
budget             1 GiB through a Cache by eight threads into 64 MiB, the index's reader stale
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nvme_cases import GIB, MIB, churn, grown, larger_than_cache, memory_group, waste
from nvme_peers import (
    Bare,
    Driver,
    FilePerChunk,
    Fio,
    LmdbValues,
    Missing,
    Pass,
    Peer,
    Records,
    Slab,
    opened,
)
from plot import kept, option

from kvtier.testing.overrun import overrun

THREADS = 4
ROUNDS = 9
PANELS = {
    "GB/s": "sizes.*.contenders.{fio,slab,lmdb_values,file_per_chunk}.*.gb_per_s",
    "of fio": "sizes.{128KiB,2MiB,16MiB}.{write_ratio_fio,read_ratio_fio}@1",
    "with so many records, s": "growth.*.{open_cache_s,open_store_s}",
    "with so many records, us": "growth.*.{lookup_us,write_us}",
}
VERBS = ("write", "read")
SIZES = {"128KiB": 128 << 10, "2MiB": 2 << 20, "16MiB": 16 << 20}
Report = dict[str, Any]


def fio_of(path: Path, total: int) -> Fio | None:
    """Return fio, or None where there is none; the report says so."""
    try:
        return Fio(path, total, THREADS)
    except Missing:
        return None


class Rows:
    """What contenders did, by contender and verb."""

    def __init__(self) -> None:
        self._passes: defaultdict[tuple[str, str], list[Pass]] = defaultdict(list)
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, verb: str, done: Pass) -> None:
        self._passes[name, verb].append(done)

    def ratio(self, name: str, value: float) -> None:
        self._ratios[name].append(value)

    def ratios(self) -> Report:
        found: Report = {name: statistics.median(each) for name, each in self._ratios.items()}
        found["spread"] = {name: [min(each), max(each)] for name, each in self._ratios.items()}
        return found

    def contenders(self) -> Report:
        found: Report = defaultdict(dict)
        for (name, verb), passes in self._passes.items():
            rates = sorted(one.bytes_per_s / 1e9 for one in passes)
            row = {"gb_per_s": statistics.median(rates), "spread": [rates[0], rates[-1]]}
            calls = sorted(seconds * 1e3 for one in passes for seconds in one.calls_s)
            if calls:
                row["cpu_s_per_gb"] = statistics.median(one.cpu_s_per_gb for one in passes)
                row["p50_ms"] = calls[len(calls) // 2]
                row["p99_ms"] = calls[len(calls) * 99 // 100]
            found[name][verb] = row
        return dict(found)


def beside_fio(rows: Rows, fio: Fio | None, verb: str, size: int, ours: Callable[[], Pass]) -> None:
    """Take a turn between two of fio's, of which the second is the first one's control."""
    before = fio.run(verb, size) if fio else 0.0
    done = ours()
    rows.add("slab", verb, done)
    if fio is None:
        return
    after = fio.run(verb, size)
    for rate in (before, after):
        rows.add("fio", verb, Pass(rate, 0.0))
    rows.ratio(f"{verb}_ratio_fio", 2 * done.bytes_per_s / (before + after))
    rows.ratio(f"{verb}_fio_over_fio", after / before)


def one_size(folder: Path, size: int, total: int, rounds: int, driver: Driver) -> Report:
    """Measure one size in space that was written before; the slow peers with fewer records."""
    whole, less = range(total // size), range(max(THREADS, total // size // 8))
    batch = max(1, min(16, 2 * MIB // size))
    records = Records(size, THREADS * batch)
    slab = Slab(folder / "slab", records)
    fio = fio_of(folder / "fio", total)
    peers: dict[str, tuple[Peer, range]] = {
        "slab": (slab, whole),
        "floor": (Bare(folder / "bare", records, len(whole)), whole),
        "lmdb_values": (LmdbValues(folder / "lmdb", records, total + 64 * MIB), less),
        "file_per_chunk": (FilePerChunk(folder / "files", records), less),
    }
    rows = Rows()
    with opened(*(peer for peer, _ in peers.values()), *([fio] if fio else [])):
        for peer, numbers in peers.values():
            driver.write(peer, numbers, batch, size)
        if fio:
            fio.run("write", size)
        for _ in range(rounds):
            for name, (peer, numbers) in peers.items():
                peer.drop(numbers)
                peer.settle()
                turn = partial(driver.write, peer, numbers, batch, size)
                if peer is slab:
                    beside_fio(rows, fio, "write", size, turn)
                else:
                    rows.add(name, "write", turn())
            for name, (peer, numbers) in peers.items():
                turn = partial(driver.read, peer, records, numbers, batch)
                if peer is slab:
                    beside_fio(rows, fio, "read", size, turn)
                else:
                    rows.add(name, "read", turn())
    return {**rows.ratios(), "contenders": rows.contenders()}


def fresh(folder: Path, total: int, rounds: int, driver: Driver) -> Report:
    """Measure writes into space that is only preallocated."""
    size, numbers = 2 * MIB, range(total // (2 * MIB))
    records = Records(size, THREADS)
    rows = Rows()
    for _ in range(rounds):
        slab, fio = Slab(folder / "fresh", records), fio_of(folder / "fresh.fio", total)
        with opened(slab, *([fio] if fio else [])):
            done = driver.write(slab, numbers, 1, size)
            rows.add("slab", "write", done)
            if fio:
                rows.ratio("write_ratio_fio", done.bytes_per_s / fio.run("write", size))
    return {**rows.ratios(), "contenders": rows.contenders()}


def huge_pages(folder: Path, total: int, rounds: int, driver: Driver) -> Report:
    """Compare an arena's private memory, in huge pages where the kernel has them, with a memfd."""
    size, numbers = 2 * MIB, range(total // (2 * MIB))
    kinds = {"own": Records(size, THREADS), "shared": Records(size, THREADS, shared=True)}
    slab = Slab(folder / "huge", kinds["own"])
    rows = Rows()
    with opened(slab):
        for _ in range(rounds):
            found: dict[tuple[str, str], Pass] = {}
            for name, records in kinds.items():
                slab.records = records
                slab.drop(numbers)
                slab.settle()
                found[name, "write"] = driver.write(slab, numbers, 1, size)
                found[name, "read"] = driver.read(slab, records, numbers, 1)
            for verb in VERBS:
                own, shared = found["own", verb], found["shared", verb]
                rows.ratio(f"{verb}_ratio", own.bytes_per_s / shared.bytes_per_s)
                rows.ratio(f"{verb}_cpu_ratio", own.cpu_s_per_gb / shared.cpu_s_per_gb)
    return rows.ratios()


def in_little_memory(folder: Path, nbytes: int, rounds: int) -> Report:
    """Run this script's case in a process whose memory group is a quarter of the tier."""
    command = [sys.executable, __file__, "--child", str(nbytes), "--rounds", str(rounds)]
    with memory_group(nbytes // 4) as procs:
        command += ["--dir", str(folder), "--procs", str(procs)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Report = json.loads(done.stdout)
    return {"tier_bytes": nbytes, "memory_bytes": nbytes // 4, **found}


def growth(folder: Path, counts: tuple[int, ...]) -> Report:
    """Measure each count of records in a directory of its own."""
    found = {}
    for count in counts:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            found[str(count)] = grown(Path(place) / "kv", count)
    return found


def budget(folder: Path) -> Report:
    """Write a GiB through a tier of 64 MiB, and look what its directory takes."""
    found = overrun(folder / "overrun", 64 * MIB, GIB)
    return {"capacity": 64 * MIB, **found._asdict(), "within": found.most <= 64 * MIB}


def measure(folder: Path, options: argparse.Namespace) -> Report:
    """Run the cases asked for, one after the other."""
    larger = 4 if options.full else 1
    total, rounds = 256 * MIB * larger, options.rounds
    driver = Driver(THREADS)
    cases: dict[str, Callable[[], Report]] = {
        "sizes": lambda: {
            name: one_size(folder, size, total, rounds, driver) for name, size in SIZES.items()
        },
        "fresh": lambda: fresh(folder, total, rounds, driver),
        "huge_pages": lambda: huge_pages(folder, total, rounds, driver),
        "larger_than_cache": lambda: in_little_memory(folder, GIB * larger, rounds),
        "churn90": lambda: churn(folder, 512 * MIB * larger, 0.90, rounds),
        "churn97": lambda: churn(folder, 512 * MIB * larger, 0.97, rounds),
        "waste": lambda: waste(folder, GIB * larger),
        "growth": lambda: growth(folder, (10_000, 100_000, 1_000_000)),
        "budget": lambda: budget(folder),
    }
    report: Report = {}
    for name, case in cases.items():
        if options.only in (None, name):
            print(f"{name} …", file=sys.stderr, flush=True)
            begin = time.perf_counter()
            try:
                report[name] = case()
            except Missing as missing:
                report[name] = {"not_run": str(missing)}
            report.setdefault("seconds", {})[name] = time.perf_counter() - begin
    with_fio = fio_of(folder / "probe", MIB)
    report["fio"] = "there" if with_fio else "not installed; on Debian: apt-get install fio"
    driver.close()
    return report


def summed_up(report: Report) -> Report:
    """Put beside the cases the figures that are asked for by name."""
    control = report.get("sizes", {}).values()
    for verb in ("write", "read"):
        ratios = [
            each[f"{verb}_fio_over_fio"] for each in control if f"{verb}_fio_over_fio" in each
        ]
        report.setdefault("fio_over_fio", {})[verb] = statistics.median(ratios) if ratios else None
    if "waste" in report:
        report["waste_two_geometries"] = report["waste"]["waste"]
    if "growth" in report:
        for name in ("open_cache_s", "open_cache_cpu_s"):
            column = {count: row[name] for count, row in report["growth"].items()}
            report[name.replace("open_cache", "reopen")] = column
    return report


def tell(report: Report, at: str = "") -> None:
    """Print a report, a line a figure."""
    for name, value in report.items():
        path = f"{at}.{name}" if at else name
        if isinstance(value, dict):
            tell(value, path)
        elif isinstance(value, list):
            print(f"{path:52} {', '.join(f'{one:.3f}' for one in value)}")
        else:
            print(f"{path:52} {f'{value:.3f}' if isinstance(value, float) else value}")


def main() -> None:
    """Measure, print, and write what was asked for."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option(arguments)
    arguments.add_argument("--dir", type=Path, default=Path(), help="on the device to measure")
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--full", action="store_true", help="four times as many bytes")
    arguments.add_argument("--only", help="one case of those above")
    arguments.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--procs", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        if options.child:
            options.procs.write_text("0")  # this process
            print(
                json.dumps(larger_than_cache(Path(place), options.child, options.rounds, THREADS))
            )
            return
        report = summed_up(measure(Path(place), options))
    tell(report)
    kept(report, options, PANELS)


if __name__ == "__main__":
    main()
