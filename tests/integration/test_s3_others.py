"""A bucket in which others write, newer versions too, and one that keeps what is deleted."""

from __future__ import annotations

import json
import struct

import pytest

from kvtier.cli.main import run
from kvtier.identity.record import HEADER_BYTES, checksum
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.toy import CHUNK, dram, opened, prompt

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

TOKENS = 400
PACK = 1  # the kind of a codec that says so
VERSIONED = "kvtier-versioned"


# ----------------------------------------------------------- what strangers and newer ones wrote


def newer_record(head: bytes, data: bytes) -> bytes:
    """Return a record as a version that is to come may write it."""
    head = head[:8] + struct.pack("<H", 99) + head[10:-16]
    return head + checksum(head) + data


def newer_pack(head: bytes, data: bytes) -> bytes:
    """Return a pack of a later layout; what is none stays as it is."""
    codec = int.from_bytes(head[10:12], "little")
    if codec >> 8 != PACK:
        return head + data
    head = head[:10] + struct.pack("<H", (codec & 0xFF00) | 99) + head[12:-16]
    return head + checksum(head) + data[::-1]


@pytest.mark.parametrize("newer", [newer_record, newer_pack])
def test_what_a_newer_kvtier_wrote_is_a_counted_miss_and_stays(s3_url, s3_objects, newer):
    tokens = prompt(TOKENS)
    toy = opened(dram(64), s3_url)
    toy.save("a", tokens)
    toy.close()
    client, bucket = s3_objects.client, s3_objects.bucket
    changed = {}
    for key in s3_objects.listed():
        body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        changed[key] = newer(body[:HEADER_BYTES], body[HEADER_BYTES:])
        client.put_object(Bucket=bucket, Key=key, Body=changed[key])
    toy = opened(dram(64), s3_url)
    for turn in range(3):
        _, loaded, exact = toy.load(f"b{turn}", tokens)
        assert exact
        assert loaded is None or loaded.tokens <= CHUNK
    figures = toy.cache.figures()
    toy.close()
    for key, body in changed.items():
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == body
    told = {name: count for name, count in figures.items() if "newer" in name}
    assert sum(told.values()) >= 1, figures
    assert not any("corrupt" in name for name in figures), figures


def test_what_is_a_strangers_outlives_all_that_a_cache_does(s3_url, s3_objects, capsys):
    client, bucket, prefix = s3_objects.client, s3_objects.bucket, s3_objects.prefix
    name = "0" * 64
    keys = [f"{prefix}/{name}", f"{prefix}/{name}-{'0' * 19}", f"{prefix}/notes/{name}-{'0' * 20}"]
    keys += [f"{prefix}/{name.upper()}-{'F' * 20}", f"{prefix}/ä b+c", f"{prefix}x", prefix]
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=b"not yours")
    toy = opened(dram(64), s3_url.replace("1GiB", "20KiB"))
    for seed in range(4):  # so much that it deletes
        toy.save(f"{seed}", prompt(TOKENS, seed))
    toy.cache.invalidate(prompt(TOKENS, 3))
    toy.cache.clear("s3")
    toy.close()
    assert run(["gc", s3_url.replace("1GiB", "1B"), "--orphans-after", "0s"]) == 0
    capsys.readouterr()
    for key in keys:
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"not yours"
    assert len(s3_objects.listed()) == len(keys)


# ------------------------------------------------------------------------- who may only read


