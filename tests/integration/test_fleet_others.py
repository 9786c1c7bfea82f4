"""A fleet on what is shared besides a bucket: a directory, and a Valkey server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.fleet import LIAR, Host, Loaded, Save, Saved
from kvtier.testing.toy import dram
from kvtier.testing.valkey_server import ValkeyServer

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOKENS, WHOLE = 400, 384
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(params=["files", "valkey"])
def shared(request, tmp_path) -> Iterator[str]:
    """Return the URL of a tier that hosts share."""
    if request.param == "files":
        yield f"files:{tmp_path}/shared?capacity=64MiB&admission=through"
        return
    server = ValkeyServer(maxmemory="64mb", maxmemory_policy="allkeys-lru")
    try:
        server.__enter__()
    except ConfigError as absent:
        pytest.skip(str(absent))
    yield f"valkey:{server.location}?capacity=64MiB&admission=through"
    server.close()


@pytest.fixture
def hosts(shared) -> Iterator[list[Host]]:
    """Return three hosts, of which the last computes other bytes than the first two."""
    found = [
        Host([dram(64), shared], {**os.environ, **ENV, **more}) for more in ({}, {}, {LIAR: "1"})
    ]
    yield found
    for host in found:
        host.close()


def test_fleet_two_hosts_write_at_once_one_dies_and_what_is_there_is_right(hosts):
    one, other, liar = hosts
    both, last = [1, 2, 3, 4], [5, 6, 7, 8]
    for host in (one, other):
        host.send(Save(both, TOKENS, 20.0))
    assert [host.receive(Saved).flushed for host in (one, other)] == [True, True]
    assert one.load(both, TOKENS).tokens == [WHOLE] * 4
    one.send(Save(last, TOKENS, 20.0))
    one.kill()
    for seeds in (both, last):
        found: Loaded = other.load(seeds, TOKENS)
        assert found.exact
    assert other.load(both, TOKENS).tokens == [WHOLE] * 4
    assert other.save(last, TOKENS).flushed
    seen = liar.load([*both, *last], TOKENS)
    assert (seen.tokens, seen.exact) == ([WHOLE] * 8, False), "what others wrote was not compared"
