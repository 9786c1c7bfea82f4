"""A depot that is opened for no namespace: tiers are indexed before anybody says what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.clock import monotonic
from kvtier.config import Config
from kvtier.daemon import messages
from kvtier.depot import Depot
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import Header, PartName, checksum, record_id
from kvtier.identity.shape import chunk_shape
from kvtier.memory.packed import unpack_slots
from kvtier.metrics import Metrics
from kvtier.opening import open_tiers
from kvtier.seams import ThreadFlow
from kvtier.testing.small_daemon import CHUNK, PART_BYTES, SmallDaemon, prompt
from kvtier.testing.toy import NAMESPACE
from kvtier.tiers.store import Status, Write

SLOTS = 16


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb:{tmp_path / 'kv'}?capacity=4MiB"


def fetched(client, text: str, chunks: int) -> int:
    """Bring a prompt up; return how many chunks have come, and leave their slots with `client`."""
    fields = (chunks * CHUNK, chunks, False, 0, 10.0, 60.0, False)
    answer = client.ask(messages.Fetch(client.desk, prompt(text, chunks), *fields))
    client.slots = unpack_slots(answer.slots)
    return int(answer.tokens) // CHUNK


def test_what_a_durable_tier_holds_is_there_for_whoever_joins_later(url):
    daemon = SmallDaemon(SLOTS, url)
    client = daemon.client(1)
    client.join()
    client.reserve("a", 3)
    plan, _ = client.reserve("b", 3)
    for slot in client.slots:
        daemon.depot.arena.view(slot.offset, 5)[:] = b"bytes"
    client.settle(plan)
    assert client.ask(messages.Leave(client.desk)).value
    daemon.restart()
    try:
        client.connect()
        client.join()
        assert client.match("a", 3) == 0
        assert client.match("b", 3) == 3
        assert fetched(client, "b", 3) == 3
        views = [daemon.depot.arena.view(slot.offset, 5) for slot in client.slots]
        assert [bytes(view) for view in views] == [b"bytes"] * 3
    finally:
        daemon.close()


def test_a_record_that_lies_about_its_size_is_a_miss_and_costs_nobody(url):
    """It was indexed by what it says of itself; it is read by what the model's geometry says."""
    probe = SmallDaemon(SLOTS)
    other = probe.client(1)
    other.join()
    digest = probe.depot.catalog._owners.digests[1]
    probe.close()
    keys = [prompt("a", 3).keys[at : at + 32] for at in (0, 32, 64)]
    data = bytearray(2 * PART_BYTES)
    sizes = [PART_BYTES, 2 * PART_BYTES, PART_BYTES]
    headers = [
        Header(
            namespace=digest,
            key=key,
            parent=record_id(keys[depth - 1], PartName()) if depth else None,
            depth=depth,
            part=PartName(),
            raw_bytes=size,
            stored_bytes=size,
            raw_sum=checksum(bytes(size)),
            stored_sum=checksum(bytes(size)),
        )
        for depth, (key, size) in enumerate(zip(keys, sizes, strict=True))
    ]

    config = Config.from_urls(["dram:1MiB", url])
    (tier,) = open_tiers(config, ThreadFlow(), Metrics(), monotonic, ()).values()
    writes = [Write(head, memoryview(data)[: head.raw_bytes]) for head in headers]
    assert set(tier.store.write_many(writes)) == {Status.OK}
    tier.close()

    daemon = SmallDaemon(SLOTS, url)
    try:
        client = daemon.client(1)
        client.join()
        assert client.match("a", 3) == 3
        assert fetched(client, "a", 3) == 1
        assert client.match("a", 3) == 1
        assert client.save("a", 3) == 0
        assert client.match("a", 3) == 3
    finally:
        daemon.close()


def test_a_tier_below_one_chunk_is_refused_when_the_model_is_known(tmp_path):
    daemon = SmallDaemon(4096, f"memory:x?capacity={2 * PART_BYTES}B")
    try:
        client = daemon.client(1)
        with pytest.raises(ConfigError, match="memory capacity 8 KiB is below one chunk"):
            client.join(shards=1, geometry=large(4))
        assert client.join()
        assert daemon.depot._caches == 2
    finally:
        daemon.close()


def large(layers: int):

    return Geometry(
        (Component(layers, 1, 128),), dtype="int8", block_tokens=(CHUNK,), chunk_tokens=CHUNK
    )


def test_whoever_opens_it_leaves_it():
    config = Config.from_urls(["dram:1MiB"])

    depot = Depot.open(config, monotonic, ThreadFlow())
    shape = chunk_shape(NAMESPACE.geometry)
    depot.join(NAMESPACE, shape)
    depot.leave()
    assert not depot.arena.closed
    depot.leave(flush=False)
    assert depot.arena.closed
    with pytest.raises(MisuseError, match="closed"):
        depot.join(NAMESPACE, shape)
