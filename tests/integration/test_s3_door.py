"""The S3 store at its door: what is wrong is said, with its remedy."""

from __future__ import annotations

import datetime as dt
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import botocore.auth
import pytest

from kvtier.errors import ConfigError, Unavailable
from kvtier.storage_backends import s3_errors, s3_service
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.bounded import own_clock
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.toy import dram, opened, prompt

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CONNECT, READ = 0.3, 0.5
HASTY = {"connect_timeout": CONNECT, "read_timeout": READ}
BUSY = 4.0  # what a machine with other work may take besides, to make a client for one
DEADLINE = 2 * (CONNECT + READ) + 1.5 + BUSY  # of opening where nobody answers
TOKENS = 400


@pytest.fixture
def proxy(s3_server):
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


def cause(endpoint: str | None, location: str, **options) -> str:
    where = {} if endpoint is None else {"endpoint": endpoint}
    began = own_clock()
    with pytest.raises(ConfigError) as refused:
        S3Store.open(location, None, {**where, **options})
    assert own_clock() - began < DEADLINE
    return str(refused.value)


def test_a_missing_bucket(s3_server):
    assert "create the bucket" in cause(s3_server.endpoint, "//no-such-bucket/x")


def test_a_wrong_secret(s3_server, s3_location, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    said = cause(s3_server.endpoint, s3_location)
    assert "the secret key does not belong to the access key" in said
    assert "wrong-and-secret" not in said


def test_an_unknown_access_key(s3_server, s3_location, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "the access key is not known" in cause(s3_server.endpoint, s3_location)


def test_no_credentials(s3_server, s3_location, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "set AWS_ACCESS_KEY_ID" in cause(s3_server.endpoint, s3_location)


def test_an_unreachable_endpoint(s3_location):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert f"check {endpoint}" in cause(endpoint, s3_location)


def test_an_endpoint_that_never_answers(proxy, s3_location):
    proxy.inject(Fault.HANG)
    assert "can reach it" in cause(proxy.endpoint, s3_location, **HASTY)


def test_a_malformed_region(s3_location):
    assert "name a region" in cause(None, s3_location, region="not a region")


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("//user:hunter2@bucket/prefix", {}),
        ("//user:hunter2/and/more@bucket/prefix", {}),
        ("//bucket/prefix", {"secret_key": "hunter2"}),
        ("//bucket/prefix", {"aws_access_key_id": "hunter2"}),
    ],
)
def test_a_secret_in_the_url_is_refused_and_not_repeated(location, options):
    with pytest.raises(ConfigError, match="do not belong in a URL") as refused:
        S3Store.open(location, None, options)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "location",
    [
        "bucket/prefix",
        "//",
        "///prefix",
        "//B/x",
        "//b/x",
        "//bucket/a?b",
        "//b--usw2-az1--x-s3/a",
        "//bucket/a//b",
        "//bucket/.",
        "//bucket/../x",
        "//bucket/a/./b",
    ],
)
def test_a_malformed_location_is_refused(location):
    with pytest.raises(ConfigError):
        S3Store.open(location, None, {})


@pytest.mark.parametrize("text", ["https://u:hunter2@host", "u:hunter2@host"])
def test_a_secret_in_the_endpoint_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match="do not belong in a URL") as refused:
        S3Store.OPTIONS["endpoint"].parse(text)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["host:80", "ftp://host", "https://", "https://h:x", "http://[::1", "https://host/path"]
)
def test_a_malformed_endpoint_is_refused(text):
    with pytest.raises(ConfigError, match="write it like"):
        S3Store.OPTIONS["endpoint"].parse(text)


@pytest.mark.parametrize("text", ["0s", "61m"])
def test_a_timeout_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="above zero and at most 1h"):
        S3Store.OPTIONS["read_timeout"].parse(text)


@pytest.mark.parametrize(("endpoint", "signed"), [("https", False), ("http", True)])
def test_the_payload_is_unsigned_over_tls_only(monkeypatch, endpoint, signed):
    from kvtier.storage_backends.s3_service import Settings, connect

    for settings in (
        Settings("", f"{endpoint}://localhost:9", "", 1.0, 1.0),
        Settings("", "", "", 1.0, 1.0),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"{endpoint}://localhost:9")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        client = connect(settings)
        assert client.meta.config.s3["payload_signing_enabled"] is signed
        client.close()


def test_importing_kvtier_does_not_import_boto3(root):
    script = "import sys, kvtier.storage_backends.s3; sys.exit('boto3' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


# -------------------------------------------------------------------------- no S3 service, no TLS


@pytest.fixture
def web() -> Iterator[Callable[..., str]]:
    """Return a way to start a web server that has one answer to everything; it gives its URL."""
    servers = []

    def start(status: int, body: bytes = b"", **headers: str) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked += 1
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_PUT = do_GET  # noqa: N815  (the names that http.server looks for)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.asked = 0
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    start.asked = lambda: [server.asked for server, _ in servers]
    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(20)
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (200, b"<html>Welcome!</html>", "no S3 service"),
        (200, b"", "no S3 service"),
        (200, b"{}", "no S3 service"),
        (302, b"", "no S3 service"),
        (400, b"The plain HTTP request was sent to HTTPS port", "no S3 service"),
        (404, b"<html>", "the endpoint"),
        (403, b"<html>", "let these credentials"),
        (503, b"", "try again"),
    ],
)
def test_what_is_no_s3_service(web, s3_location, status, body, says):
    assert says in cause(web(status, body), s3_location)


