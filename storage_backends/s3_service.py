"""The S3 service behind the store: how it is named and opened, and what its errors mean."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvtier.errors import ConfigError, Corrupt, StoreError, unknown
from kvtier.identity.record import RecordId
from kvtier.tiers.store import Option, Status
from kvtier.units import parse_seconds

__all__ = [
    "ABSENT_CODES",
    "CREDENTIALS",
    "PRICES",
    "AbsentError",
    "BrokenError",
    "LateError",
    "Place",
    "Settings",
    "cause_of",
    "connect",
    "error_code",
    "explain",
    "object_name",
    "parse_addressing",
    "parse_endpoint",
    "parse_location",
    "parse_timeout",
    "record_of",
    "refused",
    "silence",
    "status_of",
    "weather",
]

_KEY_HEX: Final = 64  # characters of a name that are the chunk key; the part follows a dash
_NAME: Final = re.compile(r"([0-9a-f]{64})-([0-9a-f]{20})")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()/=-]{0,512}")
_SECRETIVE: Final = ("key", "secret", "token", "password", "credential")

CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile by AWS_PROFILE, or an instance role"
)
_NO_CREDENTIALS: Final = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
)
PRICES: Final = {"PUT": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0}
"""US dollars a request: S3 Standard, us-east-1, aws.amazon.com/s3/pricing, 2025."""

_SERVER_ERROR: Final = 500
_FULL_CODES: Final = frozenset({"XMinioStorageFull", "QuotaExceeded"})
ABSENT_CODES: Final = frozenset({"404", "NoSuchKey", "NotFound"})
_REMEDIES: Final = {
    "404": "create the bucket, or correct its name",
    "NoSuchBucket": "create the bucket, or correct its name",
    "403": "let these credentials list, read, write and delete under the prefix",
    "AccessDenied": "let these credentials list, read, write and delete under the prefix",
    "InvalidAccessKeyId": f"the access key is not known there: {CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key: {CREDENTIALS}",
    "ExpiredToken": "the session token has expired: renew it",
    "InvalidToken": "the session token is not valid there: renew it",
    "RequestTimeTooSkewed": "set this host's clock",
    "PermanentRedirect": "the bucket lies in another region: name it by region=",
    "301": "the bucket lies in another region: name it by region=",
    "AuthorizationHeaderMalformed": "the bucket lies in another region: name it by region=",
    "IllegalLocationConstraintException": "the bucket lies in another region: name it by region=",
}


class AbsentError(StoreError):
    """There is no object of that name."""


class BrokenError(StoreError):
    """An answer that is short, late or not what was asked for; the object may be sound."""


class LateError(StoreError):
    """The time that the batch was given is over; that says nothing of the object."""


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
        for name in values:
            if name not in known:
                if any(word in name.lower() for word in _SECRETIVE):
                    raise ConfigError(f"credentials do not belong in a URL; {CREDENTIALS}")
                raise unknown("option", name, known)
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


def parse_timeout(text: str) -> float:
    """Return seconds, more than zero. Raises ConfigError."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise ConfigError(f"the timeout {text!r} must be more than zero, like 5s")
    return seconds


def parse_location(location: str) -> Place:
    """Read ``//bucket/prefix``. Raises ConfigError, which never repeats a password."""
    if "@" in location:
        raise ConfigError(f"credentials do not belong in a URL; {CREDENTIALS}")
    bucket, _, prefix = location.removeprefix("//").partition("/")
    if not location.startswith("//") or not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{location!r} names no bucket: 3 to 63 small letters, digits, dots and hyphens; "
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
    import boto3
    from botocore.config import Config

    region, endpoint, addressing, connect_timeout, read_timeout = settings
    session = boto3.session.Session()

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
    return client


# --------------------------------------------------------------------------- what an error means


@functools.cache
def weather() -> tuple[type[Exception], ...]:
    """Return the errors that a network and a server can cause. Any other is a bug here."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    return (BotoCoreError, ClientError, ResponseParserError, HTTPError, OSError, StoreError)


@functools.cache
def silence() -> tuple[type[Exception], ...]:
    """Return the errors that mean that nobody answered."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError

    return (ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError)


def _answer(error: Exception) -> tuple[str, int]:
    """Return error code and HTTP status of what the server said; empty and 0 if it said nothing."""
    response: Any = getattr(error, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status)


def error_code(error: Exception) -> str:
    """Return the code that the server gave; empty if it said nothing."""
    return _answer(error)[0]


def status_of(result: object) -> Status:
    """Return the status that a result, or the error in its place, stands for."""
    if not isinstance(result, Exception):
        return Status.OK
    if isinstance(result, Corrupt):
        return Status.CORRUPT
    if isinstance(result, AbsentError):
        return Status.ABSENT
    return Status.FULL if _is_full(result) else Status.FAILED


def _is_full(error: Exception) -> bool:
    code, status = _answer(error)
    return status == HTTPStatus.INSUFFICIENT_STORAGE or code in _FULL_CODES


def refused(error: Exception) -> bool:
    """Say whether an error is about the service or the bucket, not about one object."""
    from botocore.exceptions import IncompleteReadError, ResponseStreamingError

    if isinstance(error, (StoreError, IncompleteReadError, ResponseStreamingError)):
        return False
    code, status = _answer(error)
    return code in _REMEDIES or status == 0 or (status >= _SERVER_ERROR and not _is_full(error))


def cause_of(error: Exception) -> str:
    """Return a word or two for an error, of which there are few: a metric has one row for each."""
    if isinstance(error, Corrupt):
        return "corrupt"
    if isinstance(error, LateError):
        return "late"
    from botocore.exceptions import IncompleteReadError, ResponseStreamingError
    from botocore.parsers import ResponseParserError

    broken = (BrokenError, IncompleteReadError, ResponseStreamingError, ResponseParserError)
    if isinstance(error, broken):
        return "broken answer"
    return error_code(error) or type(error).__name__.removesuffix("Error")


def explain(error: Exception, settings: Settings | None = None) -> str:
    """Return cause and, where one is known, remedy, in one line."""
    cause = " ".join(str(error).split()) or type(error).__name__
    remedy = _REMEDIES.get(error_code(error), "")
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        remedy = CREDENTIALS
    elif isinstance(error, silence()) and settings is not None:
        here = settings.endpoint or f"region {settings.region or 'of the AWS environment'}"
        remedy = f"check {here} for a typing error, and that this host can reach it"
    elif name == "ResponseParserError":
        remedy = "what answers there is not an S3 service: check the endpoint"
    elif name == "SSLError":
        remedy = "name the authority that signed its certificate by AWS_CA_BUNDLE"
    elif "Region" in name:
        remedy = "name a region like region=eu-central-1"
    return f"{cause}; {remedy}" if remedy else cause
