"""What a server that hangs costs: hits in local tiers meanwhile, and each call that waits for it.

See ``object_store``, which measures it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from far_proxy import FarProxy
from tiny import BLOCK, WIDE, Found, note, opened, save, saved

import kvtier
from kvtier.testing.proxy import Fault
from kvtier.testing.seaweed import SeaweedServer

SECONDS = 0.2  # that a call may take
LOCAL, FEW = 64, 8  # chunks of a prompt
NVME_HITS, DRAM_HITS = 200, 5  # hits a round: in NVMe, and in DRAM after each of them
BACK_SECONDS = 60.0
LATE = "while_hung.late_ms."
FAULTS = {"hang": Fault.HANG, "drip": Fault.DRIP, "trickle": Fault.TRICKLE}

Call = Callable[[kvtier.Cache], object]


def hangs(server: SeaweedServer, folder: Path, rounds: int, found: Found) -> None:
    """Serve local hits, and wait for S3, while it answers and while it does not."""
    with FarProxy(server.port) as proxy:
        s3 = f"s3://bench/hang?capacity=1GiB&admission=through&endpoint={proxy.endpoint}"
        lmdb = f"lmdb:{folder}/kv?capacity=1GiB&admission=through&write_budget=unlimited"
        with opened(lmdb, s3) as cache:
            local_hits(cache, proxy, rounds, found)
        with opened(s3, namespace=WIDE) as cache:
            lateness(cache, proxy, rounds, found)
    late = [*found["while_hung.over_deadline_ms"]]
    late += [each for name, some in found.items() if name.startswith(LATE) for each in some]
    found["while_hung.over_deadline_ms_max"] = [max(late)]
    found["while_hung.timer_late_ms_max"] = [max(found["while_hung.timer_late_ms"])]


def prompt(number: int, chunks: int) -> Any:
    """Return a prompt of its own for each number."""
    return np.arange(chunks * BLOCK + 1, dtype=np.int32) + 1_000_000 * number


# ------------------------------------------------------------------------------------- local hits


def local_hits(cache: kvtier.Cache, proxy: FarProxy, rounds: int, found: Found) -> None:
    """Time hits in DRAM and NVMe, in turn while S3 answers and while it answers nothing."""
    local, fresh = prompt(0, LOCAL), itertools.count(1)
    save(cache, local)
    hits(cache, local, fresh)
    for _ in range(rounds):
        quiet = hits(cache, local, fresh)
        proxy.inject(Fault.HANG)
        hung = hits(cache, local, fresh, found)
        proxy.inject(Fault.NONE)
        until_back(cache, fresh)
        for tier in ("dram", "nvme"):
            note(found, f"while_hung.{tier}_p99_ms.base", quiet[tier])
            note(found, f"while_hung.{tier}_p99_ms.hung", hung[tier])
        ratio = max(hung[tier] / quiet[tier] for tier in quiet)
        note(found, "while_hung.local_hit_p99_ratio", ratio)


def until_back(cache: kvtier.Cache, fresh: Iterator[int]) -> None:
    """Ask S3 until it is in use again."""
    late = time.monotonic() + BACK_SECONDS
    while True:
        asked = prompt(next(fresh), FEW)
        cache.fetch(cache.match(asked), timeout=5, deadline=5).result(10)
        if not cache.health().troubles:
            return
        if time.monotonic() > late:
            raise SystemExit("the server is back, and not in use")
        time.sleep(0.2)


def hits(
    cache: kvtier.Cache, local: Any, fresh: Iterator[int], late: Found | None = None
) -> dict[str, float]:
    """Return p99 in ms of hits in DRAM and NVMe, beside fetches from S3 that go on meanwhile."""
    times: dict[str, list[float]] = {"dram": [], "nvme": []}
    with meanwhile(cache, fresh, {} if late is None else late):
        for _ in range(NVME_HITS):
            cache.clear("dram")
            with timed(times["nvme"]):
                hit(cache, local)
            for _ in range(DRAM_HITS):
                with timed(times["dram"]):
                    hit(cache, local)
    return {name: 1e3 * float(np.percentile(each, 99)) for name, each in times.items()}


@contextlib.contextmanager
def meanwhile(cache: kvtier.Cache, fresh: Iterator[int], late: Found) -> Iterator[None]:
    """Ask S3 for what nobody has, again and again; note how late the answers are, and a timer."""
    stop = threading.Event()

    def remote() -> None:
        while not stop.wait(0.05):
            asked = cache.match(prompt(next(fresh), LOCAL))
            fetch = cache.fetch(asked, timeout=SECONDS, deadline=5)
            begin = time.perf_counter()
            fetch.result(30)
            over = time.perf_counter() - begin - SECONDS
            note(late, "while_hung.over_deadline_ms", 1e3 * max(over, 0.0))

    def idle() -> None:
        begin = time.perf_counter()
        while not stop.wait(SECONDS):
            over = time.perf_counter() - begin - SECONDS
            note(late, "while_hung.timer_late_ms", 1e3 * over)
            begin = time.perf_counter()

    threads = [threading.Thread(target=remote), threading.Thread(target=idle)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Keep how long something took."""
    begin = time.perf_counter()
    yield
    times.append(time.perf_counter() - begin)


