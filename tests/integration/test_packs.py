"""Packed tiers on a real S3 server: what hosts write, find and read there, and what it costs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from msgspec import structs

from kvtier.codecs.known import LOSSLESS
from kvtier.identity.record import HEADER_BYTES, Header
from kvtier.metrics import Metrics
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, Toy, dram, opened, prompt
from kvtier.tiers import places
from kvtier.tiers.coding import Coding
from kvtier.tiers.exact import Wanted, verify
from kvtier.tiers.pack import CODEC_SIZED_PACK
from kvtier.tiers.packer import Packer
from kvtier.tiers.store import Span, Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CHUNKS = 20
TOKENS = prompt(CHUNKS * CHUNK + 1)


@pytest.fixture
def url(s3_server, s3_location) -> str:
    return f"s3:{s3_location}?capacity=1GiB&admission=through&endpoint={s3_server.endpoint}"


@pytest.fixture
def host():
    """Open hosts with room for all of a prompt, which are closed at the end."""
    toys: list[Toy] = []

    def opened_at(url: str) -> Toy:
        toys.append(opened(dram(2 * CHUNKS), url))
        return toys[-1]

    yield opened_at
    for toy in toys:
        toy.close()


def sizes(server, location: str) -> list[int]:
    """Return the sizes of the objects below a location, in chunks."""
    bucket, _, prefix = location.removeprefix("//").partition("/")
    listed = server.client().list_objects_v2(Bucket=bucket, Prefix=prefix)
    return sorted(each["Size"] // CHUNK_BYTES for each in listed.get("Contents", ()))


def whole(client, bucket: str, prefix: str) -> dict[str, bytes]:
    """Return all objects below a prefix."""
    listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
    return {
        each["Key"]: client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read()
        for each in listed
    }


def test_what_one_host_packed_another_finds_and_loads(host, url, s3_server, s3_location):
    host(url).save("a", TOKENS)
    assert sizes(s3_server, s3_location) == [4, 16]
    before = s3_server.traffic()
    other = host(url)
    assert other.load("b", TOKENS)[::2] == (CHUNKS * CHUNK, True)
    assert other.cache.metrics.get("hit_tokens", tier="s3") == CHUNKS * CHUNK
    asked = s3_server.traffic()
    assert asked.requests - before.requests <= 1 + 32 + 2, "a list, two rounds, a read each"


def test_a_host_that_has_the_beginning_loads_the_rest(host, url):
    host(url).save("a", TOKENS)
    other = host(url)
    other.save("head", TOKENS[: 3 * CHUNK])
    assert other.load("rest", TOKENS)[::2] == (CHUNKS * CHUNK, True)


def test_two_hosts_that_write_the_same_write_one_object(host, url, s3_server, s3_location):
    for toy in (host(url), host(url)):
        toy.save("a", TOKENS)
    assert sizes(s3_server, s3_location) == [4, 16]


def test_a_prompt_that_grows_is_never_written_twice(host, url, s3_server, s3_location):
    toy = host(url)
    for chunks in (3, 5, 12):
        toy.save(f"to {chunks}", TOKENS[: chunks * CHUNK])
    assert sizes(s3_server, s3_location) == [1, 1, 1, 1, 2, 2, 4]
    other = host(url)
    assert other.load("b", TOKENS)[::2] == (12 * CHUNK, True)


def test_packs_that_were_spoilt_are_a_miss_once_and_mended(host, url, s3_server, s3_location):
    host(url).save("a", TOKENS)
    client = s3_server.client()
    bucket, _, prefix = s3_location.removeprefix("//").partition("/")
    for each in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        body = bytearray(client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read())
        body[-CHUNK_BYTES // 2] ^= 1  # in its last chunk
        client.put_object(Bucket=bucket, Key=each["Key"], Body=bytes(body))
    other = host(url)
    offered, loaded, exact = other.load("b", TOKENS)
    assert exact
    assert loaded.tokens == offered == (16 - 1) * CHUNK
    assert other.cache.metrics.get("corrupt_records", tier="s3") == 2
    other.save("b", TOKENS)
    assert sizes(s3_server, s3_location) == [4, 16], "mended where they lay"
    assert host(url).load("c", TOKENS)[::2] == (CHUNKS * CHUNK, True)


def test_an_invalidated_prompt_is_not_found_again(host, url, s3_server, s3_location):
    toy = host(url)
    toy.save("a", TOKENS)
    assert toy.cache.invalidate(TOKENS, timeout=20).unconfirmed == 0
    assert sizes(s3_server, s3_location) == []
    assert host(url).load("b", TOKENS)[0] == 0


def test_a_prompt_is_invalidated_in_packs_that_others_wrote_with_other_tails(
    host, url, s3_server, s3_location
):
    """What is removed here is read from no pack of theirs, and that pack goes when it is met."""
    longer = np.concatenate([TOKENS[: 8 * CHUNK], prompt(8 * CHUNK + 1, 7)])
    host(url).save("a", longer)
    assert sizes(s3_server, s3_location) == [16]
    other = host(url)
    other.cache.invalidate(TOKENS[: 8 * CHUNK + 1], timeout=20)
    assert other.load("b", longer)[0] == 0
    assert other.cache.purge(timeout=20).unconfirmed == 0
    assert sizes(s3_server, s3_location) == []


def test_if_packs_with_other_tails_were_taken_it_would_come_back(host, url, monkeypatch):
    """The twin."""
    monkeypatch.setattr(places, "_DELETED", 0)
    longer = np.concatenate([TOKENS[: 8 * CHUNK], prompt(8 * CHUNK + 1, 7)])
    host(url).save("a", longer)
    other = host(url)
    other.cache.invalidate(TOKENS[: 8 * CHUNK + 1], timeout=20)
    assert other.load("b", longer)[0] == 16 * CHUNK


def test_a_purged_namespace_leaves_no_pack(host, url, s3_server, s3_location):
    host(url).save("a", TOKENS)
    assert host(url).cache.purge(timeout=20).unconfirmed == 0
    assert sizes(s3_server, s3_location) == []


def test_a_tier_above_its_capacity_lets_packs_go_whole(host, url, s3_server, s3_location):
    toy = host(url.replace("1GiB", f"{64 * (CHUNK_BYTES + 300)}B"))
    for seed in range(5):
        toy.save(f"prompt {seed}", prompt(CHUNKS * CHUNK + 1, seed))
    left = sizes(s3_server, s3_location)
    residue = toy.cache.figures()['kvtier_pack_residue_parts{tier="s3"}']
    assert sum(left) <= 64 + residue
    assert set(left) <= {1, 2, 4, 8, 16}
    assert toy.cache.metrics.get("evicted_parts", tier="s3") >= 36


def test_answers_stay_exact_while_the_server_fails(host, s3_server, s3_location):
    with DelayProxy(s3_server.port) as proxy:
        where = f"endpoint={proxy.endpoint}&connect_timeout=300ms&read_timeout=500ms"
        url = f"s3:{s3_location}?capacity=1GiB&admission=through&{where}"
        host(url).save("a", TOKENS)
        other = host(url)
        for fault in (Fault.RESET, Fault.SHORT, Fault.UNAVAILABLE, Fault.XML_ERROR, Fault.DENIED):
            proxy.inject(fault, "GET")
            match = other.cache.match(TOKENS)
            lease = other.cache.fetch(match, timeout=5, deadline=5).result(10)
            assert lease is None or lease.tokens == 0
        proxy.inject(Fault.NONE)


def test_prompts_that_part_within_a_pack_each_load_what_is_theirs(host, url):
    shared = TOKENS[: 6 * CHUNK]
    mine = np.concatenate([shared, prompt(8 * CHUNK + 1, 7)])
    yours = np.concatenate([shared, prompt(8 * CHUNK + 1, 8)])
    toy = host(url)
    toy.save("mine", mine)
    toy.save("yours", yours)
    other = host(url)
    assert other.load("mine", mine)[::2] == (14 * CHUNK, True)
    assert other.load("yours", yours, first_block=64)[2]


def test_a_removal_of_a_tail_takes_all_of_its_pack(host, url, s3_server, s3_location):
    toy = host(url)
    toy.save("a", TOKENS)
    assert toy.cache.invalidate(TOKENS, first=18, timeout=20).unconfirmed == 0
    assert sizes(s3_server, s3_location) == [16]
    assert host(url).load("b", TOKENS)[::2] == (16 * CHUNK, True)


def test_if_only_what_nobody_needs_were_deleted_the_tail_would_come_back(host, url, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Packer, "delete_many", Packer.evict_many)
    toy = host(url)
    toy.save("a", TOKENS)
    toy.cache.invalidate(TOKENS, first=18, timeout=20)
    assert host(url).load("b", TOKENS)[::2] == (CHUNKS * CHUNK, True)


def test_a_pack_of_a_newer_version_is_a_counted_miss_and_stays(host, url, s3_server, s3_location):
    host(url).save("a", TOKENS)
    client = s3_server.client()
    bucket, _, prefix = s3_location.removeprefix("//").partition("/")
    for each in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        body = bytearray(client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read())
        newer = structs.replace(Header.unpack(body), codec=CODEC_SIZED_PACK + 1)
        members = bytes(reversed(body[HEADER_BYTES:]))  # laid out as nobody here knows
        client.put_object(Bucket=bucket, Key=each["Key"], Body=newer.pack() + members)
    other = host(url)
    assert other.load("b", TOKENS)[1:] == (None, True)
    assert other.cache.metrics.get("newer_records", tier="s3") > 0
    assert other.cache.metrics.get("corrupt_records", tier="s3") == 0
    assert "in s3, of a version that is not read here yet" in other.cache.explain(TOKENS).end.why
    before = whole(client, bucket, prefix)
    other.save("b", TOKENS)
    assert whole(client, bucket, prefix) == before, "hosts of that version read them"


def test_what_is_known_of_a_bucket_is_bounded_and_found_again(host, url, monkeypatch):
    monkeypatch.setattr("kvtier.flow._MOST_KNOWN", 8)
    toy = host(url)
    toy.save("a", TOKENS)
    give_up = time.monotonic() + 20
    while toy.cache.figures()['kvtier_tier_parts{tier="s3"}'] > 8:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    toy.cache.clear("dram", timeout=20)
    offered, loaded, exact = toy.load("b", TOKENS)
    assert (offered, loaded.tokens, exact) == (CHUNKS * CHUNK, CHUNKS * CHUNK, True)


def eight(first: int) -> list[Write]:
    """Return a chain of eight records of half a MiB."""
    out: list[Write] = []
    for depth in range(first, first + 8):
        header, data = make_record(depth, 1 << 19, like_kv=True)
        out.append(Write(structs.replace(header, parent=out[-1].header.id if out else None), data))
    return out


def test_spans_that_follow_each_other_are_one_request(s3_open, s3_server, monkeypatch):
    monkeypatch.setattr(places, "_SPAN_BYTES", 1 << 20)
    packer, records = Packer(s3_open()), eight(0)
    packer.write_many(records)
    before = s3_server.traffic()
    assert read(packer, records) == [Status.OK] * 8
    assert read(packer, records[:2] + records[4:]) == [Status.OK] * 6
    assert s3_server.traffic().requests - before.requests == 1 + 2


@pytest.fixture
def another_form(s3_open):
    """Return a packer that has met raw packs alone, and records that lie in an encoded one."""
    store = s3_open()
    before, after = eight(0), eight(8)
    Packer(store).write_many(before)
    writer, here = Packer(store), Packer(store)
    writer.coding = Coding("s3", LOSSLESS, lambda: 0.0, Metrics(), always=True)
    writer.coding.admit(NAMESPACE)
    writer.write_many(after)
    for some in (before, after):
        here.learn([one.header.id for one in some], 1 << 19)
    assert read(here, before) == [Status.OK] * 8
    return store, here, after


def read(packer: Packer, records: list[Write]) -> list[Status]:
    buffers = [aligned(len(one.data)) for one in records]
    reads = packer.read_many([one.header.id for one in records], buffers)
    wanted = [
        Wanted(one.header.id, NAMESPACE, one.header.raw_bytes, into)
        for one, into in zip(records, buffers, strict=True)
    ]
    return [verify(*both).status for both in zip(reads, wanted, strict=True)]


def test_a_pack_of_another_form_is_no_fault_and_costs_one_small_request(another_form, s3_server):
    store, here, records = another_form
    before = s3_server.traffic()
    assert read(here, records) == [Status.OK] * 8
    asked = s3_server.traffic()
    assert asked.requests - before.requests <= 4
    assert store.causes.counts() == {}


def test_twin_without_the_length_that_is_meant_it_would_count_as_a_fault(another_form, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.packer.Span", lambda *span: Span(*span[:3]))
    store, here, records = another_form
    assert read(here, records) == [Status.OK] * 8
    assert store.causes.counts() == {"corrupt": 1}
