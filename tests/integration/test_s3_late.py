"""A real S3 server that is away when a cache is opened, and comes back while it is used."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from kvtier import opening
from kvtier.testing.proxy import DelayProxy
from kvtier.testing.toy import CHUNK, Toy, dram, opened, prompt
from kvtier.testing.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CHUNKS = 12
TOKENS, OWN = prompt(CHUNKS * CHUNK + 1), prompt(CHUNKS * CHUNK + 1, 1)


def host(location: str, endpoint: str) -> Toy:
    url = f"s3:{location}?capacity=1GiB&admission=through&endpoint={endpoint}"
    return opened(dram(4 * CHUNKS), url)


def test_a_server_that_is_away_at_opening_is_used_once_it_is_back(
    s3_server, s3_location, monkeypatch
):
    monkeypatch.setattr(opening, "AGAIN_SECONDS", 0.05)
    with closing(host(s3_location, s3_server.endpoint)) as other:
        other.save("a", TOKENS)
        away = socket.socket()  # bound, so that the port is ours, and not listening: refused
        away.bind(("127.0.0.1", 0))
        with closing(host(s3_location, f"http://127.0.0.1:{away.getsockname()[1]}")) as toy:
            assert list(toy.cache.health().troubles) == ["s3"]
            assert toy.load("early", prompt(CHUNKS * CHUNK + 1, 3))[0] == 0, "a miss, not an error"
            toy.save("before", OWN)
            assert toy.load("own", OWN)[::2] == (CHUNKS * CHUNK, True), "DRAM serves"
            with DelayProxy(s3_server.port, listener=away):
                until(lambda: toy.cache.health().status == "ok")
                assert toy.load("late", TOKENS)[::2] == (CHUNKS * CHUNK, True)
                assert toy.cache.metrics.get("hit_tokens", tier="s3") == CHUNKS * CHUNK
                more = prompt(CHUNKS * CHUNK + 1, 2)
                toy.save("after", more)
                assert other.load("b", more)[::2] == (CHUNKS * CHUNK, True)
