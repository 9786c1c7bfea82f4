"""One S3 server for all integration tests, and a bucket for each that asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.seaweed import SeaweedServer

_numbers = itertools.count()


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