def test_a_list_that_is_none_is_no_empty_bucket(s3_open, monkeypatch):
    """What may be deleted follows from lists: a web page in their place must not pass for one."""
    store = s3_open()
    for page in ({}, {"Contents": []}):
        pages = SimpleNamespace(paginate=lambda page=page, **_: [page])
        monkeypatch.setattr(store._client, "get_paginator", lambda _, pages=pages: pages)
        for verb in (store.scan, store.medium().listed):
            with pytest.raises(Unavailable, match="no S3 service"):
                list(verb())


REGION_ERROR = b"<Error><Code>%b</Code><Message>no</Message>%b</Error>"


@pytest.mark.parametrize(
    ("status", "code", "more", "headers", "named"),
    [
        (301, b"PermanentRedirect", b"", {"x_amz_bucket_region": "eu-west-9"}, "eu-west-9"),
        (400, b"AuthorizationHeaderMalformed", b"<Region>eu-west-9</Region>", {}, "eu-west-9"),
        (400, b"AuthorizationHeaderMalformed", b"<Region>a&amp;b=c</Region>", {}, ""),
        (400, b"IllegalLocationConstraintException", b"", {}, ""),
    ],
)
def test_another_region_is_named_and_not_gone_to(
    web, s3_location, status, code, more, headers, named
):
    """Were it followed, opening would work, and every read fail."""
    said = cause(web(status, REGION_ERROR % (code, more), **headers), s3_location)
    assert said.endswith(f"the bucket lies in another region: name it by region={named}")
    assert web.asked() == [1]


def test_if_it_were_gone_to_that_would_be_seen(web, s3_location, monkeypatch):
    """The twin of the test before, without the guard."""
    monkeypatch.setattr(s3_service, "_stay", lambda **_: None)
    moved = REGION_ERROR % (b"PermanentRedirect", b"")
    cause(web(301, moved, x_amz_bucket_region="eu-west-9"), s3_location)
    assert web.asked() == [2]


def test_a_redirect_goes_round_in_no_circle(web, s3_location):
    location = web(307, Location="/elsewhere")
    assert "no S3 service" in cause(location, s3_location)
    assert web.asked() == [1]


def test_a_proxy_that_is_gone_is_named(s3_server, s3_location, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        place = f"127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("HTTP_PROXY", f"http://{place}")
        monkeypatch.setenv("http_proxy", f"http://{place}")
        monkeypatch.delenv("NO_PROXY")
        assert f"by the proxy {place}" in cause(s3_server.endpoint, s3_location)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("CERTIFICATE_VERIFY_FAILED: self-signed certificate", "AWS_CA_BUNDLE"),
        ("CERTIFICATE_VERIFY_FAILED: Hostname mismatch", "as its certificate does"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "this host's clock"),
    ],
)
def test_what_is_wrong_with_tls_has_its_remedy(said, remedy):
    from botocore.exceptions import SSLError

    error = SSLError(endpoint_url="https://host", error=said)
    assert remedy in s3_errors.explain(error, "https://host")


# ------------------------------------------------------------------------------------- the clock


@pytest.fixture
def clock(monkeypatch) -> Callable[[int], None]:
    """Return a way to set the clock of this host wrong, by so many minutes."""
    here = dt.datetime.now

    def wrong(minutes: int) -> None:
        by = dt.timedelta(minutes=minutes)

        def utc(remove_tzinfo: bool = True) -> dt.datetime:
            return (here(dt.UTC) + by).replace(tzinfo=None if remove_tzinfo else dt.UTC)

        monkeypatch.setattr(botocore.auth, "get_current_datetime", utc)
        monkeypatch.setattr(s3_errors, "_now", lambda: utc(remove_tzinfo=False))

    return wrong


@pytest.mark.parametrize(("minutes", "says"), [(40, "40 min ahead of"), (-90, "90 min behind")])
def test_a_clock_that_is_wrong(s3_server, s3_location, clock, minutes, says):
    clock(minutes)
    said = cause(s3_server.endpoint, s3_location)
    assert "RequestTimeTooSkewed" in said
    assert f"this host's clock is {says} the server's: set it" in said


def test_a_clock_that_goes_wrong_later_makes_counted_misses(s3_url, clock, caplog):
    toy = opened(dram(64), s3_url)
    tokens = prompt(TOKENS)
    toy.save("a", tokens)
    toy.cache.clear("dram")
    clock(40)
    _, loaded, exact = toy.load("b", tokens)
    assert exact
    assert not loaded
    assert toy.cache.metrics.get("tier_faults", tier="s3", reason="RequestTimeTooSkewed") >= 1
    assert "40 min ahead" in caplog.text
    clock(0)
    toy.close()
