"""What a daemon costs beside the same cache in one's own process.

    python benchmarks/daemon.py [--rounds N] [--dir DIR] [--json FILE] [--plot FILE.png]

In every round each arm has its turn, so that whatever else the machine does meets all alike.

match_lease   match and lease of a prompt of 512 chunks, all in DRAM, from the prompt's names to
              the slots in hand, in milliseconds. `new`: the session has not named the prompt yet,
              so that its keys travel; `again`: it has. The release is not in the time
handover      one part of 16 MiB, by its offset: from the call of `lease` until the client has the
              offset, which is its own to read until the deadline. `planned`: until a plan is out,
              too, so that the slot stays its own however long the copy takes; `whole`: until that
              is settled and the lease released, and the daemon has answered something after it.
              In microseconds; `bare`: a message of 100 bytes to another process and back
load          134 MB, eight such parts: from the call of match until all is in the engine's blocks
idle          match_lease `again` while 256 more connections are open, over without, in turn
start         from the start of `kvtier serve` until its socket answers, with so many records of
              4 KiB in an NVMe tier, and the CPU's seconds for it
memory        what supervisor and server have then, over the budget of DRAM, without page cache;
              and whether torch or CUDA is among what the server has mapped
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import operator
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from plot import kept, option

import kvtier
import kvtier.cache
from kvtier.device.cpu import CpuDevice
from kvtier.identity.record import Header, PartName, checksum, record_id
from kvtier.prefix import Prefix
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.daemon import Daemon, running
from kvtier.testing.records import aligned
from kvtier.testing.soakwatch import Probe
from kvtier.tiers.store import Status, Write
from kvtier.transfer import CopyResult, CopyStatus

ARMS = ("in_process", "daemon")
CHUNK, CHUNKS = 256, 512
SMALL = kvtier.Geometry((kvtier.Component(layers=1, heads=1, head_size=8),), chunk_tokens=CHUNK)
LARGE = kvtier.Geometry((kvtier.Component(layers=32, heads=8, head_size=64),), chunk_tokens=CHUNK)
LARGE_CHUNKS, IDLE, RECORDS, RECORD = 8, 256, 100_000, 4096
LARGE_BYTES = LARGE_CHUNKS * LARGE.bytes_per_token * CHUNK
BLOCKS = LARGE_CHUNKS * CHUNK // 16
HANDOVER = ("planned", "whole", "in_process", "planned_in_process", "bare")
START_DRAM = (256 << 20, 1 << 30)  # for the time, and for the memory
PANELS = {"match and lease, ms": "match_lease_512_ms.*.*", "16 MiB, us": "handover_16MiB_us.*"}
LIMITS = {
    "match_lease_512_ms.more": "at most 0.3 ms",
    "handover_16MiB_us.p50": "at most 60 us",
    "load_134MB.over_in_process": "at least 0.8",
    "idle_256.over_none.p50": "nothing measurable",
    "start_100k_records_s": "at most 3 s",
    "memory_over_budget": "at most 1.10",
}


def spread(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """Summarise: median, and the middle 80 %."""
    ranked = sorted(value * scale for value in values)
    tenth = len(ranked) // 10
    return {"p50": statistics.median(ranked), "p10": ranked[tenth], "p90": ranked[-1 - tenth]}


def prompt(seed: int, last: int, chunks: int) -> np.ndarray:
    """Return the tokens of a prompt of whole chunks, the last of which is its own."""
    tokens = np.random.default_rng(seed).integers(0, 30_000, chunks * CHUNK + 1)
    tokens[-CHUNK - 1 :] = last
    return tokens.astype(np.int32)


class Arm:
    """A cache, here or in the daemon, and blocks of an engine."""

    def __init__(self, url: str, namespace: kvtier.Namespace, kv: np.ndarray) -> None:
        self.cache = kvtier.open(url, namespace=namespace)
        self._blocks = kv.shape[2]
        self._device = CpuDevice()
        self.pages = self.cache.bind(kv, self._device)

    def save(self, prefix: Prefix, first: int = 0) -> None:
        """Save a prompt and wait until it can be found."""
        blocks = [at % self._blocks for at in range(len(prefix.names) * CHUNK // 16)]
        plan = self.cache.plan_save(prefix, blocks, first=first)
        if plan is None:
            raise SystemExit("nothing was saved")
        self.cache.settle(plan, self.pages.execute(plan, ()).result(60))
        if not self.cache.flush(timeout=60):
            raise SystemExit("what was saved was not published in time")

    def lease(self, prefix: Prefix) -> kvtier.cache.Lease:
        """Match and lease a prompt that must be there."""
        lease = self.cache.lease(self.cache.match(prefix), deadline=60)
        if lease is None or lease.chunks < len(prefix.names):
            raise SystemExit("the prompt is not wholly cached")
        return lease

    def match_lease(self, prefix: Prefix) -> float:
        """Return the seconds that match and lease took."""
        begin = time.perf_counter()
        lease = self.lease(prefix)
        _slots = lease.slots
        seconds = time.perf_counter() - begin
        lease.release()
        return seconds

    def handover(self, prefix: Prefix) -> tuple[float, float, float]:
        """Return the seconds until the offset is here, is in a plan, and is given back."""
        match = self.cache.match(prefix)
        begin = time.perf_counter()
        lease = self.cache.lease(match, deadline=60)
        slots = lease.slots if lease is not None else ()
        leased = time.perf_counter() - begin
        plan = None if lease is None else self.cache.plan_load(lease, list(range(16)))
        planned = time.perf_counter() - begin
        if lease is None or plan is None or not slots[0][0].nbytes:
            raise SystemExit("the part is not in DRAM")
        self.cache.settle(plan, CopyResult(CopyStatus.OK))
        lease.release()
        self.cache.match(prefix)
        return leased, planned, time.perf_counter() - begin

    def load(self, prefix: Prefix) -> float:
        """Return the seconds until a prompt is in the engine's blocks."""
        begin = time.perf_counter()
        with self.lease(prefix) as lease:
            plan = self.cache.plan_load(lease, list(range(lease.tokens // 16)))
            if plan is None:
                raise SystemExit("the lease has ended")
            result = self.pages.execute(plan, ()).result(60)
            seconds = time.perf_counter() - begin
            self.cache.settle(plan, result)
        return seconds

    def close(self) -> None:
        """Close cache and device."""
        self.cache.close()
        self._device.close()


# ---- match and lease


def match_lease(path: Path, rounds: int) -> dict[str, Any]:
    """Measure match and lease, of prompts new to a session and of known ones."""
    namespace, url = kvtier.Namespace("small", SMALL), f"unix:{path}?patience=5s"
    kv = np.zeros((1, 2, 16, 16, 1, 8), np.uint16)
    tokens = [prompt(1, last, CHUNKS) for last in range(rounds)]
    times: dict[str, dict[str, list[float]]] = {
        what: {arm: [] for arm in ARMS} for what in ("new", "again")
    }
    idle: list[float] = []
    with contextlib.ExitStack() as ends:
        own, saver, remote = (
            ends.enter_context(contextlib.closing(Arm(one, namespace, kv)))
            for one in ("dram:64MiB", url, url)  # the daemon knows prompts by their session
        )
        for arm in (own, saver):
            for which, each in enumerate(tokens):
                arm.save(arm.cache.prefix(each), first=CHUNKS - 1 if which else 0)
        named = [[arm.cache.prefix(each) for each in tokens] for arm in (own, remote)]
        for prefixes in zip(*named, strict=True):
            for found in times.values():
                for name, arm, prefix in zip(ARMS, (own, remote), prefixes, strict=True):
                    found[name].append(arm.match_lease(prefix) * 1e3)
        for _ in range(5):
            alone = [remote.match_lease(named[1][0]) for _ in range(rounds)]
            with idle_connections(path):
                beside = [remote.match_lease(named[1][0]) for _ in range(rounds)]
            idle.append(statistics.median(beside) / statistics.median(alone))
    spreads = {}
    for what, found in times.items():
        found["more"] = [b - a for a, b in zip(*found.values(), strict=True)]
        spreads[what] = {name: spread(each) for name, each in found.items()}
    report: dict[str, Any] = {name: each["p50"] for name, each in spreads["new"].items()}
    return {"match_lease_512_ms": report | spreads, "idle_256": {"over_none": spread(idle)}}


@contextlib.contextmanager
def idle_connections(path: Path) -> Iterator[None]:
    """Hold connections open that said Hello and nothing else; 16 are a session."""
    sessions = [os.urandom(16) for _ in range(IDLE // 16)]
    probes = [Probe(path, session) for session in sessions for _ in range(16)]
    end = time.monotonic() + 30
    while not all(probe.returned for probe in probes):
        for probe in probes:
            probe.look()
        if time.monotonic() > end:
            raise SystemExit("the daemon does not take so many connections")
    try:
        yield
    finally:
        for probe in probes:
            probe.close()


# ---- hand-over and load


def bare_round_trips(count: int) -> list[float]:
    """Return the seconds that messages of 100 bytes take to another process and back."""
    ours, theirs = socket.socketpair()
    code = "import socket; s = socket.socket(fileno=%d)\nwhile data := s.recv(4096): s.send(data)"
    their = theirs.fileno()
    with subprocess.Popen([sys.executable, "-c", code % their], pass_fds=[their]), ours:
        theirs.close()
        times = [time.perf_counter()]
        for _ in range(count):
            ours.send(bytes(100))
            ours.recv(4096)
            times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def moves(path: Path, rounds: int) -> dict[str, Any]:
    """Measure the hand-over of one part, and loads."""
    namespace = kvtier.Namespace("large", LARGE)
    kv = np.ones((32, 2, BLOCKS, 16, 8, 64), np.uint16)
    parts: list[list[tuple[float, ...]]] = [[], []]
    loads: list[list[float]] = [[], []]
    with contextlib.ExitStack() as ends:
        arms = [
            ends.enter_context(contextlib.closing(Arm(url, namespace, kv)))
            for url in ("dram:320MiB", f"unix:{path}?patience=5s")
        ]
        each = [[a.cache.prefix(prompt(2, 0, n)) for n in (LARGE_CHUNKS, 1)] for a in arms]
        for arm, prefixes in zip(arms, each, strict=True):
            for prefix in prefixes:
                arm.save(prefix)
            arm.load(prefixes[0])  # a first load maps the pages
        for _ in range(10 * rounds):
            for arm, prefixes, found in zip(arms, each, parts, strict=True):
                found.append(arm.handover(prefixes[1]))
        for _ in range(rounds):
            for arm, prefixes, times in zip(arms, each, loads, strict=True):
                times.append(arm.load(prefixes[0]))
    ratios = [a / b for a, b in zip(*loads, strict=True)]
    own, far = ([spread(list(one), 1e6) for one in zip(*arm, strict=True)] for arm in parts)
    rest = far[1], far[2], own[0], own[1], spread(bare_round_trips(10 * rounds), 1e6)
    handover: dict[str, Any] = far[0] | dict(zip(HANDOVER, rest, strict=True))
    rates = [spread([LARGE_BYTES / one / 1e9 for one in times]) for times in loads]
    load = {"ratios": spread(ratios), "gb_per_s": dict(zip(ARMS, rates, strict=True))}
    load["over_in_process"] = statistics.median(ratios)
    return {"handover_16MiB_us": handover, "load_134MB": load}


# ---- start


class Started(NamedTuple):
    """seconds: until it answered. memory: of its processes. mapped: files, by the server."""

    seconds: float
    cpu_seconds: float
    memory: int
    mapped: set[str]


def fill(folder: Path, records: int) -> str:
    """Write records into an NVMe tier, as chains of 512; return its URL."""
    capacity = max(64 << 20, records * 4 * RECORD)
    store = LmdbSlabStore.open(str(folder), capacity, {"durability": "none"})
    data = aligned(RECORD)
    sums = checksum(data), checksum(data)
    digest = hashlib.sha256(b"records").digest()
    keys = [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(records)]
    names = [record_id(key, PartName()) for key in keys]
    for start in range(0, records, 1000):
        batch = []
        for number in range(start, min(start + 1000, records)):
            depth = number % CHUNKS
            parent = names[number - 1] if depth else None
            head = Header(digest, keys[number], parent, depth, PartName(), RECORD, RECORD, *sums)
            batch.append(Write(head, data))
        if set(store.write_many(batch)) != {Status.OK}:
            raise SystemExit("the records do not fit")
    store.close()
    return f"lmdb:{folder}?capacity={capacity}B"


def started(urls: tuple[str, ...], path: Path) -> Started:
    """Start a daemon and end it again."""
    probe = Probe(path)
    begin = time.monotonic()
    with running(*urls, path=path) as daemon:
        while not probe.returned:
            probe.look()
            time.sleep(0.001)
        seconds = probe.returned - begin
        probe.close()
        used = cpu_seconds(daemon)
        return Started(seconds, used, memory(daemon), mapped(daemon.server_pid()))


def memory(daemon: Daemon) -> int:
    """Return the bytes of supervisor and server; what both have counts once, page cache never."""
    found = 0
    for pid in (daemon.supervisor_pid, daemon.server_pid()):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        kinds = ("Pss_Anon:", "Pss_Shmem:")
        found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))
    return found


def cpu_seconds(daemon: Daemon) -> float:
    """Return the seconds of the CPU that supervisor and server have used."""
    ticks = 0
    for pid in (daemon.supervisor_pid, daemon.server_pid()):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # proc(5): utime and stime
    return ticks / os.sysconf("SC_CLK_TCK")


def mapped(pid: int) -> set[str]:
    """Return the names of the files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if len(line.split()) > 5}


def start(folder: Path, records: int, rounds: int) -> dict[str, Any]:
    """Measure starts, and what a daemon has then."""
    url, path = fill(folder / "nvme", records), folder / "start.sock"
    found = [started((f"dram:{START_DRAM[0]}B", url), path) for _ in range(rounds)]
    large = started((f"dram:{START_DRAM[1]}B", url), path)
    heavy = ("libtorch", "libcuda", "libc10")
    return {
        "start_100k_records_s": statistics.median(one.seconds for one in found),
        "start_s": spread([one.seconds for one in found]) | {"records": records},
        "start_cpu_s": spread([one.cpu_seconds for one in found]),
        "memory_over_budget": large.memory / START_DRAM[1],
        "heavy_modules": sorted(name for name in large.mapped if name.startswith(heavy)),
    }


def show(report: dict[str, Any]) -> None:
    """Print the figures beside their limits."""
    for what in ("new", "again"):
        for arm, row in report["match_lease_512_ms"][what].items():
            print(
                f"match_lease {what:6} {arm:12} {row['p50']:8.3f} ms   "
                f"({row['p10']:.3f} to {row['p90']:.3f})"
            )
    row = report["handover_16MiB_us"]
    for name, one in {"": row, **{each: row[each] for each in HANDOVER}}.items():
        print(f"handover {name:18} {one['p50']:11.1f} us   ({one['p10']:.1f} to {one['p90']:.1f})")
    for arm, one in report["load_134MB"]["gb_per_s"].items():
        print(f"load {arm:16} {one['p50']:17.2f} GB/s ({one['p10']:.2f} to {one['p90']:.2f})")
    row = report["start_cpu_s"]
    print(f"start cpu {row['p50']:23.2f} s    ({row['p10']:.2f} to {row['p90']:.2f})")
    print()
    for name, limit in LIMITS.items():
        found = functools.reduce(operator.getitem, name.split("."), report)
        print(f"{name:32} {found:8.3f}   {limit}")
    print(f"{'heavy_modules':32} {', '.join(report['heavy_modules']) or 'none':>8}   none")


def main() -> None:
    """Measure all, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=101)
    arguments.add_argument("--records", type=int, default=RECORDS)
    arguments.add_argument("--dir", type=Path, help="on the disk to measure")
    option(arguments)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        with running("dram:64MiB", path=folder / "small.sock") as daemon:
            report = match_lease(Path(daemon.path), options.rounds)
        with running("dram:320MiB", path=folder / "large.sock") as daemon:
            report |= moves(Path(daemon.path), options.rounds)
        report |= start(folder, options.records, 5)
    show(report)
    kept(report, options, PANELS)


if __name__ == "__main__":
    main()
