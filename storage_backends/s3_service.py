"""The S3 service behind the store: how it is named, and how a client of it is made."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvtier.errors import ConfigError, check_known
from kvtier.identity.record import RecordId
from kvtier.storage_backends.s3_errors import CREDENTIALS
from kvtier.tiers.store import Option

_KEY_HEX: Final = 64  # characters of a name that are the chunk key; the part follows a dash
_NAME: Final = re.compile(r"([0-9a-f]{64})-([0-9a-f]{20})")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()/=-]{0,512}")

PRICES: Final = {"PUT": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0}
"""US dollars a request: S3 Standard, us-east-1, aws.amazon.com/s3/pricing, 2025."""


class Place(NamedTuple):
    """Where records lie. The prefix is empty, or ends in a slash."""

    bucket: str
    prefix: str


class Settings(NamedTuple):
    """The values of the store's options; the timeouts are seconds."""

    region: str
    endpoint: str
    addressing: str
    connect_timeout: float
    read_timeout: float

    @classmethod
    def read(cls, values: Mapping[str, Any], known: Mapping[str, Option]) -> Settings:
        """Take the options that were given, and defaults. Raises ConfigError for unknown ones."""
        check_known("option of s3", values, known, CREDENTIALS)
        return cls(**{name: values.get(name, known[name].default) for name in cls._fields})


def parse_endpoint(text: str) -> str:
    """Return a checked URL of a service. Raises ConfigError."""
    if "@" in text:  # and the message must not repeat it
        raise ConfigError(f"credentials do not belong in a URL; {CREDENTIALS}")
    try:
        url = urlsplit(text)
        sound = url.port != 0 and url.scheme in ("http", "https") and bool(url.hostname)
    except ValueError:
        sound = False
    if not sound or url.query or url.path.strip("/"):
        raise ConfigError(f"{text!r} is not an endpoint; write it like https://host:port")
    return text.rstrip("/")


def parse_addressing(text: str) -> str:
    """Return how buckets are named in URLs. Raises ConfigError."""
    if text not in ("path", "virtual"):
        raise ConfigError(
            f"addressing={text!r} is neither path (https://host/bucket) nor virtual "
            "(https://bucket.host)"
        )
    return text


def parse_location(location: str) -> Place:
    """Read ``//bucket/prefix``. Raises ConfigError, which never repeats a password."""
    if "@" in location:
        raise ConfigError(f"credentials do not belong in a URL; {CREDENTIALS}")
    bucket, _, prefix = location.removeprefix("//").partition("/")
    if not location.startswith("//") or not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"'s3:{location}' names no bucket: 3 to 63 small letters, digits, dots and hyphens; "
            "write the tier like s3://bucket/prefix"
        )
    if bucket.endswith("--x-s3"):
        raise ConfigError(
            f"{bucket} is a directory bucket, whose requests are signed otherwise; use another"
        )
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"the prefix {prefix!r} is too long, or has characters that not every S3 service "
            "takes; use letters, digits and - _ . /"
        )
    prefix = prefix.strip("/")
    if prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/")):
        raise ConfigError(
            f"the prefix {prefix!r} has a step that is empty, . or .., which S3 services take for "
            "different objects; leave it out"
        )
    return Place(bucket, prefix and f"{prefix}/")


def object_name(name: RecordId) -> str:
    """Return the name of a record's object, below the prefix: key and part in hex."""
    text = name.hex()
    return f"{text[:_KEY_HEX]}-{text[_KEY_HEX:]}"


def record_of(text: str) -> RecordId | None:
    """Return the record of which that is the object's name; None for a stranger's."""
    found = _NAME.fullmatch(text)
    return bytes.fromhex(found[1] + found[2]) if found else None


def connect(settings: Settings) -> Any:
    """Return a client; nothing is sent yet."""
    # boto3 takes a third of a second to import: only who uses this tier pays.
    from botocore.config import Config

    region, endpoint, addressing, connect_timeout, read_timeout = settings
    session = new_session()

    def build(*, sign_payload: bool) -> Any:
        own: dict[str, object] = {"payload_signing_enabled": sign_payload}
        if addressing or endpoint:  # a service not AWS's rarely has a host name per bucket
            own["addressing_style"] = addressing or "path"
        return session.client(
            "s3",
            region_name=region or session.region_name or ("us-east-1" if endpoint else None),
            endpoint_url=endpoint or None,
            config=Config(
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                retries={"total_max_attempts": 1},  # what is tried again, Sender does
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3=own,
            ),
        )

    # Where TLS does not guard the payload, its signature must.
    plain = endpoint.startswith("http:")
    client = build(sign_payload=plain)
    # The environment may name an endpoint too: only the client knows which.
    if not plain and not client.meta.endpoint_url.startswith("https:"):
        client = build(sign_payload=True)
    client.meta.events.register_last("before-parameter-build.s3", _stay)
    return client


def new_session() -> Any:
    """Return a session of boto3 for what the environment says now.

    AWS's description of S3 takes it a tenth of a second to read: that is read once in a process.
    """
    import boto3
    import botocore.session

    core = botocore.session.get_session()
    loader = _loader(core.get_config_variable("data_path"))
    core.register_component("data_loader", loader)
    session = boto3.session.Session(botocore_session=core)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds boto3's
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _stay(context: dict[str, Any], **_: object) -> None:
    """Let boto3 follow no bucket to another region: what it does not send would not go there."""
    context["s3_redirect"] = {"redirected": True}
