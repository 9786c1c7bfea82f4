"""How the object tier moves bytes, finds prompts and fails, on a real S3 server of this host.

    python benchmarks/object_store.py [--rounds N] [--json FILE] [--plot FILE.png]

get      objects of 16 MiB into slots by the Tier, beside raw clients with as many requests in
         flight: boto3 and http.client with botocore's signatures, whole objects and ranges of
         4 MiB; and parts of 128 KiB, packed. In every round each contender has its turn. CPU is
         that of this process, without the server's.
put      objects of 16 MiB by the Tier from slots, checksums included, and by boto3: by this
         process's CPU alone, since the server's work is on the same cores
lookup   a prompt of 512 chunks that the host has never seen and of which another has written 317,
         5 ms of round-trip time away; and what an engine's thread waits in match and fetch
hang     DRAM and NVMe hits while S3 answers nothing, beside the same while it answers; and how much
         later than its timeout each call that may wait for S3 returns, beside how late a mere timer
         is: while requests are not answered, while answers come byte by byte, from the beginning
         or after it, and while packets are dropped
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from far_proxy import FarProxy
from hung import hangs
from msgspec import structs
from plot import kept, option
from raw_clients import IN_FLIGHT, LARGE, raw_boto, raw_clients
from rounds import must
from tiny import BLOCK, Found, note, opened, save

import kvtier
from kvtier.catalog.fetch import call_bytes
from kvtier.clock import monotonic
from kvtier.identity.record import record_id
from kvtier.metrics import Metrics
from kvtier.seams import IoPool, ThreadFlow
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.testing.seaweed import SeaweedServer
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Tier, Wanted

LARGE_COUNT = 16
PUT_COUNT = 8
SMALL, SMALL_COUNT = 128 << 10, 2048
TRIES = 4
CHUNKS, THERE = 512, 317
RTT = 0.005
PANELS = {
    "GB/s": "values.get.*.gb_per_s",
    "CPU s a GB": "values.get.*.cpu_s_per_gb",
    "CPU s a GB written": "values.put_16MiB.cpu_s_per_gb.*",
    "looking up 512 chunks, ms": "values.lookup_512.{engine_ms,ms}",
    "p99 of a hit here while S3 hangs, ms": "values.while_hung.*.{base,hung}",
    "and how late, ms": "values.while_hung.{timer_late_ms,over_deadline_ms}",
    "how late each call is, ms": "values.while_hung.late_ms.*.*",
}


def main() -> None:
    """Measure, print a line a figure, and write them all down."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7)
    option(arguments)
    options = arguments.parse_args()
    found: Found = {}
    with SeaweedServer() as server, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.env())
        server.create_bucket("bench")
        gets(server, options.rounds, found)
        puts(server, options.rounds, found)
        lookups(server, options.rounds, found)
        hangs(server, Path(folder), options.rounds, found)
    for name, values in found.items():
        print(
            f"{name:44} {statistics.median(values):9.3f}   ({min(values):.3f} to {max(values):.3f})"
        )
    kept(report(found), options, PANELS)


def report(found: Found) -> dict[str, Any]:
    """Return medians, nested by the dots of their names, and all values beside them."""
    nested: dict[str, Any] = {}
    for name, values in found.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = statistics.median(values)
    return nested | {"values": found}


# --------------------------------------------------------------------------------------------- get


def gets(server: SeaweedServer, rounds: int, found: Found) -> None:
    """Read the same bytes by all contenders, in turn."""
    with contextlib.ExitStack() as stack:
        contenders = stack.enter_context(tiers(server))
        contenders |= stack.enter_context(raw_clients(server))
        for call in contenders.values():
            call()
        for _ in range(rounds):
            speeds = {}
            for name, call in contenders.items():
                begin, used = time.perf_counter(), time.process_time()
                moved = call() / 1e9
                speeds[name] = moved / (time.perf_counter() - begin)
                note(found, f"get.{name}.cpu_s_per_gb", (time.process_time() - used) / moved)
                note(found, f"get.{name}.gb_per_s", speeds[name])
            note(found, "get_128KiB.over_16MiB", speeds["tier 128KiB"] / speeds["tier 16MiB"])
    raw = [found[f"get.{name}.gb_per_s"] for name in contenders if name.startswith("raw")]
    best = max(raw, key=statistics.median)
    for own, other in zip(found["get.tier 16MiB.gb_per_s"], best, strict=True):
        note(found, "get_16MiB.ratio_raw.boto3", own / other)
    found["get_16MiB.cpu_s_per_gb.boto3"] = found["get.tier 16MiB.cpu_s_per_gb"]