def test_who_may_only_read_loads_and_what_it_may_not_is_counted(
    s3_url, s3_server, s3_objects, monkeypatch, capsys
):
    theirs, mine = prompt(TOKENS, 1), prompt(TOKENS, 2)
    toy = opened(dram(64), s3_url)
    toy.save("a", theirs)
    toy.close()
    before = s3_objects.listed()
    for name, value in s3_server.env(reader=True).items():
        monkeypatch.setenv(name, value)
    toy = opened(dram(64), s3_url)
    assert toy.load("b", theirs)[0]
    for turn in range(6):
        toy.save(f"c{turn}", prompt(TOKENS, 10 + turn))
    assert toy.cache.metrics.get("tier_faults", tier="s3", reason="AccessDenied") >= 1
    assert "let these credentials list, read, write and delete" in toy.cache.health().troubles["s3"]
    toy.cache.clear("dram")
    assert toy.load("d", theirs)[::2] == (TOKENS // CHUNK * CHUNK, True), "all the same"
    assert toy.load("e", mine)[1:] == (None, True)
    toy.cache.invalidate(theirs, timeout=1.0)
    toy.close()
    assert run(["gc", s3_url]) == 2
    assert "let these credentials" in capsys.readouterr().err
    assert s3_objects.listed() == before


# --------------------------------------------------------------------------------- old versions


@pytest.fixture(scope="session")
def versioned(s3_server) -> str:
    """Return a bucket that keeps old versions."""
    s3_server.create_bucket(VERSIONED)
    s3_server.client().put_bucket_versioning(
        Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"}
    )
    # Of a bucket's first object it makes a volume first, which may take seconds.
    s3_server.client().put_object(Bucket=VERSIONED, Key="other", Body=b"x")
    return VERSIONED


def rule(**more) -> dict[str, object]:
    expires = {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    return {"ID": "one", "Status": "Enabled"} | expires | more


def ruled(server, bucket: str, rules: list[dict[str, object]]) -> str:
    """Give a bucket these rules, and return the URL of a tier there."""
    where = {"Bucket": bucket}
    if rules:
        server.client().put_bucket_lifecycle_configuration(
            **where, LifecycleConfiguration={"Rules": rules}
        )
    else:
        server.client().delete_bucket_lifecycle(**where)
    # It is slow to keep versions of what many write at once, as the doctor lets them.
    return f"s3://{bucket}/kv?capacity=1GiB&endpoint={server.endpoint}&read_timeout=30s"


TAGGED = {"And": {"Prefix": "kv/", "Tags": [{"Key": "a", "Value": "b"}]}}


@pytest.mark.parametrize(
    ("rules", "keeps"),
    [
        ([], True),
        ([rule(Filter={"Prefix": ""})], False),
        ([rule(Filter={"Prefix": "kv/"})], False),
        ([rule(Prefix="k")], False),
        ([rule(Filter={"Prefix": "other/"})], True),
        ([rule(Filter={"Prefix": ""}, Status="Disabled")], True),
        ([rule(Filter=TAGGED)], True),
        ([{"ID": "x", "Status": "Enabled", "Prefix": "", "Expiration": {"Days": 9}}], True),
    ],
)
def test_a_bucket_that_keeps_old_versions_is_said_at_the_door(
    s3_server, versioned, rules, keeps, caplog
):
    url = ruled(s3_server, versioned, rules)
    opened(dram(4), url).close()
    assert ("NoncurrentVersionExpiration" in caplog.text) == keeps
    assert run(["gc", url]) == (2 if keeps else 0)


def test_rules_that_may_not_be_read_are_named(s3_server, versioned, capsys):
    url = ruled(s3_server, versioned, [rule(Prefix="kv/")])
    with DelayProxy(s3_server.port) as proxy:
        proxy.inject(Fault.DENIED, "?lifecycle")
        assert run(["gc", url.replace(s3_server.endpoint, proxy.endpoint)]) == 2
    assert "let these credentials read its rules" in capsys.readouterr().err


@pytest.mark.parametrize(("rules", "keeps"), [([], True), ([rule(Prefix="kv/")], False)])
def test_the_doctor_says_that_a_bucket_keeps_old_versions(
    s3_server, versioned, rules, keeps, capsys
):
    run(["doctor", "--s3", ruled(s3_server, versioned, rules), "--json"])
    (found,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == "s3"]
    assert ("it keeps old versions" in found["found"]) == keeps


def test_a_bucket_that_keeps_nothing_is_opened_in_silence(s3_url, caplog):
    opened(dram(4), s3_url).close()
    assert not caplog.text
