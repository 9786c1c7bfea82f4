"""H24: a forked child gets a clear error from each of its parent's handles, and harms nobody."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import warnings

import pytest

import kvtier
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.toy import BLOCK, CHUNK, NAMESPACE, Toy, prompt

TOKENS = 4 * CHUNK
BLOCKS = list(range(128, 128 + TOKENS // BLOCK))


def in_child(call) -> int:
    """Return the exit status of a forked child that makes a call; -9 where it hung."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(10)
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(call):
    """Return a call that says 0 where `call` raises a MisuseError that speaks of the fork."""

    def tried() -> int:
        try:
            call()
        except MisuseError as error:
            return 0 if "fork" in str(error) else 2
        return 3

    return tried


def test_every_call_of_every_handle_is_refused_and_the_parent_goes_on(engines, lmdb):
    toy, tokens = engines(lmdb), prompt(TOKENS + 1)
    cache, connector = toy.cache, toy.connector
    toy.save("one", tokens[:TOKENS])
    match = cache.match(tokens)
    lease = cache.lease(match, deadline=60)
    plan = cache.plan_load(lease, BLOCKS)
    pages = cache.bind(toy.kv, toy.device)
    store = cache._desk.depot.tiers[1].store
    calls = {
        "match": lambda: cache.match(tokens),
        "lease": lambda: cache.lease(match, deadline=1),
        "release": lease.release,
        "renew": lambda: lease.renew(1),
        "prefetch": lambda: cache.prefetch(match, base=1, per_1024_tokens=0),
        "pin": lambda: cache.pin(match, seconds=1, timeout=1),
        "loaded": lambda: cache.loaded(match, {"dram": 1}, 0),
        "bind": lambda: cache.bind(toy.kv, toy.device),
        "share": lambda: cache.share(NAMESPACE),
        "explain": lambda: cache.explain(tokens),
        "invalidate": lambda: cache.invalidate(tokens),
        "purge": cache.purge,
        "fetch": lambda: cache.fetch(match, timeout=1, deadline=1),
        "plan_load": lambda: cache.plan_load(lease, BLOCKS),
        "plan_save": lambda: cache.plan_save(match.prefix, BLOCKS),
        "settle": lambda: cache.settle(plan, pages.execute(plan, ()).result(0)),
        "execute": lambda: pages.execute(plan, ()),
        "clear": lambda: cache.clear("dram"),
        "flush": lambda: cache.flush(timeout=1),
        "figures": cache.figures,
        "connector.match": lambda: connector.match("c", tokens, 0),
        "connector.save": lambda: connector.save("c", tokens[:TOKENS], BLOCKS),
        "store": lambda: store.contains_many([]),
    }
    found = {name: in_child(refused(call)) for name, call in calls.items()}
    assert found == dict.fromkeys(calls, 0)

    result = pages.execute(plan, ()).result(20)
    cache.settle(plan, result)
    lease.release()
    toy.save("two", prompt(TOKENS, 1))
    cache.clear("dram")
    assert toy.load("three", tokens)[::2] == (TOKENS, True)


def test_before_any_thread_was_started_it_is_refused_too(engines):
    """A stream's thread starts with its first work: in a child it would copy from no memory."""
    toy = engines()
    plan = toy.cache.plan_save(toy.cache.prefix(prompt(TOKENS)), BLOCKS)
    pages = toy.cache.bind(toy.kv, toy.device)

    def copy():
        pages.execute(plan, ()).result(20)

    def unguarded():
        faulthandler.disable()
        pages._pid = os.getpid()
        copy()

    assert in_child(refused(copy)) == 0
    assert in_child(refused(unguarded)) == -signal.SIGSEGV, "the twin"
    toy.cache.settle(plan, pages.execute(plan, ()).result(20))


def test_a_child_that_closes_or_ends_takes_nothing_from_its_parent(engines, lmdb):
    toy, tokens = engines(lmdb), prompt(TOKENS + 1)
    toy.save("one", tokens[:TOKENS])

    def close() -> int:
        toy.cache.close()
        return 0

    assert in_child(close) == 0
    assert in_child(lambda: 0) == 0
    toy.cache.clear("dram")
    assert toy.load("two", tokens)[::2] == (TOKENS, True)


def test_locks_that_were_held_at_the_fork_stop_no_child(engines):
    """Another thread may hold any of them, and is not there in the child to let go."""
    toy, tokens = engines(), prompt(TOKENS + 1)
    toy.save("one", tokens[:TOKENS])
    lease = toy.cache.lease(toy.cache.match(tokens), deadline=60)
    cache = toy.cache
    locks = [cache._desk.catalog._lock, cache.metrics._lock, cache._desk.depot.flow._lock]
    calls = [
        refused(lambda: cache.match(tokens)),
        refused(lease.release),
        refused(cache.figures),
        refused(lambda: cache.flush(timeout=1)),
        lambda: cache.close() or 0,
    ]
    for lock in locks:
        with lock:
            assert [in_child(call) for call in calls] == [0] * len(calls)
    lease.release()


def test_a_child_opens_caches_of_its_own(engines, lmdb, tmp_path):
    toy, tokens = engines(lmdb), prompt(TOKENS + 1)
    toy.save("one", tokens[:TOKENS])

    def same_directory() -> int:
        try:
            kvtier.open("dram:1MiB", lmdb, namespace=NAMESPACE)
        except ConfigError as error:
            return 0 if str(os.getppid()) in str(error) else 2
        return 3

    def another() -> int:
        url = f"lmdb:{tmp_path}/other?capacity=64MiB"
        mine = Toy(kvtier.open("dram:1MiB", url, namespace=NAMESPACE))
        mine.save("one", tokens[:TOKENS])
        mine.cache.clear("dram")
        good = mine.load("two", tokens)[::2] == (TOKENS, True)
        mine.close()
        return 0 if good else 2

    assert in_child(same_directory) == 0
    assert in_child(another) == 0
    toy.cache.clear("dram")
    assert toy.load("two", tokens)[::2] == (TOKENS, True)
    engines.close(toy)
    assert in_child(another) == 0, "and what the first child left can be opened"


SPAWN = """
import multiprocessing, sys
import kvtier

def child(url):
    from kvtier.testing.toy import Toy, NAMESPACE, prompt
    toy = Toy(kvtier.open("dram:1MiB", url, namespace=NAMESPACE))
    offered, _, exact = toy.load("load", prompt(257))
    toy.save("save", prompt(256))
    toy.close()
    sys.exit(offered // 64 if exact else 9)

if __name__ == "__main__":
    for kind, expected in (("spawn", 0), ("fork", 4), ("forkserver", 4)):
        process = multiprocessing.get_context(kind).Process(target=child, args=(sys.argv[1],))
        process.start()
        process.join(40)
        assert process.exitcode == expected, (kind, process.exitcode)
"""


def test_children_of_every_kind_share_what_is_on_the_disk(lmdb, tmp_path):
    """After spawn, too: it stops no sharing, since keys are the same in every process."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), lmdb], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["kvtier", "kvtier.connectors.reference", "kvtier.cache"])
def test_an_import_opens_nothing_that_a_fork_could_break(module):
    """No thread, no descriptor, no CUDA context: what a fork copies is what is there."""
    script = (
        "import os, sys, threading\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        f"import {module}\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
        "assert threading.active_count() == 1\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)
