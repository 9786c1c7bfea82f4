"""What integration tests share: a toy engine, an NVMe directory, an S3 server and its bucket."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigError, Unreachable
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.mortal import Mortal
from kvtier.testing.seaweed import SeaweedServer
from kvtier.testing.toy import Toy, dram, opened
from kvtier.tiers.store import Write

_numbers = itertools.count()


@pytest.fixture
def toy() -> Iterator[Toy]:
    """Return a toy engine on a cache with dram for 32 chunks."""
    one = opened(dram(32))
    yield one
    one.close()


@pytest.fixture
def folder(tmp_path) -> str:
    """Return the URL of an lmdb tier in a new directory."""
    return f"lmdb:{tmp_path}/kv?capacity=64MiB"


@pytest.fixture
def daemon(nursery) -> Iterator[Mortal]:
    """Return a daemon of DRAM alone, to be killed and stopped."""
    one = Mortal(nursery)
    yield one
    one.close()


@pytest.fixture
def durable(nursery, folder) -> Iterator[Mortal]:
    """Return a daemon that keeps what is flushed, whatever happens to it."""
    one = Mortal(nursery, dram(64), f"{folder}&durability=each")
    yield one
    one.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """Return a running S3 server, or say that it is not installed."""
    server = SeaweedServer()
    try:
        server.__enter__()
    except ConfigError as absent:
        pytest.skip(str(absent))
    yield server
    server.close()


@pytest.fixture(scope="session")
def s3_bucket(s3_server) -> str:
    """Return a bucket that all tests share; each takes a prefix of its own."""
    return s3_server.create_bucket("kvtier-tests")


@pytest.fixture
def s3_location(s3_bucket) -> str:
    """Return a location that no other test uses."""
    return f"//{s3_bucket}/test-{next(_numbers)}/records"


@pytest.fixture
def s3_credentials(s3_server, monkeypatch) -> None:
    """Put the server's credentials into the environment, and nobody else's."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_open(s3_server, s3_location, s3_credentials):
    """Open stores, at the server unless told otherwise, that are closed at the end."""
    stores = []

    def open_at(location: str = s3_location, **options) -> S3Store:
        stores.append(S3Store.open(location, None, {"endpoint": s3_server.endpoint, **options}))
        return stores[-1]

    yield open_at
    for store in stores:
        store.close()


@pytest.fixture
def s3_hasty(s3_open):
    """Open stores that wait for less than a busy machine may take to answer: it is tried again."""

    def open_at(**options) -> S3Store:
        give_up = time.monotonic() + 30.0
        while time.monotonic() < give_up:
            with contextlib.suppress(Unreachable):
                return s3_open(**options)
        return s3_open(**options)

    return open_at


class Objects:
    """The objects of a location as they are, seen past the store."""

    def __init__(self, client, location) -> None:
        self.client = client
        self.bucket, _, self.prefix = location.removeprefix("//").partition("/")

    def name(self, each: Write) -> dict[str, str]:
        part = each.header.id[32:].hex()
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{each.header.key.hex()}-{part}"}

    def get(self, each: Write) -> bytes:
        return self.client.get_object(**self.name(each))["Body"].read()

    def put(self, each: Write, body: bytes) -> None:
        self.client.put_object(**self.name(each), Body=body)

    def listed(self) -> list[str]:
        answer = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix)
        return [each["Key"] for each in answer.get("Contents", ())]


@pytest.fixture
def s3_objects_at(s3_server):
    """Return a way to look at, and change, the objects of a location."""
    return lambda location: Objects(s3_server.client(), location)


@pytest.fixture
def s3_objects(s3_objects_at, s3_location) -> Objects:
    """Return the objects of this test's location."""
    return s3_objects_at(s3_location)


@pytest.fixture
def s3_url(s3_server, s3_location) -> str:
    """Return the URL of an s3 tier of this test's location."""
    return f"s3:{s3_location}?capacity=1GiB&admission=through&endpoint={s3_server.endpoint}"
