"""An S3 bucket as whoever collects there sees it. See ``tiers.collection``."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from kvtier.errors import Unavailable
from kvtier.events import Causes, note
from kvtier.identity.record import Header, RecordId
from kvtier.seams import IoPool
from kvtier.storage_backends.s3_errors import ABSENT_CODES, contents, error_code, explain, weather
from kvtier.storage_backends.s3_service import PRICES, Place
from kvtier.tiers.collection import Listed
from kvtier.tiers.store import Span, Status

CLAIM: Final = ".kvtier-collection"
"""The object below the prefix that says who collects: no record has such a name."""

KEEPS_VERSIONS: Final = (
    "the bucket keeps what is deleted as old versions, and they are paid for; give it a lifecycle "
    "rule with NoncurrentVersionExpiration, and let these credentials read its rules"
)

_TAKEN: Final = frozenset({"412", "PreconditionFailed", "409", "ConditionalRequestConflict"})
_UNKNOWN: Final = frozenset({"501", "NotImplemented"})
_GIGABYTE_USD: Final = 0.023  # a month, as of PRICES


class _Claim(msgspec.Struct):
    owner: str
    seconds: float


class S3Medium:
    """See Medium. headers, spans: how the store reads them; id_of: a record's name by its key."""

    def __init__(
        self,
        client: Any,
        place: Place,
        requests: Causes,
        headers: Callable[[Sequence[RecordId]], list[Header | Status]],
        spans: Callable[[Sequence[Span]], list[Status]],
        id_of: Callable[[str], RecordId | None],
        key_of: Callable[[RecordId], str],
    ) -> None:
        self._client = client
        self._place = place
        self._headers = headers
        self._spans = spans
        self._id_of = id_of
        self._key_of = key_of
        self._owner = secrets.token_hex(8)
        self._requests = requests

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests sent so far, by kind."""
        return self._requests.counts()

    def cost(self) -> tuple[float, float]:
        """See Medium."""
        return sum(
            PRICES.get(kind, 0.0) * count for kind, count in self.requests.items()
        ), _GIGABYTE_USD

    # ---- what lies there

    def listed(self) -> Iterator[Listed]:
        """See Medium. Ages are by the server's clock."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._place.bucket, Prefix=self._place.prefix
        )
        try:
            for page in pages:
                now = _server_time(page)
                for item in contents(page):
                    if item["Key"] == self._place.prefix + CLAIM:
                        continue
                    age = (now - item["LastModified"]).total_seconds()
                    yield Listed(self._id_of(item["Key"]), item["Size"], age)
        except weather() as error:
            raise Unavailable(f"s3://{self._place.bucket}: {explain(error)}") from error

    def headers(self, ids: Sequence[RecordId]) -> list[Header | Status]:
        """See Medium."""
        return self._headers(ids)

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore."""
        return self._spans(spans)

    def remove(self, ids: Sequence[RecordId]) -> list[bool]:
        """See Medium. A thousand at most."""
        from botocore.exceptions import ClientError

        keys = [self._key_of(name) for name in ids]
        try:
            answer = self._client.delete_objects(
                Bucket=self._place.bucket,
                Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True},
            )
        except weather() as error:
            note(explain(error))
            return [False] * len(keys)
        failed = {error.get("Key"): error for error in answer.get("Errors", ())}
        if failed:
            note(explain(ClientError({"Error": next(iter(failed.values()))}, "DeleteObjects")))
        return [key not in failed for key in keys]

    def keeps_versions(self) -> bool:
        """See Medium; False where a rule expires all that was deleted, or nobody can say."""
        try:
            status = self._client.get_bucket_versioning(Bucket=self._place.bucket).get("Status")
        except weather():
            return False
        if status != "Enabled":
            return False
        rules: Sequence[Mapping[str, object]] = ()
        with contextlib.suppress(*weather()):
            answer = self._client.get_bucket_lifecycle_configuration(Bucket=self._place.bucket)
            rules = answer.get("Rules", ())
        return not any(_expires(rule, self._place.prefix) for rule in rules)

    # ---- who collects

    def claim(self, seconds: float) -> bool:
        """See Medium. By conditional PUTs; where a server ignores them, every claim succeeds."""
        body = msgspec.json.encode(_Claim(self._owner, seconds))
        if self._put(CLAIM, body, IfNoneMatch="*"):
            return True
        found = self._claimed()
        if found is None:
            return self._put(CLAIM, body, IfNoneMatch="*")
        claim, age, etag = found
        if claim.owner != self._owner and age < claim.seconds:
            return False
        return self._put(CLAIM, body, IfMatch=etag)

    def release(self) -> None:
        """See Medium. Only its own; a claim that cannot be given back ends by its time."""
        with contextlib.suppress(*weather()):
            found = self._claimed()
            if found is not None and found[0].owner == self._owner:
                self._client.delete_object(
                    Bucket=self._place.bucket, Key=self._place.prefix + CLAIM
                )

    def race(self, writers: int) -> int:
        """See Medium. The object is deleted afterwards."""
        name = f"{CLAIM}-race-{self._owner}"
        pool = IoPool("race", writers)

        def wins(at: int) -> bool:
            with contextlib.suppress(Unavailable):  # who is not answered was not told so
                return self._put(name, b"%d" % at, IfNoneMatch="*")
            return False

        try:
            won = pool.map(wins, range(writers))
        finally:
            pool.close()
            with contextlib.suppress(*weather()):
                self._client.delete_object(Bucket=self._place.bucket, Key=self._place.prefix + name)
        return sum(won)

    def _put(self, name: str, body: bytes, **condition: str) -> bool:
        """Write an object under a condition; False if that does not hold.

        A server that refuses conditions is taken for one that ignores them.
        """
        try:
            self._client.put_object(
                Bucket=self._place.bucket, Key=self._place.prefix + name, Body=body, **condition
            )
        except weather() as error:
            if error_code(error) in _TAKEN:
                return False
            if condition and error_code(error) in _UNKNOWN:
                return self._put(name, body)
            raise Unavailable(f"s3://{self._place.bucket}: {explain(error)}") from error
        return True

    def _claimed(self) -> tuple[_Claim, float, str] | None:
        """Return the claim that is there, its age, and its ETag."""
        try:
            answer = self._client.get_object(
                Bucket=self._place.bucket, Key=self._place.prefix + CLAIM
            )
            body = answer["Body"].read(4096)
        except weather() as error:
            if error_code(error) in ABSENT_CODES:
                return None
            raise Unavailable(f"s3://{self._place.bucket}: {explain(error)}") from error
        if not {"LastModified", "ETag"} <= answer.keys():  # an error in a 200, perhaps
            raise Unavailable(f"s3://{self._place.bucket}: the server did not answer with a claim")
        try:
            claim = msgspec.json.decode(body, type=_Claim)
        except msgspec.MsgspecError:  # somebody's, or of another version: it ends by its age
            claim = _Claim("", 3600.0)
        age = (_server_time(answer) - answer["LastModified"]).total_seconds()
        return claim, age, answer["ETag"]


def _expires(rule: Mapping[str, Any], prefix: str) -> bool:
    """Say whether a rule expires old versions of all that is below the prefix."""
    where = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    return (
        rule.get("Status") == "Enabled"
        and "NoncurrentVersionExpiration" in rule
        and where.keys() <= {"Prefix"}  # or only what has a tag, or a size
        and prefix.startswith(where.get("Prefix", ""))
    )


def _server_time(answer: Mapping[str, Any]) -> datetime:
    """Return the time by the server's clock, or ours if it does not say."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    with contextlib.suppress(TypeError, ValueError):
        return parsedate_to_datetime(said)
    return datetime.now(UTC)
