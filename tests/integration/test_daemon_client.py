"""A daemon's cache while its server is killed, between all calls of the face and under threads."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier.daemon.link import Link
from kvtier.errors import MisuseError
from kvtier.testing.mortal import Mortal, figure, serves
from kvtier.testing.toy import BLOCK, CHUNK, Toy, dram, pattern, prompt
from kvtier.testing.waiting import until
from kvtier.transfer import CopyResult, CopyStatus

OK = CopyResult(CopyStatus.OK)
TOKENS = prompt(4 * CHUNK + 1)


# ---------------------------------------------------------------------------- killed between calls


class Script:
    """All calls of the face, one after another; each may find that the daemon has gone.

    Whatever is loaded has the bytes of its tokens, or the load says that it has failed.
    """

    def __init__(self, toy: Toy, seed: int) -> None:
        self.toy, self.cache = toy, toy.cache
        self.tokens = np.append(TOKENS[: 2 * CHUNK], prompt(2 * CHUNK + 1, seed + 1))
        self.pages = self.cache.bind(toy.kv, toy.device)
        self.wrong = 0
        self.prefix = self.match = self.lease = self.plan = self.result = self.running = None

    def steps(self):
        """Yield the calls, in an order in which each has what it needs."""
        cache = self.cache
        yield lambda: self.keep("prefix", cache.prefix(self.tokens))
        yield lambda: self.keep("plan", cache.plan_save(self.prefix, range(16)))
        yield self.save
        yield lambda: self.plan and cache.settle(self.plan, self.result)
        yield lambda: cache.flush(timeout=5)
        yield lambda: self.keep("match", cache.match(self.prefix))
        yield lambda: self.keep("lease", cache.lease(self.match, deadline=30))
        yield lambda: self.lease and self.lease.renew(20)
        yield from self.loading()
        yield lambda: cache.loaded(self.match, {"dram": self.match.tokens}, 0)
        yield lambda: self.keep("running", cache.fetch(self.match, timeout=2, deadline=30))
        yield lambda: self.keep("lease", self.running.result(20))
        yield from self.loading()
        yield lambda: self.keep("running", cache.pin(self.match, seconds=30, timeout=2))
        yield lambda: self.keep("lease", self.running.result(20))
        yield from self.loading()
        yield lambda: cache.prefetch(self.match, base=2, per_1024_tokens=1).result(20)
        yield lambda: cache.explain(self.prefix)
        yield lambda: cache.metrics.get("saved_chunks")
        yield lambda: setattr(cache, "bypass", True)
        yield lambda: setattr(cache, "bypass", False)
        yield lambda: cache.bypass
        yield lambda: cache.invalidate(self.prefix, first=3, timeout=2)
        yield lambda: operator(lambda: cache.purge(bytes(32), timeout=2))
        yield lambda: operator(lambda: cache.clear("dram", timeout=2))
        yield lambda: self.keep("match", cache.match(self.prefix))
        yield cache.figures

    def keep(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def loading(self):
        cache = self.cache
        yield self.plan_load
        yield self.load
        yield lambda: self.plan and cache.settle(self.plan, self.result)
        yield lambda: self.lease and self.lease.held and self.lease.release()

    def save(self) -> None:
        if self.plan:
            self.toy.compute(self.tokens, range(16))
            self.result = self.pages.execute(self.plan, ()).result(10)

    def plan_load(self) -> None:
        blocks = range(128, 128 + self.lease.tokens // BLOCK) if self.lease else ()
        self.plan = self.cache.plan_load(self.lease, blocks) if self.lease else None

    def load(self) -> None:
        if not self.plan:
            return
        self.toy.kv[:, :, 128:144] = 0
        self.result = self.pages.execute(self.plan, ()).result(10)
        if self.result.status is CopyStatus.OK:
            for at in range(self.result.tokens // BLOCK):
                wanted = pattern(self.tokens[: (at + 1) * BLOCK])
                self.wrong += not np.array_equal(self.toy.kv[:, :, 128 + at], wanted)


def operator(call) -> None:
    """An operator is told when what was ordered has not been done."""
    with contextlib.suppress(TimeoutError):
        call()


STEPS = 36


def run(daemon, toy, seed: int, kills: set[int]) -> None:
    """Run the script; the server is killed before the steps of these numbers."""
    script = Script(toy, seed)
    count = 0
    for number, step in enumerate(script.steps()):
        if number in kills:
            daemon.kill_server()
        step()
        count += 1
    assert count == STEPS
    assert script.wrong == 0
    serves(toy, seed)
    until(lambda: figure(toy, "leased_parts") == figure(toy, "plans_out") == 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_the_server_may_be_killed_between_any_two_calls(nursery, tmp_path, part):
    """Of a new daemon each: one whose servers die again and again starts them ever later."""
    for number in range(part, STEPS, 4):
        disk = f"lmdb:{tmp_path}/{number}?capacity=64MiB&durability=each"
        with contextlib.closing(Mortal(nursery, dram(64), disk)) as daemon:
            run(daemon, daemon.open(), number, {number})


@pytest.mark.parametrize("seed", range(3))
def test_it_may_be_killed_again_and_again(durable, seed):
    toy = durable.open()
    run(durable, toy, seed, set(random.Random(seed).sample(range(STEPS), 6)))


def test_it_may_be_killed_while_a_cache_is_opened(daemon, monkeypatch):
    opened = Link.open

    def dies(self: Link, timeout: float) -> None:
        opened(self, timeout)
        daemon.kill_server()

    monkeypatch.setattr(Link, "open", dies)
    serves(daemon.open())


# --------------------------------------------------------------------------------- forks, threads


def in_child(call) -> int:
    """Return the exit status of a forked child that makes a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if not child:
        code = 1
        try:
            call()
        except MisuseError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_uses_nothing_of_its_parents(daemon):
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    cache, match = toy.cache, toy.cache.match(TOKENS)
    lease = cache.lease(match, deadline=60)
    plan = cache.plan_load(lease, range(16))
    pages = cache.bind(toy.kv, toy.device)
    calls = {
        "match": lambda: cache.match(TOKENS),
        "lease": lambda: cache.lease(match, deadline=5),
        "release": lease.release,
        "with": lambda: lease.__exit__(None, None, None),
        "renew": lambda: lease.renew(5),
        "plan": lambda: cache.plan_load(lease, range(16)),
        "settle": lambda: cache.settle(plan, OK),
        "figures": cache.figures,
        "metrics": lambda: cache.metrics.get("saved_chunks"),
        "snapshot": cache.metrics.snapshot,
        "execute": lambda: pages.execute(plan, ()),
        "bypass": lambda: setattr(cache, "bypass", True),
    }
    assert {name: in_child(call) for name, call in calls.items()} == dict.fromkeys(calls, 0)
    in_child(cache.close)
    assert lease.held
    assert pages.execute(plan, ()).result(20).tokens == 4 * CHUNK
    cache.settle(plan, OK)
    lease.release()
    serves(toy)