def hit(cache: kvtier.Cache, tokens: Any) -> None:
    """Match a prompt that is here, and hold it."""
    match = cache.match(tokens)
    lease = cache.lease(match, deadline=5)
    if lease is None:
        lease = cache.fetch(match, timeout=5, deadline=5).result(10)
    if lease is None or lease.chunks < len(tokens) // BLOCK:
        raise SystemExit("a local hit was none")
    lease.release()


# -------------------------------------------------------------------------------- calls that wait


def lateness(cache: kvtier.Cache, proxy: FarProxy, rounds: int, found: Found) -> None:
    """Note how late each call is that may wait for S3, at each way to hang."""
    fresh = itertools.count(1 << 8)
    for _ in range(rounds):
        for kind in (*FAULTS, "dropped"):
            there = [prompt(next(fresh), FEW) for _ in range(3)]
            for each in there:
                save(cache, each)
            cache.clear("dram")
            hit(cache, there[2])  # or reads would fail five times in a row, and none work
            with hung(proxy, kind):
                # Fewer than the breaker opens at: each of them finds it closed.
                for name, call in calls(there, fresh).items():
                    if kind == "trickle" and name != "read":
                        continue  # short answers come at once
                    begin = time.perf_counter()
                    call(cache)
                    over = time.perf_counter() - begin - SECONDS
                    note(found, f"{LATE}{name}.{kind}", 1e3 * over)
            until_back(cache, fresh)


def calls(there: list[Any], fresh: Iterator[int]) -> dict[str, Call]:
    """Return what may wait for S3: for prompts that nobody has, and for two that are there."""
    unknown, new = prompt(next(fresh), FEW), prompt(next(fresh), FEW)

    def fetched(tokens: Any) -> Call:
        return lambda cache: cache.fetch(cache.match(tokens), timeout=SECONDS, deadline=5).result(9)

    def flushed(cache: kvtier.Cache) -> None:
        saved(cache, new)
        cache.flush(timeout=SECONDS)

    return {
        "look_up": fetched(unknown),
        "read": fetched(there[0]),
        "save_and_flush": flushed,
        "invalidate": lambda cache: cache.invalidate(there[1], timeout=SECONDS),
    }


@contextlib.contextmanager
def hung(proxy: FarProxy, kind: str) -> Iterator[None]:
    """Let S3 hang in some way."""
    if kind in FAULTS:
        proxy.inject(FAULTS[kind])
        yield
        proxy.inject(Fault.NONE)
    else:
        with proxy.dropping():
            yield