@contextlib.contextmanager
def tiers(server: SeaweedServer) -> Iterator[dict[str, Callable[[], int]]]:
    """Yield reads by a Tier, verified, into slots: calls in parallel, as long as a fetch makes."""
    slots = aligned(LARGE * LARGE_COUNT)

    def reader(records: Sequence[Write], together: int) -> Callable[[], int]:
        groups = [records[at : at + together] for at in range(0, len(records), together)]
        size = records[0].header.raw_bytes

        async def read() -> None:
            tasks, at = [], 0
            for group in groups:
                wanted = []
                for record in group:
                    into = slots[at : at + size]
                    wanted.append(Wanted(record.header.id, NAMESPACE, size, into))
                    at += size
                tasks.append(tier.read(wanted))
            for outcome in await asyncio.gather(*tasks):
                must([one.status for one in outcome])

        def run() -> int:
            flow.spawn(read()).result()
            return size * len(records)

        return run

    with a_tier(server, "records") as (flow, tier):
        large = chain(LARGE_COUNT, LARGE)
        small = chain(SMALL_COUNT, SMALL)
        for records, together in ((large, 1), (small, SMALL_COUNT // LARGE_COUNT)):
            for at in range(0, len(records), together):
                written(flow, tier, records[at : at + together])
        together = call_bytes(SMALL * SMALL_COUNT, S3Store.THREADS) // SMALL
        yield {"tier 16MiB": reader(large, 1), "tier 128KiB": reader(small, together)}


@contextlib.contextmanager
def a_tier(server: SeaweedServer, prefix: str) -> Iterator[tuple[ThreadFlow, Tier]]:
    """Yield a Tier on the bucket, and the loop that it runs on."""
    options = {name: option.default for name, option in S3Store.OPTIONS.items()}
    store = S3Store.open(f"//bench/{prefix}", None, options | {"endpoint": server.endpoint})
    flow = ThreadFlow("bench")
    tier = Tier("s3", store, flow, Metrics(), monotonic)
    try:
        yield flow, tier
    finally:
        flow.close()
        tier.close()


def written(flow: ThreadFlow, tier: Tier, records: Sequence[Write]) -> None:
    """Write records; the server, on a busy machine, may need more than one try."""
    for left in reversed(range(TRIES)):
        statuses = flow.spawn(tier.write(records)).result()
        if set(statuses) == {Status.OK} or not left:
            must(statuses)
            return


def chain(count: int, size: int) -> list[Write]:
    """Return the records of one prompt's chunks."""
    records = [make_record(number + size, size) for number in range(count)]
    above, whole = None, []
    for depth, (header, data) in enumerate(records):
        whole.append(Write(structs.replace(header, parent=above, depth=depth), data))
        above = record_id(header.key, header.part)
    return whole


# --------------------------------------------------------------------------------------------- put


def puts(server: SeaweedServer, rounds: int, found: Found) -> None:
    """Write the same bytes by both, in turn, each time to where nothing is."""
    records = chain(PUT_COUNT, LARGE)
    bodies = [bytes(record.data) for record in records]
    client, pool = raw_boto(server), IoPool("raw", IN_FLIGHT)

    def by_boto(at: int) -> None:
        client.put_object(Bucket="bench", Key=f"raw/{at}", Body=bodies[at])

    async def by_tier(tier: Tier) -> None:
        for statuses in await asyncio.gather(*(tier.write([one]) for one in records)):
            must(statuses)

    with a_tier(server, "puts") as (flow, tier):
        contenders = {
            "tier": lambda: flow.spawn(by_tier(tier)).result(),
            "boto3": lambda: pool.map(by_boto, range(PUT_COUNT)),
        }
        for turn in range(rounds + 1):  # the first one connects
            for name, call in contenders.items():
                used = time.process_time()
                call()
                if turn:
                    moved = PUT_COUNT * LARGE / 1e9
                    seconds = (time.process_time() - used) / moved
                    note(found, f"put_16MiB.cpu_s_per_gb.{name}", seconds)
            must(flow.spawn(tier.delete([one.header.id for one in records])).result())
            for at in range(PUT_COUNT):
                client.delete_object(Bucket="bench", Key=f"raw/{at}")
    pool.close()
    client.close()


# ------------------------------------------------------------------------------------------ lookup


def lookups(server: SeaweedServer, rounds: int, found: Found) -> None:
    """Look a prompt up that another host has written, by hosts that know nothing."""
    url = "s3://bench/lookup?capacity=1GiB&admission=through"
    with FarProxy(server.port, RTT) as proxy:
        for turn in range(rounds):
            tokens = np.arange(CHUNKS * BLOCK + 1, dtype=np.int32) + turn * 100_000
            with opened(f"{url}&endpoint={server.endpoint}") as cache:
                save(cache, tokens[: THERE * BLOCK + 1])
            with opened(f"{url}&endpoint={proxy.endpoint}") as cache:
                warm(cache)
                look_up(cache, proxy, tokens, found)


def warm(cache: kvtier.Cache) -> None:
    """Let a host connect, as one that has served before: by look-ups of what is not there."""
    for turn in range(3):
        other = np.arange(CHUNKS * BLOCK + 1, dtype=np.int32) - 1_000_000 * (turn + 1)
        cache.fetch(cache.match(other % (1 << 30)), timeout=30, deadline=30).result(30)


def look_up(cache: kvtier.Cache, proxy: FarProxy, tokens: Any, found: Found) -> None:
    """Time the look-up of one prompt, from the asking to the answer, without the read."""
    tier = next(iter(cache._desk.depot.tiers.values()))  # noqa: SLF001  (to see when it has answered)
    asked, done = [], threading.Event()
    contains, read = tier.contains, tier.read
    ended = 0.0

    async def counted(names: Sequence[bytes], *rest: Any) -> list[Status]:
        asked.append(len(names))
        return await contains(names, *rest)

    async def read_begins(wanted: Sequence[Wanted], *rest: Any) -> Any:
        nonlocal ended
        if not done.is_set():
            ended = time.perf_counter()
            done.set()
        return await read(wanted, *rest)

    tier.contains, tier.read = counted, read_begins
    before = proxy.requests
    begin = time.perf_counter()
    match = cache.match(tokens)
    fetch = cache.fetch(match, timeout=30, deadline=30)
    note(found, "lookup_512.engine_ms", 1e3 * (time.perf_counter() - begin))
    lease = fetch.result(30)
    if lease is None or lease.chunks < THERE - 7:
        raise SystemExit("the prompt was not found")
    lease.release()
    note(found, "lookup_512.ms", 1e3 * (ended - begin))
    note(found, "lookup_512.rounds", len(asked))
    note(found, "lookup_512.requests", sum(asked))
    note(found, "lookup_512.chunks_found", lease.chunks)
    if proxy.requests - before < sum(asked):
        raise SystemExit("the proxy saw fewer requests than were asked")


if __name__ == "__main__":
    main()
