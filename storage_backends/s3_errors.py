"""What an error of an S3 service means: for a record, for the service, and for who reads of it."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

from kvtier.errors import Corrupt, StoreError
from kvtier.tiers.store import Status, unusable

CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile by AWS_PROFILE, or an instance role"
)
ABSENT_CODES: Final = frozenset({"404", "NoSuchKey", "NotFound"})

_NO_SERVICE: Final = "what answers there is no S3 service: check the endpoint"
_RIGHTS: Final = "let these credentials list, read, write and delete under the prefix"
_REMEDIES: Final = {
    "404": "create the bucket, or correct its name or the endpoint",
    "NoSuchBucket": "create the bucket, or correct its name",
    "401": _RIGHTS,
    "403": _RIGHTS,
    "AccessDenied": _RIGHTS,
    "InvalidAccessKeyId": f"the access key is not known there: {CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key: {CREDENTIALS}",
    "ExpiredToken": "the session token has expired: renew it",
    "InvalidToken": "the session token is not valid there: renew it",
}
_SKEWED: Final = "RequestTimeTooSkewed"
_OTHER_REGION: Final = (
    "PermanentRedirect",
    "301",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
_NO_CREDENTIALS: Final = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
)
_SERVER_ERROR: Final = 500
_BUSY_CODES: Final = frozenset({"429", "SlowDown"})
_FULL_CODES: Final = frozenset({"XMinioStorageFull", "QuotaExceeded"})
_REGION: Final = re.compile(r"[a-z0-9-]{1,32}")


class AbsentError(StoreError):
    """There is no object of that name."""


class BrokenError(StoreError):
    """An answer that is short, late or not what was asked for; the object may be sound."""


class LateError(StoreError):
    """The time that the batch was given is over; that says nothing of the object."""


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
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return str(response.get("Error", {}).get("Code") or status or ""), status


def error_code(error: Exception) -> str:
    """Return the code that the server gave, or the status; empty if it said nothing."""
    return _answer(error)[0]


def contents(page: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what a page of a list has. Raises BrokenError for what any web server may say."""
    if "IsTruncated" not in page:
        raise BrokenError(_NO_SERVICE)
    found: Sequence[Mapping[str, Any]] = page.get("Contents", ())
    return found


def status_of(result: object) -> Status:
    """Return the status that a result, or the error in its place, stands for."""
    if not isinstance(result, Exception):
        return Status.OK
    if isinstance(result, Corrupt):
        return unusable(result)
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
    ours = code in _REMEDIES or code in _OTHER_REGION or code == _SKEWED
    return ours or status == 0 or (status >= _SERVER_ERROR and not _is_full(error))


def unreached(error: Exception) -> bool:
    """Say whether nobody answered, or a service that could not: later it may."""
    from botocore.exceptions import ConnectionClosedError, ProxyConnectionError

    if isinstance(error, (*silence(), ConnectionClosedError, ProxyConnectionError)):
        return True
    code, status = _answer(error)
    return status >= _SERVER_ERROR or code in _BUSY_CODES


def cause_of(error: Exception) -> str:
    """Return a word or two for an error, of which there are few: a metric has one row for each."""
    if isinstance(error, Corrupt):
        return error.cause
    if isinstance(error, LateError):
        return "late"
    from botocore.exceptions import IncompleteReadError, ResponseStreamingError
    from botocore.parsers import ResponseParserError

    broken = (BrokenError, IncompleteReadError, ResponseStreamingError, ResponseParserError)
    if isinstance(error, broken):
        return "broken answer"
    return error_code(error) or type(error).__name__.removesuffix("Error")


def explain(error: Exception, where: str = "") -> str:
    """Return cause and, where one is known, remedy, in one line.

    where: what the operator has named, and may have named wrongly; empty once it was reached.
    """
    cause = " ".join(_cause(error).split()) or type(error).__name__
    remedy = _remedy(error, where)
    return f"{cause}; {remedy}" if remedy else cause


def _cause(error: Exception) -> str:
    """Return what happened: of what a server said its own words, without botocore's."""
    response: Any = getattr(error, "response", None)
    code = error_code(error)
    if not response or not code:
        return str(error)
    message = html.unescape(str(response.get("Error", {}).get("Message") or "")).strip(" .")
    named = f"{code}, {message}" if message else code
    return f"{getattr(error, 'operation_name', 'the request')} was answered by {named}"


def _remedy(error: Exception, where: str) -> str:
    code, name = error_code(error), type(error).__name__
    remedy = _REMEDIES.get(code, "")
    if code == _SKEWED:
        remedy = _skew(error)
    elif code in _OTHER_REGION:
        remedy = f"the bucket lies in another region: name it by region={_region(error)}"
    elif name in _NO_CREDENTIALS:
        remedy = CREDENTIALS
    elif isinstance(error, silence()) and where:
        remedy = f"check {where} for a typing error, and that this host can reach it"
    elif name == "ResponseParserError":
        remedy = _NO_SERVICE
    elif name == "SSLError":
        remedy = _tls_remedy(str(error))
    elif "Region" in name:
        remedy = "name a region like region=eu-central-1"
    elif code.isdecimal() and not remedy and where:  # there was no XML in it
        remedy = "no S3 service has answered: check the endpoint, or try again"
    return remedy


def _headers(error: Exception) -> Mapping[str, str]:
    response: Any = getattr(error, "response", None) or {}
    headers: Mapping[str, str] = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _region(error: Exception) -> str:
    """Return the region that the server names; nothing if it names none."""
    response: Any = getattr(error, "response", None) or {}
    said = _headers(error).get("x-amz-bucket-region") or response["Error"].get("Region") or ""
    return said if _REGION.fullmatch(said) else ""


def _skew(error: Exception) -> str:
    """Say how far this host's clock is from the server's, in minutes: the line must not vary."""
    try:
        ahead = _now() - parsedate_to_datetime(_headers(error)["date"])
        minutes = round(ahead.total_seconds() / 60)
    except (KeyError, TypeError, ValueError):
        minutes = 0
    if not minutes:
        return "set the clock of this host, or the server's"
    way = "ahead of" if minutes > 0 else "behind"
    return f"this host's clock is {abs(minutes)} min {way} the server's: set it, by NTP for example"


def _now() -> datetime:
    return datetime.now(UTC)


def _tls_remedy(said: str) -> str:
    if "ALERT" in said:
        return "it ends the handshake: check that host and port are the service's"
    if "CERTIFICATE_VERIFY_FAILED" not in said:
        return "nothing that speaks TLS answers there: check the port, or write http://"
    if "mismatch" in said:
        return "name the endpoint as its certificate does"
    if "expired" in said or "not yet valid" in said:
        return "renew its certificate, or set this host's clock"
    return "name the authority that signed its certificate by AWS_CA_BUNDLE"
