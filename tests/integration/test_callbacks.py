"""A transfer's callback runs on the thread that others wait for: so nothing may wait there."""

from __future__ import annotations

import queue
import threading

import pytest

import kvtier
from kvtier.testing.toy import CHUNK, prompt
from kvtier.testing.waiting import until
from kvtier.upkeep import Upkeep

TOKENS = prompt(2 * CHUNK + 1)
WAITS = {
    "flush": lambda cache: cache.flush(timeout=1),
    "clear": lambda cache: cache.clear("dram", timeout=1),
    "purge": lambda cache: cache.purge(timeout=1),
    "invalidate": lambda cache: cache.invalidate(TOKENS, timeout=1),
    "record": lambda cache: cache.record(None),
    "close": lambda cache: cache.close(),
}


@pytest.fixture(params=["here", "daemon"])
def either(request, nursery):
    """Return a toy engine on a cache of this process, or of a daemon."""
    if request.param == "here":
        return request.getfixturevalue("toy")
    return request.getfixturevalue("daemon").open()


def in_callback(cache, call) -> str:
    """Do something in a fetch's callback; return why it is refused, or nothing.

    It is not done where the fetch had settled before: the callback comes on this thread then.
    """
    out, mine = queue.SimpleQueue(), threading.current_thread()

    def settled():
        try:
            out.put(None if threading.current_thread() is mine else call(cache))
        except kvtier.MisuseError as error:
            out.put(error)

    cache.fetch(cache.match(TOKENS), timeout=20, deadline=60).on_settled(settled)
    found = out.get(timeout=20)
    return str(found) if isinstance(found, kvtier.MisuseError) else ""


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_is_refused_there(either, what):
    toy = either
    toy.save("a", TOKENS[: 2 * CHUNK])
    until(lambda: toy.cache.match(TOKENS).tokens)
    said = until(lambda: in_callback(toy.cache, WAITS[what]))
    assert "call it from a thread of your own" in said
    assert toy.cache.flush(timeout=5)


def test_without_that_it_would_wait_for_itself(toy, monkeypatch):
    """The twin, in one process: all the time that it is given. With a daemon, for ever."""
    monkeypatch.setattr(Upkeep, "_check_here", lambda self: None)
    found = []
    toy.save("a", TOKENS[: 2 * CHUNK])

    def flushes(cache):
        found.append(cache.flush(timeout=1))

    until(lambda: in_callback(toy.cache, flushes) or found)
    assert found == [False]
    assert toy.cache.flush(timeout=5)