def test_eight_threads_read_their_own_bytes_while_it_is_killed(durable):
    toys = [durable.open() for _ in range(2)]
    toys += [Toy(toys[at % 2].cache) for at in range(6)]
    ended, hits = threading.Event(), [0] * 8

    def work(number: int) -> int:
        toy, wrong = toys[number], 0
        rng = random.Random(number)
        while not ended.is_set():
            tokens = prompt(4 * CHUNK + 1, rng.randrange(6))
            with contextlib.suppress(TimeoutError):
                toy.save(f"s{number}", tokens[: 4 * CHUNK])
            offered, _, exact = load(toy, f"l{number}", tokens)
            hits[number] += bool(offered)
            wrong += not exact
        return wrong

    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, number) for number in range(8)]
        for _ in range(5):
            time.sleep(0.4)  # the time that they work undisturbed
            durable.kill_server()
        try:
            until(lambda: min(hits))  # each of them finds something yet
        finally:
            ended.set()
        assert sum(one.result(60) for one in working) == 0
    for one in toys[2:]:
        one.connector.close()
        one.device.close()


def load(toy: Toy, name: str, tokens) -> tuple[int, object, bool]:
    """Load as Toy does; a load that failed says nothing of its blocks."""
    found = toy.load(name, tokens)
    failed = found[1] is not None and not found[1].tokens
    return (0, None, True) if failed else found
